"""A copy of the tree in which tests run, with a Postgres that they share."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psycopg
from psycopg import sql

from idemconsumer.embedded.postgres import EmbeddedPostgres
from tests.mutants.table import Mutant
from tests.support import ROOT
from tests.support.servers.postgres import cheap_passwords

_COPIED: Final = (
    "idemconsumer", "migrations", "tests", "docs", "examples", "deploy", "benchmarks", "manual", "pyproject.toml",
    "Makefile",
    "README.md", "LICENSE", "CHANGELOG.md", "SECURITY.md",
)  # fmt: skip
_STRAYS_SECONDS: Final = 10.0


@dataclass(frozen=True)
class Run:
    """What pytest made of some tests."""

    code: int | None  # None: it was ended because it took too long
    seconds: float
    tests: Sequence[dict[str, Any]]
    said: str

    def failed(self) -> dict[str, Any] | None:
        return next((each for each in self.tests if each["outcome"] == "failed"), None)


class Lane:
    def __init__(self, number: int, lanes: int) -> None:
        self.folder = ROOT / "build" / "mutants" / str(number)
        self._outcomes = self.folder / "outcomes.jsonl"
        self._postgres = EmbeddedPostgres()
        self._environment = {
            **os.environ,
            "PYTHONPATH": str(self.folder),  # before the package that is installed
            "MUTANTS_OUTCOMES": str(self._outcomes),
            "CI": "1",  # a server that is missing is a failure
            # Each lane has ports of its own, as the processes of xdist have.
            "PYTEST_XDIST_WORKER_COUNT": str(lanes), "PYTEST_XDIST_WORKER": f"gw{number}",
        }  # fmt: skip
        self._environment.pop("IDEMCONSUMER_DSN", None)
        self._forking: subprocess.Popen[bytes] | None = None

    def open(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        for name in _COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, self.folder / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy2(ROOT / name, self.folder / name)
        program = "import idemconsumer, tests; print(idemconsumer.__file__); print(tests.__file__)"
        answer = subprocess.run(
            [sys.executable, "-c", program], cwd="/", env=self._environment, check=True, capture_output=True, text=True
        )
        if not all(Path(line).is_relative_to(self.folder) for line in answer.stdout.splitlines()):
            raise RuntimeError(f"not the copy in {self.folder} is imported:\n{answer.stdout}")
        self._postgres.start()
        cheap_passwords(self._postgres.dsn)
        self._forking = subprocess.Popen(
            [sys.executable, "-m", "tests.mutants.forking"], cwd=self.folder, env=self._environment,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0,
        )  # fmt: skip

    def close(self) -> None:
        if self._forking is not None:
            self._forking.kill()
            self._forking.wait()
            self._end_strays()
        self._postgres.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    @contextlib.contextmanager
    def mutated(self, mutant: Mutant) -> Iterator[None]:
        path = self.folder / mutant.file
        text = path.read_text("utf-8")
        try:
            _write(path, text.replace(mutant.text, mutant.becomes))
            yield
        finally:
            _write(path, text)

    def run(self, tests: Sequence[str], *options: str, seconds: float, shared: bool) -> Run:
        """`shared`: with the Postgres of this lane. Tests that kill or configure theirs need their own."""
        words = ["-q", "-n", "0", "-p", "no:cacheprovider", "-p", "no:faker", "-p", "tests.mutants.outcomes"]
        asked = {
            "words": [*words, *options, *tests],
            "environment": {"IDEMCONSUMER_DSN": self._postgres.dsn} if shared else {},
            "log": str(self.folder / "log"),
        }
        self._outcomes.write_text("")
        began = time.monotonic()
        code = self._forked(asked, seconds)
        took = time.monotonic() - began
        self._end_strays()
        if shared:
            self._clean()
        outcomes = [json.loads(line) for line in self._outcomes.read_text().splitlines()]
        return Run(code, took, outcomes, (self.folder / "log").read_text(errors="replace"))

    def _forked(self, asked: Mapping[str, object], seconds: float) -> int | None:
        forking = self._forking
        assert forking is not None
        assert forking.stdin is not None
        assert forking.stdout is not None
        forking.stdin.write(json.dumps(asked).encode() + b"\n")
        pid = int(forking.stdout.readline())
        in_time, _, _ = select.select([forking.stdout], [], [], seconds)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        code = int(forking.stdout.readline())
        return code if in_time else None

    def _end_strays(self) -> None:
        """What tests have started ends with them, servers with their watchdogs; what does not is killed."""
        deadline = time.monotonic() + _STRAYS_SECONDS
        while strays := [*self._strays()]:
            if time.monotonic() > deadline:
                for pid in strays:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                return
            time.sleep(0.05)

    def _strays(self) -> Iterator[int]:
        mark, forking = f"MUTANTS_OUTCOMES={self._outcomes}".encode(), self._forking
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                pid = int(path.parent.name)
                if mark in path.read_bytes().split(b"\0") and (forking is None or pid != forking.pid):
                    yield pid

    def _clean(self) -> None:
        """What tests that were ended have left on the server that others share."""
        with psycopg.connect(self._postgres.dsn, autocommit=True) as admin:
            for (name,) in admin.execute(
                "select datname from pg_database where datname ~ '^(test|migrated)_'"
            ).fetchall():
                admin.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))
            for (name,) in admin.execute("select rolname from pg_roles where oid >= 16384").fetchall():
                admin.execute(sql.SQL("DROP ROLE {}").format(sql.Identifier(name)))


def _write(path: Path, text: str) -> None:
    """Bytecode is believed by its second and size, so what is there of the file goes."""
    path.write_text(text, "utf-8")
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
        compiled.unlink()
