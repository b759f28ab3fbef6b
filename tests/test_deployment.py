"""What deploy/ has, as far as it can be looked at without Docker, Kubernetes and systemd as the first process."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path

import pytest

from idemconsumer.process.child import GRACE
from idemconsumer.settings import Settings, load
from tests.support import ROOT
from tests.support.deploy import DEPLOY, PROJECT, PYPROJECT, instructions, parsed

LONGEST = Settings().drain_timeout + 2 * GRACE + 1.0  # seconds until the launcher kills who is left


def pinned(image: str) -> bool:
    name, _, tag = image.rpartition(":")
    return bool(name) and tag != "latest" and tag[:1].isdigit()


# ------------------------------------------------------------------------------------------------------------ the image
def test_the_image_is_small_pinned_and_nobody() -> None:
    made = instructions()
    stages = [n for n, (word, _) in enumerate(made) if word == "FROM"]
    (base,) = {made[n][1].split()[0] for n in stages}
    assert re.fullmatch(r"python:3\.\d+\.\d+-slim-\w+@sha256:[0-9a-f]{64}", base), "`make base-image` writes it"
    assert len(stages) == 2, "what builds is not in the image"
    last = made[stages[-1] :]
    (user,) = (rest for word, rest in last if word == "USER")
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user), "a number, which runAsNonRoot can judge"
    assert [word for word, _ in last].index("USER") > max(n for n, (word, _) in enumerate(last) if word == "COPY")
    assert not any(word == "ADD" or "pip install" in rest for word, rest in last)
    environment = " ".join(rest for word, rest in made if word == "ENV")
    for name in ("UV_COMPILE_BYTECODE=1", "PYTHONDONTWRITEBYTECODE=1", "TMPDIR=/tmp"):
        assert name in environment
    entry, command = (json.loads(next(rest for word, rest in last if word == kind)) for kind in ("ENTRYPOINT", "CMD"))
    assert [*entry, command[0]] == ["idemconsumer", "run"], "not through a shell, which would not pass SIGTERM on"


def test_all_that_the_image_copies_is_there_and_nothing_else_is_sent() -> None:
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text("utf-8").split("\n")
    sent = [line[1:] for line in ignored if line.startswith("!")]
    assert "*" in ignored
    sources = [
        source
        for word, rest in instructions()
        if word == "COPY" and not rest.startswith("--from")
        for source in shlex.split(rest)[:-1]
    ]
    for source in sources:
        assert (ROOT / source).exists(), source
    assert sorted(sent) == sorted(sources)


# ------------------------------------------------------------------------------------------------------------- compose
def test_compose_has_each_broker_and_a_worker_that_may_do_little() -> None:
    services = parsed(DEPLOY / "compose.yaml")["services"]
    assert set(services) == {"postgres", "kafka", "rabbitmq", "sqs", "prepare", "worker"}
    for name, service in services.items():
        assert pinned(service["image"]) or service["image"] == "idemconsumer-payments", name
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", [])), name
        for other, how in service.get("depends_on", {}).items():
            assert how["condition"] != "service_healthy" or "healthcheck" in services[other], other
    for name in ("prepare", "worker"):
        service = services[name]
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        settings = load(service["environment"], Path("/nowhere"))
        assert None not in (settings.dsn, settings.kafka, settings.rabbitmq, settings.sqs)
    build = services["prepare"]["build"]
    assert (DEPLOY / build["context"] / build["dockerfile"]).exists()
    assert (DEPLOY / services["prepare"]["volumes"][0].partition(":")[0]).exists()
    assert int(services["worker"]["stop_grace_period"].removesuffix("s")) >= LONGEST


# ------------------------------------------------------------------------------------------------------------- systemd
def test_the_unit_waits_for_the_start_and_has_time_to_drain() -> None:
    unit = (DEPLOY / "systemd" / "idemconsumer.service").read_text("utf-8")
    lines = dict(line.split("=", 1) for line in unit.splitlines() if re.match(r"[A-Z]\w+=", line))
    assert lines["Type"] == "notify"
    assert lines["NotifyAccess"] == "main", "only the launcher knows of all workers"
    assert lines["TimeoutStartSec"] == "infinity"
    assert lines["KillMode"] == "mixed", "the launcher drains its workers; a second SIGTERM would cut them off"
    assert int(lines["TimeoutStopSec"]) >= LONGEST
    assert "DSN=" not in lines["ExecStart"]
    assert "--dsn" not in lines["ExecStart"]


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze") or pytest.skip("systemd-analyze is not installed")
    text = (DEPLOY / "systemd" / "idemconsumer.service").read_text("utf-8")
    text = text.replace("/opt/shop/venv/bin/idemconsumer", sys.executable)
    (tmp_path / "shop.service").write_text(text)
    found = subprocess.run([analyze, "verify", str(tmp_path / "shop.service")], capture_output=True, text=True)
    complaints = [line for line in found.stderr.splitlines() if "shop.service" in line]
    assert complaints == []


# ------------------------------------------------------------------------------------------------- locked dependencies
def locked(name: str) -> set[str]:
    """The packages of a lock that names no place, and hashes of each."""
    text = (ROOT / name).read_text("utf-8").replace("\\\n", " ")
    assert not re.search(r"https?://|file:|--(?:extra-)?index|/home/|/root/|/tmp/|@ ", text)
    for line in text.splitlines():
        assert re.fullmatch(r"[a-z0-9][\w.-]*==[^ ]+( ;[^-]+?)?(\s+--hash=sha256:[0-9a-f]{64})+", line), line
    return {line.partition("==")[0] for line in text.splitlines()}


def lacking(lock: str, asked: Iterable[str]) -> set[str]:
    names = {re.split(r"[\[<>=;! ]", each)[0].lower() for each in asked}
    return names - locked(lock) - {"idemconsumer"}


def test_the_lock_of_development_has_all_that_is_asked_for() -> None:
    extras = PROJECT["optional-dependencies"]
    asked = [*PROJECT["dependencies"], *(each for name in extras if name != "bench" for each in extras[name])]
    assert lacking("requirements-dev.lock", asked) == set()
    assert not any(fnmatch(name, "nvidia-*") for name in locked("requirements-dev.lock"))


def test_the_image_is_made_of_what_its_locks_have() -> None:
    (chosen,) = re.findall(r"(?m)^IMAGE_EXTRAS = (.+)", (ROOT / "Makefile").read_text("utf-8"))
    asked = [each for extra in chosen.split() for each in PROJECT["optional-dependencies"][extra]]
    assert lacking("deploy/requirements.lock", [*PROJECT["dependencies"], *asked]) == set()
    assert lacking("deploy/build.lock", ["uv", *PYPROJECT["build-system"]["requires"]]) == set()
    for install in (rest for word, rest in instructions() if word == "RUN" and "pip install" in rest):
        assert "--require-hashes" in install or "--no-deps --build-constraints build.lock" in install
