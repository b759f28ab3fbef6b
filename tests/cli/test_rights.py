"""The least role that may run each command (O35), over the database of the golden outputs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import click
import psycopg
import pytest
from click.testing import CliRunner, Result
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from idemconsumer.cli.failures import LEAST, READS, least
from idemconsumer.cli.main import main
from idemconsumer.stores import grants
from tests.cli.seeding import begin, copied
from tests.cli.transcripts import GOLDEN, Shell, commands, typed
from tests.support.servers.made import PostgresServer

WRITING = {
    *("dead discard", "dead redrive", "dead runs", "drain", "kafka reset", "keys release"),
    *("outbox discard", "outbox retry", "pause", "resume", "run"),
    *("sagas abandon", "sagas cancel", "sagas decide", "sagas move", "sagas resume", "sagas signal", "skip"),
}
# What a worker's role sees of itself is another thing.
OF_THE_ROLE = re.compile(r"; this role may only read[^\n\"]*")


@pytest.fixture(scope="module")
def stored(postgres18: PostgresServer, seeded: str) -> Iterator[str]:
    with copied(postgres18, seeded) as dsn:
        with psycopg.connect(dsn, autocommit=True) as connection:
            for schema in ("idemconsumer", "empty", "behind"):  # what roles have by default
                connection.execute(f"revoke execute on all functions in schema {schema} from public".encode())
        yield dsn


@contextmanager
def role_of(dsn: str, kind: str) -> Iterator[str]:
    """One with these rights alone; its address."""
    name = f"{kind}_{conninfo_to_dict(dsn)['dbname']}"
    password = str(conninfo_to_dict(dsn).get("password", ""))
    role = sql.Identifier(name)
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(sql.SQL("create role {} login password {}").format(role, password))
        try:
            for schema in ("idemconsumer", "empty", "behind"):
                for statement in getattr(grants, kind)(schema, name):
                    connection.execute(statement.encode())
            yield make_conninfo(dsn, user=name)
        finally:
            connection.execute(sql.SQL("drop owned by {}").format(role))
            connection.execute(sql.SQL("drop role {}").format(role))


@pytest.fixture(scope="module")
def reader(stored: str) -> Iterator[str]:
    with role_of(stored, "reader") as dsn:
        yield dsn


def run(dsn: str, *words: str) -> Result:
    return CliRunner().invoke(main, list(words), env={"IDEMCONSUMER_DSN": dsn})


def test_each_command_is_known() -> None:
    leaves = {" ".join(path) for path, command in commands(main) if not isinstance(command, click.Group)}
    named = {command for its in LEAST.values() for command in its}
    assert sorted(named | WRITING) == sorted(leaves)
    assert not named & WRITING
    assert {least(each) for each in WRITING} == {"worker"}


@pytest.mark.parametrize("command", LEAST["reader"])
def test_the_reading_role_is_answered_as_everybody_is(stored: str, reader: str, command: str) -> None:
    written = (GOLDEN / f"{command.replace(' ', '_')}.txt").read_text()
    begin(stored)
    assert OF_THE_ROLE.sub("", Shell(GOLDEN, reader).transcript(each for each, _ in typed(written))) == written


@pytest.mark.parametrize(
    "words",
    [
        ("dead", "discard", "--reason", "attempts_exhausted", "--dry-run"),
        ("dead", "redrive", "--reason", "attempts_exhausted", "--dry-run"),
        ("dead", "runs"),
        ("outbox", "discard", "--all", "--waiting", "--dry-run"),
        ("prune", "--dry-run"),
        ("skip",),
    ],
)
def test_so_is_the_half_of_a_command_that_only_reads(stored: str, reader: str, words: tuple[str, ...]) -> None:
    assert words[0] in READS or " ".join(words[:2]) in READS
    as_owner, as_reader = run(stored, *words), run(reader, *words)
    assert (as_reader.exit_code, as_reader.output) == (as_owner.exit_code, as_owner.output)
    assert as_reader.exit_code == 0, as_reader.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("pause", "take_order"), "the least role for `pause` is a worker, see `idemconsumer migrate grants --worker"),
        (("dead", "discard", "1", "--yes"), "for `dead discard` is a worker, see `idemconsumer migrate grants --worker "
         "ROLE`; with --dry-run a reader may run it"),
        (("publish", "postgres:orders", "{}"), "the least role for `publish` is a producer, see"),
        (("requests", "release", "a" * 64), "the least role for `requests release` is a front-door, see"),
        (("keys", "forget", "a" * 64, "--yes"), "the least role for `keys forget` is a front-door, see"),
        (("prune",), "the least role for `prune` is a purge, see"),
        (("migrate", "up", "--schema", "behind"), "migrate as the schema's owner"),
    ],
)  # fmt: skip
def test_a_denial_names_the_least_role(reader: str, words: tuple[str, ...], said: str) -> None:
    denied = run(reader, *words)
    assert denied.exit_code == 2, denied.output
    assert said in denied.stderr


def test_who_may_not_read_is_told_so(stored: str) -> None:
    with role_of(stored, "producer") as dsn:
        assert "the least role for `status` is a reader, see" in run(dsn, "status").stderr
        assert "the least role for `keys show` is a reader, see" in run(dsn, "keys", "show", "ff").stderr
