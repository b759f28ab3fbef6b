"""Real parents, real workers, real signals. Each test directs its workers through a Unix socket."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import sys
import time
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from idemconsumer.process.child import LIFELINE, Exit
from idemconsumer.process.notify import ServiceManager
from idemconsumer.process.supervisor import Restarts
from tests.support import ROOT, forked
from tests.support.waiting import PATIENCE, until


@dataclass
class Stage:
    """The socket that all workers of one test report to."""

    address: Path
    said: list[dict[str, Any]] = field(default_factory=list)
    writers: dict[int, asyncio.StreamWriter] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)
    news: asyncio.Condition = field(default_factory=asyncio.Condition)
    processes: list[Process] = field(default_factory=list)

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        pid = 0
        with contextlib.suppress(ConnectionError):
            while line := await reader.readline():
                event = json.loads(line)
                pid = event["pid"]
                async with self.news:
                    self.said.append(event)
                    self.writers[pid] = writer
                    self.news.notify_all()
        async with self.news:
            self.gone.add(pid)  # its end of the socket is closed: by exit, or by the kernel
            self.news.notify_all()

    async def until(self, event: str, count: int = 1, **fields: object) -> list[int]:
        """Wait until this was said so often; the pids that said it, in order."""

        def pids() -> list[int]:
            wanted = {"event": event, **fields}.items()
            return [each["pid"] for each in self.said if wanted <= each.items()]

        async with asyncio.timeout(PATIENCE), self.news:
            await self.news.wait_for(lambda: len(pids()) >= count)
        return pids()

    async def until_gone(self, *pids: int) -> None:
        async with asyncio.timeout(PATIENCE), self.news:
            await self.news.wait_for(lambda: set(pids) <= self.gone)

    async def order(self, pid: int, order: str) -> None:
        """Sent; what begins or ends is also waited for."""
        heard = sum(each["event"] == "heard" and each["pid"] == pid for each in self.said)
        self.writers[pid].write(order.encode() + b"\n")
        if order.startswith(("ignore", "beat")) or order == "thread":
            await self.until("heard", heard + 1, pid=pid)

    async def run(
        self, role: str = "parent", *, stderr: int | None = None, env: dict[str, str] | None = None, **options: object
    ) -> Process:
        defaults: dict[str, object] = {"workers": 2, "drain_timeout": 20, "max_restarts": 5}
        process = await forked.start(
            sys.executable, "-m", "tests.process.supervised", role, str(self.address), json.dumps(defaults | options),
            cwd=ROOT, env=self.environment(options) | (env or {}), stdin=asyncio.subprocess.DEVNULL, stderr=stderr,
        )  # fmt: skip
        self.processes.append(process)
        return process

    @staticmethod
    def environment(options: dict[str, object]) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("IDEMCONSUMER_")}
        return kept | {"DRAIN_TIMEOUT": str(options.get("drain_timeout", 20))}


async def code_of(process: Process) -> int:
    async with asyncio.timeout(PATIENCE):
        return await process.wait()


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    made = Stage(tmp_path / "s")
    server = await asyncio.start_unix_server(made.connected, made.address)
    yield made
    server.close()
    for pid in [process.pid for process in made.processes if process.returncode is None] + list(made.writers):
        if pid not in made.gone:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    for process in made.processes:
        await process.wait()


async def test_a_signal_reaches_all_workers_and_a_clean_drain_is_exit_0(stage: Stage) -> None:
    parent = await stage.run(workers=3)
    await stage.until("started", 3)

    parent.send_signal(signal.SIGTERM)

    assert await code_of(parent) == Exit.DONE
    assert len(await stage.until("draining", 3)) == 3


async def test_a_crashed_worker_comes_back_in_its_place_and_the_others_go_on(stage: Stage) -> None:
    parent = await stage.run()
    (first,), (other,) = await stage.until("started", worker=0), await stage.until("started", worker=1)

    await stage.order(first, "die")
    _, second = await stage.until("started", 2, worker=0)

    assert second != first
    assert other not in stage.gone
    assert parent.returncode is None


async def test_a_worker_that_leaves_by_itself_without_being_asked_comes_back_too(stage: Stage) -> None:
    await stage.run(workers=1)
    (first,) = await stage.until("started")

    os.kill(first, signal.SIGTERM)

    assert len(await stage.until("started", 2)) == 2


async def test_a_worker_that_crashes_too_often_ends_everything_with_exit_3(stage: Stage) -> None:
    parent = await stage.run(max_restarts=1)
    (first,) = await stage.until("started", worker=0)
    await stage.until("started", worker=1)

    await stage.order(first, "exit 1")
    _, second = await stage.until("started", 2, worker=0)
    await stage.order(second, "die")

    assert await code_of(parent) == Exit.CRASHED
    assert len(await stage.until("draining", worker=1)) == 1


@pytest.mark.parametrize(
    ("order", "said"),
    [
        ("die", "by SIGKILL: killed from outside, perhaps by the out-of-memory killer"),
        ("raise", "with code 1: RuntimeError: the pool is misbuilt, on two lines"),
        ("leave", "with code 1: event loop blocked, where: here"),
        ("exit 9", "with code 9"),
    ],
)
async def test_the_last_line_of_one_that_gives_up_says_why(stage: Stage, order: str, said: str) -> None:
    parent = await stage.run(max_restarts=0, stderr=asyncio.subprocess.PIPE)
    (first,) = await stage.until("started", worker=0)
    await stage.until("started", worker=1)
    await stage.order(first, order)
    async with asyncio.timeout(PATIENCE):
        _, output = await parent.communicate()
    assert parent.returncode == Exit.CRASHED
    last = output.decode().splitlines()[-1]
    assert re.search(rf'cannot run error="worker 0 died 1 times in ten minutes, the last time .* s, {said}"$', last)


async def test_workers_are_gone_when_their_parent_was_killed(stage: Stage) -> None:
    parent = await stage.run()
    pids = await stage.until("started", 2)

    parent.kill()

    await stage.until_gone(*pids)
    assert sorted(await stage.until("draining", 2)) == sorted(pids)


async def test_a_frozen_worker_does_not_keep_the_others_from_being_told_and_is_killed_at_the_deadline(
    stage: Stage,
) -> None:
    parent = await stage.run(drain_timeout=0.2)
    frozen, other = await stage.until("started", 2)
    await stage.order(frozen, "freeze")
    await stage.until("frozen")

    parent.send_signal(signal.SIGTERM)

    assert await stage.until("draining", pid=other) == [other]
    assert await code_of(parent) == Exit.CUT_OFF
    await stage.until_gone(frozen)


async def test_a_worker_in_which_no_thread_runs_any_more_is_killed_and_started_again(stage: Stage) -> None:
    await stage.run()
    (held,), (silent,) = await stage.until("started", worker=0), await stage.until("started", worker=1)
    for pid in held, silent:
        await stage.order(pid, "beat 1")
    await stage.order(silent, "beat-no-more")  # earlier, so that it would be killed first

    await stage.order(held, "hold")

    await stage.until_gone(held)
    assert len(await stage.until("started", 2, worker=0)) == 2
    assert silent not in stage.gone


async def test_a_worker_whose_event_loop_stands_still_ends_itself(stage: Stage) -> None:
    await stage.run(workers=1)
    (spinning,) = await stage.until("started")
    await stage.order(spinning, "beat-and-watch 1")

    await stage.order(spinning, "spin")

    await stage.until_gone(spinning)
    assert len(await stage.until("started", 2)) == 2, "another one takes its place: it did not end as if it were done"


async def test_all_workers_share_one_deadline(stage: Stage) -> None:
    parent = await stage.run(workers=4, drain_timeout=1.0)
    for pid in await stage.until("started", 4):
        await stage.order(pid, "ignore-drain")

    asked = time.monotonic()
    parent.send_signal(signal.SIGTERM)

    assert await code_of(parent) == Exit.CUT_OFF
    assert len(await stage.until("aborting", 4)) == 4
    assert 1.0 <= time.monotonic() - asked < 10.0  # one after another would take at least ten


async def test_a_second_signal_stops_now(stage: Stage) -> None:
    parent = await stage.run(drain_timeout=600)
    for pid in await stage.until("started", 2):
        await stage.order(pid, "ignore-drain")

    parent.send_signal(signal.SIGINT)
    await stage.until("draining", 2)
    parent.send_signal(signal.SIGINT)

    assert await code_of(parent) == Exit.CUT_OFF
    assert len(await stage.until("aborting", 2)) == 2


async def test_the_terminals_interrupt_is_the_parents_alone(stage: Stage) -> None:
    await stage.run(workers=1)
    (pid,) = await stage.until("started")

    assert os.getpgid(pid) != os.getpgid(stage.processes[0].pid)
    os.kill(pid, signal.SIGINT)
    await stage.order(pid, "ignore-drain")  # still there and listening

    assert [each["event"] for each in stage.said] == ["started", "heard"]


async def test_a_usage_error_of_the_workers_is_not_retried_and_is_exit_2(stage: Stage) -> None:
    parent = await stage.run()
    first, second = await stage.until("started", 2)

    await stage.order(first, "exit 2")
    await stage.order(second, "exit 2")

    assert await code_of(parent) == Exit.USAGE
    assert len(await stage.until("started", 2)) == 2


async def test_all_workers_finding_their_sources_empty_is_exit_0(stage: Stage) -> None:
    parent = await stage.run(until_empty=True)
    for pid in await stage.until("started", 2):
        await stage.order(pid, "finish")

    assert await code_of(parent) == Exit.DONE
    assert len(await stage.until("started", 2)) == 2


async def test_a_changed_file_restarts_all_workers_and_a_crashed_one_waits_for_it(stage: Stage, tmp_path: Path) -> None:
    watched = tmp_path / "code"
    watched.mkdir()
    await stage.run(watched=str(watched))
    first, second = await stage.until("started", 2)
    await stage.order(first, "exit 2")
    await stage.until_gone(first)

    async with asyncio.timeout(PATIENCE):
        while not any(each["event"] == "draining" for each in stage.said):
            (watched / "handlers.py").write_text(f"# {time.monotonic()}")
            await asyncio.sleep(0.2)  # the watcher may not be up yet, and it gathers changes

    assert await stage.until("draining", pid=second) == [second]
    assert len(await stage.until("started", 2, worker=0)) == 2


async def test_a_worker_without_a_parent_drains_at_the_first_interrupt_and_stops_at_the_second(
    stage: Stage,
) -> None:
    worker = await stage.run("worker")
    (pid,) = await stage.until("started")
    await stage.order(pid, "ignore-drain")

    worker.send_signal(signal.SIGINT)
    await stage.until("draining")
    worker.send_signal(signal.SIGINT)

    assert await code_of(worker) == Exit.CUT_OFF
    assert len(await stage.until("aborting")) == 1


@pytest.mark.parametrize("stubborn", ["ignore-abort", "thread"])
async def test_what_ignores_its_cancellation_ends_with_the_process(stage: Stage, stubborn: str) -> None:
    worker = await stage.run("worker", drain_timeout=0.1)
    (pid,) = await stage.until("started")
    await stage.order(pid, stubborn)  # a thread is like a handler that is not async and does not come back

    worker.send_signal(signal.SIGTERM)

    assert await code_of(worker) == Exit.CUT_OFF


def test_the_lifeline_is_not_in_our_own_environment() -> None:
    assert LIFELINE not in os.environ


def test_pauses_double_up_to_thirty_seconds_and_start_anew_after_a_steady_minute() -> None:
    restarts, pauses = Restarts(100), []
    for n in range(9):
        restarts = restarts.crashed(float(n), lived=1.0)
        pauses.append(restarts.pause)
    assert pauses == [0, 0.5, 1, 2, 4, 8, 16, 30, 30]

    assert restarts.crashed(100.0, lived=60.0).pause == 0


def test_only_the_crashes_of_the_last_ten_minutes_count() -> None:
    restarts = Restarts(2).crashed(0.0, 1.0).crashed(1.0, 1.0)
    assert not restarts.exhausted
    assert restarts.crashed(2.0, 1.0).exhausted
    assert not restarts.crashed(600.5, 1.0).exhausted


async def test_a_worker_that_was_asked_to_leave_has_no_successor_until_a_hangup(stage: Stage) -> None:
    parent = await stage.run()
    (first,), (other,) = await stage.until("started", worker=0), await stage.until("started", worker=1)
    await stage.order(first, "ask")
    await stage.until_gone(first)
    await stage.order(other, "die")
    await stage.order((await stage.until("started", 2, worker=1))[1], "die")
    again = (await stage.until("started", 3, worker=1))[2]  # by then the first one's place would have been filled, too
    assert await stage.until("started", worker=0) == [first]

    parent.send_signal(signal.SIGHUP)

    second = (await stage.until("started", 2, worker=0))[1]
    assert again not in stage.gone  # one after the other: until the new one shows a sign of life
    await stage.order(second, "beat 30")
    await stage.until("draining", pid=again)
    await stage.until("started", 4, worker=1)
    parent.send_signal(signal.SIGTERM)
    assert await code_of(parent) == Exit.DONE


@pytest.mark.parametrize("stubborn", [False, True])
async def test_a_worker_that_was_asked_says_so_whether_it_gets_ready_or_not(stage: Stage, stubborn: bool) -> None:
    worker = await stage.run("worker", drain_timeout=0.1 if stubborn else 20)
    (pid,) = await stage.until("started")
    if stubborn:
        await stage.order(pid, "ignore-abort")
    await stage.order(pid, "ask")
    assert await code_of(worker) == Exit.DRAINED


async def test_settings_that_are_not_allowed_leave_the_workers_alone(stage: Stage, tmp_path: Path) -> None:
    settings = tmp_path / "settings"
    settings.write_text("wrong")
    parent = await stage.run(workers=1, settings=str(settings))
    await stage.until("started")
    parent.send_signal(signal.SIGHUP)
    await until(settings.with_suffix(".read").exists)
    settings.write_text("right")
    parent.send_signal(signal.SIGHUP)
    await stage.until("started", 2)  # by this signal, and not by the first one
    assert settings.with_suffix(".read").read_text() == "right"
    parent.send_signal(signal.SIGTERM)
    assert await code_of(parent) == Exit.DONE

    assert len(await stage.until("started")) == 2


class Manager:
    """A service manager that listens as systemd does (O18)."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._said = asyncio.Queue[str]()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._socket.bind("\0" + address[1:] if address.startswith("@") else address)
        # At once: a queue of the kernel holds ten.
        asyncio.get_running_loop().add_reader(
            self._socket, lambda: self._said.put_nowait(self._socket.recv(1024).decode())
        )

    async def heard(self, seconds: float = PATIENCE) -> str:
        async with asyncio.timeout(seconds):
            return await self._said.get()

    async def until(self, text: str) -> list[str]:
        """What comes before it."""
        before = list[str]()
        async with asyncio.timeout(PATIENCE):
            while (said := await self.heard()) != text:
                before.append(said)
        return before

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()


@pytest.fixture
async def manager(tmp_path: Path) -> AsyncIterator[Manager]:
    made = Manager(str(tmp_path / "n"))
    yield made
    made.close()


async def test_the_manager_is_told_of_the_start_when_all_workers_are_at_work_and_of_the_stop(
    stage: Stage, manager: Manager
) -> None:
    parent = await stage.run(env={"NOTIFY_SOCKET": manager.address})
    first, second = await stage.until("started", 2)
    for pid in first, second:
        assert b"NOTIFY_SOCKET" not in Path(f"/proc/{pid}/environ").read_bytes()

    await stage.order(first, "beat 60")
    with pytest.raises(TimeoutError):
        await manager.heard(0.1)
    await stage.order(second, "beat 60")
    assert await manager.heard() == "READY=1"

    await stage.order(first, "die")
    again = (await stage.until("started", 3))[-1]
    await stage.order(again, "beat 60")
    parent.send_signal(signal.SIGTERM)
    assert await manager.heard() == "STOPPING=1"
    assert await code_of(parent) == Exit.DONE


async def test_no_sign_of_life_while_a_worker_hangs_that_nothing_ends(stage: Stage, manager: Manager) -> None:
    environment = {"NOTIFY_SOCKET": manager.address, "WATCHDOG_USEC": "100000"}
    await stage.run(workers=1, powerless=True, env=environment)
    (held,) = await stage.until("started")
    await stage.order(held, "beat 1")
    await manager.until("READY=1")
    await manager.until("WATCHDOG=1")

    await stage.order(held, "hold")
    assert set(await manager.until("STATUS=silent")) == {"WATCHDOG=1"}, "this long it may be silent"
    with pytest.raises(TimeoutError):
        await manager.heard(0.5)

    os.kill(held, signal.SIGKILL)
    assert await manager.heard() == "WATCHDOG=1"


async def test_an_abstract_address_and_a_watchdog_of_another_process() -> None:
    manager = Manager(f"@idemconsumer-{os.getpid()}")
    environ = {"NOTIFY_SOCKET": manager.address, "WATCHDOG_USEC": "100000", "WATCHDOG_PID": "1", "OTHER": "kept"}
    ours = ServiceManager(environ)
    assert environ == {"OTHER": "kept"}
    await ours.watch(lambda: True)  # returns: it is not for us
    ours.ready()
    assert await manager.heard() == "READY=1"
    manager.close()
    ours.stopping()  # nobody listens any more, and that is no error
