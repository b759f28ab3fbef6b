"""Commands and what they answer, as files: `$ COMMAND`, its stdout, its stderr behind `! `, its exit code.

What is another one each time has a name there: times keep their form, and tables are set again with the names in them.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import click
from click.testing import CliRunner
from psycopg.conninfo import conninfo_to_dict

from idemconsumer.cli.main import main
from tests.support import forked

GOLDEN: Final = Path(__file__).parent / "golden"
_TIME: Final = re.compile(r"\d{4}-\d\d-\d\d([ T])\d\d:\d\d(:\d\d(\.\d+)?)?( UTC|Z|\+00:00)?")
_LOG: Final = re.compile(r"\d{4}-\d\d-\d\dT")
_TABLE: Final = re.compile(r"[A-Z/ ]*\w  [A-Z/ ]+")
_COLUMN: Final = re.compile(r"\S+(?: \S+)*")
_AGES: Final = {"OLDEST", "OVERDUE", "FOR", "SEEN", "TOOK"}
_AGE: Final = re.compile(r"\d+ (ms|s|min|h|d)\b")
_PASSED: Final = re.compile(r"(?<=no sign of life for )\d+ s|\d+\.\d+ s(?= after it arrived)")
_PID: Final = re.compile(r'(?<=\bpid=)\d+|(?<="pid":)\d+')
_RANDOM: Final = re.compile(r"\b[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}\b")
_FRAMES: Final = re.compile(r"(Traceback \(most recent call last\):\n)(?: .*\n)+")
_OF_THEIR_OWN: Final = {
    "checksum": "<checksum>", "role": "<role>", "seconds": "<seconds>", "unseen": "<seconds>", "oldest": "<seconds>",
    "overdue": "<seconds>", "undo_seconds": "<seconds>",
}  # fmt: skip


def commands(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """All, groups too, with the words by which they are typed."""
    yield path, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            yield from commands(below, (*path, name))


@dataclass(frozen=True)
class Typed:
    """A line of a transcript: `$ [NAME=VALUE…] idemconsumer WORD… [<<< INPUT]`."""

    line: str

    @property
    def variables(self) -> dict[str, str]:
        return dict(word.split("=", 1) for word in self._split[: self._split.index("idemconsumer")])

    @property
    def words(self) -> list[str]:
        words = self._split[self._split.index("idemconsumer") + 1 :]
        return words[: words.index("<<<")] if "<<<" in words else words

    @property
    def stdin(self) -> str:
        return f"{self._split[-1]}\n" if "<<<" in self._split else ""

    @property
    def _split(self) -> list[str]:
        return shlex.split(self.line)


@dataclass(frozen=True)
class Answer:
    stdout: str
    stderr: str
    code: int


def typed(transcript: str) -> Iterator[tuple[Typed, int]]:
    """Each command with the exit code that is written below it, or -1."""
    for each in re.split(r"^\$ ", transcript, flags=re.MULTILINE)[1:]:
        line, *answer = each.splitlines()
        codes = [text.removeprefix("exit ") for text in answer if text.startswith("exit ")]
        yield Typed(line), int(codes[-1]) if codes else -1


class Shell:
    """In a folder, with a database, and perhaps a Kafka."""

    def __init__(self, folder: Path, dsn: str, kafka: str | None = None) -> None:
        self._folder = folder
        self._variables = {"IDEMCONSUMER_DSN": dsn, "COLUMNS": "80", "LOGNAME": "ann", "PGTZ": "UTC"}
        address = conninfo_to_dict(dsn)
        self._names = {} if kafka is None else {kafka: "<kafka>"}
        self._variables |= {} if kafka is None else {"IDEMCONSUMER_KAFKA": kafka}
        self._names |= {
            str(address["dbname"]): "<database>",
            f"{address['host']}:{address['port']}": "<server>",
            f"@{socket.gethostname()}": "@<machine>",
            f"{socket.gethostname()}:{os.getpid()}": "<worker>",
            f"{socket.gethostname()} {os.getpid()}": "<worker>",
            str(folder): "<folder>",
            sys.executable: "<python>",
            version("idemconsumer"): "<version>",
        }

    def transcript(self, commands: Iterator[Typed]) -> str:
        return "\n".join(self._written(command, self(command)) for command in commands)

    def __call__(self, command: Typed) -> Answer:
        """Here, if it is over when it returns, and leaves nothing behind; a worker has a process."""
        variables = self._variables | command.variables
        if command.words[:1] in (["run"], ["dev"]) and "--help" not in command.words:
            clean = {name: value for name, value in os.environ.items() if not name.startswith("IDEMCONSUMER_")}
            done = forked.run(
                "idemconsumer", *command.words, env=clean | variables, seconds=60, folder=self._folder,
                given=command.stdin, stderr=subprocess.PIPE,
            )  # fmt: skip
            # The launcher and its worker write to it side by side.
            told = sorted(done.stderr.splitlines(keepends=True), key=lambda line: "worker started" not in line)
            return Answer(done.stdout, "".join(told), done.returncode)
        runner = CliRunner(env={name: None for name in os.environ if name.startswith("IDEMCONSUMER_")})
        with contextlib.chdir(self._folder), _own_modules(self._folder), _own_log():
            result = runner.invoke(main, command.words, input=command.stdin, env=variables, prog_name="idemconsumer")
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise AssertionError(f"$ {command.line} ended in a traceback") from result.exception
        return Answer(result.stdout, result.stderr, result.exit_code)

    def _written(self, command: Typed, answer: Answer) -> str:
        exports = command.words[1:2] == ["export"] and "--help" not in command.words
        stdout = _json(answer.stdout) if exports or "--json" in command.words else answer.stdout
        lines = [f"$ {command.line}", *self._named(stdout)]
        lines += [f"! {line}".rstrip() for line in self._named(answer.stderr)]
        return "\n".join([*lines, f"exit {answer.code}", ""])

    def _named(self, text: str) -> Iterator[str]:
        lines = _FRAMES.sub(r"\1  <frames>\n", text).splitlines()
        return _set_again(lines, self._name)

    def _name(self, text: str) -> str:
        for value, name in self._names.items():
            text = text.replace(value, name)
        text = _PID.sub("<pid>", _PASSED.sub("<age>", _RANDOM.sub("<uuid>", text)))
        return _TIME.sub(_form, text)


def _form(time: re.Match[str]) -> str:
    between, seconds, fraction, zone = time.groups()
    whole = zone in ("Z", "+00:00")  # then one without a fraction is one in a million
    digits = ".ffffff" if whole else "" if fraction is None else "." + "f" * (len(fraction) - 1)
    return f"YYYY-MM-DD{between}hh:mm{':ss' if seconds else ''}{digits}{zone or ''}"


def _json(stdout: str) -> str:
    """Each document, indented."""
    documents = [json.loads(line, object_hook=_of_their_own) for line in stdout.splitlines()]
    return "".join(f"{json.dumps(each, indent=1, ensure_ascii=False)}\n" for each in documents)


def _of_their_own(fields: dict[str, Any]) -> dict[str, Any]:
    """Values that are not the same each time are named by their fields."""
    named = {
        name: _OF_THEIR_OWN[name]
        for name, value in fields.items()
        if name in _OF_THEIR_OWN and value and not _TIME.fullmatch(str(value))
    }
    traced = {name: _FRAMES.sub(r"\1  <frames>\n", value) for name, value in fields.items() if isinstance(value, str)}
    return fields | traced | named


def _set_again(lines: list[str], named: Callable[[str], str]) -> Iterator[str]:
    """Each table is set again with the names in its cells, each of which began below its title."""
    for is_table, group in groupby(lines, _in_table()):
        if not is_table:
            yield from map(named, group)
            continue
        title, *rows = group
        starts = [column.start() for column in _COLUMN.finditer(title)]
        cells = [[named(cell) for cell in _cells(line, starts)] for line in (title, *rows)]
        columns = [_aged(column) for column in zip(*cells, strict=True)]
        widths = [max(map(len, column)) for column in columns]
        yield from ("  ".join(map(str.ljust, row, widths)).rstrip() for row in zip(*columns, strict=True))


def _in_table() -> Callable[[str], bool]:
    """Whether a line is of a table, which goes from its titles to an empty line, or to a log."""
    inside = False

    def is_inside(line: str) -> bool:
        nonlocal inside
        inside = bool(line) and _LOG.match(line) is None and (inside or _TABLE.fullmatch(line) is not None)
        return inside

    return is_inside


def _cells(line: str, starts: list[int]) -> list[str]:
    assert all(line[start - 1 : start].strip() == "" for start in starts), f"not below its title: {line}"
    return [line[start:end].strip() for start, end in zip(starts, [*starts[1:], None], strict=True)]


def _aged(column: tuple[str, ...]) -> list[str]:
    title, *cells = column
    if title == "ROLE":
        return [title, *("<role>" for _ in cells)]
    return [title, *(_AGE.sub("<age>", cell) if title in _AGES else cell for cell in cells)]


@contextlib.contextmanager
def _own_modules(folder: Path) -> Iterator[None]:
    """A command imports what is in its folder, where others have a module of the same name."""
    path, names = list(sys.path), [file.stem for file in folder.glob("*.py")]
    before = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    try:
        yield
    finally:
        sys.path[:] = path
        for name in names:
            sys.modules.pop(name, None)
        sys.modules.update(before)


@contextlib.contextmanager
def _own_log() -> Iterator[None]:
    """What is logged goes to stderr as in a process of its own, and not to pytest."""
    logger = logging.getLogger("idemconsumer")
    logger.propagate = False
    try:
        yield
    finally:
        logger.propagate = True
