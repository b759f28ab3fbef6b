"""What each command answers, as files: `golden/*.txt`, which `make golden` writes again."""

from __future__ import annotations

import asyncio
import difflib
import os
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import chain
from pathlib import Path

import click
import pytest

from idemconsumer.cli.main import main
from tests.cli.seeding import begin, copied, seed_kafka
from tests.cli.transcripts import GOLDEN, Shell, Typed, commands, typed
from tests.support.servers.made import PostgresServer, Server

FILES = sorted(GOLDEN.glob("*.txt"))
ENDLESS = {"demo", "dev"}  # they have tests of their own
WITH_KAFKA = {"kafka_reset"}
CHANGING = {"dev", "migrate_up", "prune", "publish", "run"}


COMMANDS = {"_".join(path) or "idemconsumer": command for path, command in commands(main)}


@pytest.fixture(scope="module")
def shared(postgres18: PostgresServer, seeded: str) -> Iterator[str]:
    """A copy for those commands that only read."""
    with copied(postgres18, seeded) as dsn:
        yield dsn


@pytest.fixture
def seeded_kafka(kafka: Server) -> str:
    asyncio.run(seed_kafka(kafka.address))
    return kafka.address


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_it_answers_as_it_is_written(
    file: Path, postgres18: PostgresServer, seeded: str, shared: str, request: pytest.FixtureRequest
) -> None:
    written = file.read_text()
    kafka = request.getfixturevalue("seeded_kafka") if file.stem in WITH_KAFKA else None
    with copied(postgres18, seeded) if changes(file) else nullcontext(shared) as dsn:
        begin(dsn)
        answered = Shell(GOLDEN, dsn, kafka).transcript(command for command, _ in typed(written))
    if os.environ.get("GOLDEN") == "renew":
        file.write_text(answered)
    elif answered != written:
        before, after = written.splitlines(), answered.splitlines()
        diff = "\n".join(difflib.unified_diff(before, after, f"golden/{file.name}", "answered", lineterm=""))
        pytest.fail(f"{diff}\nIf this is meant: `make golden`, and look at the difference.", pytrace=False)


def changes(file: Path) -> bool:
    """Whoever decides anything can say `by` whom."""
    command = COMMANDS[file.stem]
    return file.stem in CHANGING or any(parameter.name == "by" for parameter in command.params)


def test_each_command_has_a_file_with_every_kind_of_answer() -> None:
    assert {file.stem for file in FILES} == COMMANDS.keys()
    assert list(chain.from_iterable(lacking(file, COMMANDS[file.stem]) for file in FILES)) == []


def lacking(file: Path, command: click.Command) -> Iterator[str]:
    found = list(typed(file.read_text()))
    path = [] if file.stem == "idemconsumer" else file.stem.split("_")
    yield from (f"{file.name}: another command, {each.line}" for each, _ in found if each.words[: len(path)] != path)
    needed = {("--help", True), ("text", False)}
    if not isinstance(command, click.Group) and file.stem not in ENDLESS:
        needed.add(("text", True))
        if any(parameter.name == "as_json" for parameter in command.params):
            needed.add(("--json", True))
    for kind, well in sorted(needed - {(kind_of(each), code == 0) for each, code in found}):
        yield f"{file.name}: no {kind} that ends {'well' if well else 'in a failure'}"


def kind_of(command: Typed) -> str:
    return next((word for word in ("--help", "--json") if word in command.words), "text")
