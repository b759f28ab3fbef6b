"""docs/tutorial.md, as a reader does it: each file, each command, each output."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.support.pages import Commands, File, Printed, matches, shows, steps
from tests.support.waiting import eventually

BINARIES = Path(sys.executable).parent
# The reader waits until a killed worker's messages are delivered again; the test does not.
DUE = "update idemconsumer.queue set visible_at = now() where %s"


class Reader:
    """Two terminals in one folder: `idemconsumer dev` runs in the first, everything else in the second."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith("IDEMCONSUMER_")}
        self.environment |= {"PATH": f"{BINARIES}:{os.environ['PATH']}", "IDEMCONSUMER_LOG_FORMAT": "console"}
        self.log = folder / "first-terminal"
        self.seen = 0  # characters of the log that the page has spoken of
        self.worker: subprocess.Popen[bytes] | None = None

    def start(self, command: str) -> None:
        with self.log.open("wb") as log:
            self.worker = subprocess.Popen(
                command.split(), cwd=self.folder, env=self.environment, stdout=log, stderr=log, start_new_session=True
            )

    def stop(self) -> None:
        if self.worker is not None:
            self.worker.send_signal(signal.SIGINT)
            self.worker.wait(30)

    def logged(self) -> str:
        return self.log.read_text("utf-8")[self.seen :] if self.log.exists() else ""

    def looks(self, printed: str) -> None:
        eventually(lambda: shows(printed, self.logged()), f"{printed!r} in the first terminal")
        self.seen += len(self.logged())

    def changes(self) -> int:
        return self.whole().count("reloading") if self.worker is not None else 0

    def reloads(self, changes: int) -> None:
        """Wait until the code that was saved after so many changes runs, or has died."""
        eventually(lambda: self.changes() > changes, "the change is noticed")
        state = re.compile(r"reloading|consuming +feed=postgres|waiting for a file change")
        eventually(lambda: state.findall(self.whole())[-1:] != ["reloading"], "a worker runs again")

    def whole(self) -> str:
        return self.log.read_text("utf-8")

    def waits(self) -> None:
        """As a reader takes longer to look than a worker to work."""
        with psycopg.connect(self.environment["IDEMCONSUMER_DSN"], autocommit=True) as db:
            eventually(lambda: self.is_quiet(db), "everything is done")

    def is_quiet(self, db: psycopg.Connection[Any]) -> bool:
        """Nothing waits for a worker, or there is none."""
        if "waiting for a file change" in self.whole().rpartition("worker started")[2]:
            return True
        db.execute(DUE, (self.killed(),))
        left = "select (select count(*) from idemconsumer.queue) + (select count(*) from idemconsumer.saga)"
        return db.execute(left).fetchone() == (0,)

    def killed(self) -> bool:
        return "worker died" in self.whole().rpartition("reloading")[0]

    def types(self, commands: Commands) -> None:
        printed = ""
        for line in commands.lines:
            if line.startswith("export IDEMCONSUMER_DSN="):
                (dsn,) = re.findall(r"IDEMCONSUMER_DSN='(.*)'", self.whole())
                self.environment["IDEMCONSUMER_DSN"] = dsn
                continue
            if "IDEMCONSUMER_DSN" in self.environment and not line.startswith("rm"):
                self.waits()
            changes = self.changes()
            done = subprocess.run(
                line, shell=True, cwd=self.folder, env=self.environment, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
            printed += done.stdout
            if line.startswith("touch") and line.endswith(".py"):
                self.reloads(changes)
        if commands.printed is not None:
            assert matches(commands.printed, printed), f"{commands.lines}\n{printed}"

    def writes(self, file: File) -> None:
        changes = self.changes()
        file.write(self.folder)
        if file.added:
            self.reloads(changes)


@pytest.mark.slow
def test_the_tutorial_prints_what_it_says(tmp_path: Path, postgres18: object) -> None:
    reader = Reader(tmp_path)
    try:
        for step in steps("tutorial.md"):
            match step:
                case File():
                    reader.writes(step)
                case Commands(lines=[command], printed=printed) if command.startswith("idemconsumer dev"):
                    assert printed is not None
                    reader.start(command)
                    reader.looks(printed)
                case Commands():
                    reader.types(step)
                case Printed(text):
                    reader.looks(text)
    finally:
        reader.stop()
