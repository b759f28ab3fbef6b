"""What tests start as a fork is to everybody what they would start as a process of its own."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support import ROOT, forked
from tests.support.pids import children

SEES = "tests.process.surroundings"


def seen(start: Callable[..., subprocess.Popen[str]], **options: Any) -> list[Any]:
    pipe = subprocess.PIPE
    with start(
        [sys.executable, "-m", SEES, "starts"], stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True, **options
    ) as process:
        out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (7, 2 * "over\n")
    answer: list[Any] = json.loads(out)
    return answer


@pytest.mark.parametrize("session", [False, True])
def test_it_sees_what_a_process_of_its_own_sees(session: bool, tmp_path: Path) -> None:
    reading, writing = os.pipe()
    answers = [
        seen(start, cwd=tmp_path, env=os.environ | {"MORE": "ü"}, pass_fds=[writing], start_new_session=session)
        for start in (subprocess.Popen, forked.Popen)
    ]
    os.close(reading)
    os.close(writing)
    (real, its, below), (fork, forks, under) = answers
    for process in (fork, under[0]):
        process["descriptors"].remove(forked.HIGH)  # by which it asks for others
    assert fork == real
    assert its["parent"] == forks["parent"] == os.getpid()
    assert under[0] == below[0]
    assert below[1]["parent"] == under[1]["parent"] == 0, "whoever has started it"
    assert under[1]["chance"] != forks["chance"]


def test_it_is_killed_and_waited_for_and_has_no_other_children() -> None:
    command = [sys.executable, "-m", "tests.process.supervised", "worker", "/nowhere"]
    pipe = subprocess.PIPE
    held = forked.Popen([sys.executable, "-m", "asyncio"], stdin=pipe, stdout=subprocess.DEVNULL, stderr=pipe)
    below = set[int]()
    assert held.stderr is not None
    while not select.select([held.stderr], (), (), 0)[0]:  # until it runs
        below.update(children(held.pid))
    assert not below
    held.kill()
    held.communicate()
    assert held.returncode == -signal.SIGKILL
    failing: forked.Popen[bytes] = forked.Popen(
        command, cwd=ROOT, stderr=subprocess.PIPE, env=os.environ | {"DRAIN_TIMEOUT": "1"}
    )
    assert b"FileNotFoundError" in failing.communicate(timeout=60)[1]
    assert failing.returncode == 1


def test_what_the_interpreter_reads_when_it_starts_needs_a_process_of_its_own() -> None:
    optimized = os.environ | {"PYTHONOPTIMIZE": "1"}
    command = [sys.executable, "-m", "timeit", "-n1", "-r1", "print(__debug__)"]
    for environment, debug in ((os.environ, "True"), (optimized, "False")):
        with forked.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
            assert process.communicate(timeout=60)[0].startswith(debug)
