"""What a program that embeds idemconsumer gets in its own handlers of the standard library's logging."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import psycopg
import pytest

from idemconsumer import App, Message, Reject, Tx
from idemconsumer.logs import Log, log
from idemconsumer.observe.summing import Summing, say_all
from idemconsumer.redaction import SHOWN
from tests.support.inside import kinds_summed
from tests.support.logs import LogCapture, entries
from tests.support.servers.postgres import migrated
from tests.support.tuning import tuned
from tests.support.waiting import until

BODY = "s3cret-payload"
ROW = "a@b.c"


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    SHOWN.text = True


@pytest.fixture
def written() -> Iterator[io.StringIO]:
    """What a program's own handler has written, with its own format."""
    stream, logger = io.StringIO(), logging.getLogger()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    logger.addHandler(handler)
    yield stream
    logger.removeHandler(handler)


@pytest.fixture
async def app(database: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[App]:
    migrated(database, "idemconsumer")
    with psycopg.connect(database) as connection:
        connection.execute("create table person (email text constraint one_each unique)")
        connection.execute("insert into person values (%s)", (ROW,))
    monkeypatch.setenv("IDEMCONSUMER_DSN", database)
    app = App("shop")

    @app.idempotent_handler("memory:people", key="id", max_attempts=1)
    async def keep(person: dict[str, Any], tx: Tx) -> None:
        if "no" in person:
            raise Reject("unwanted")
        await tx.execute("insert into person values (%s)", (ROW,))

    yield app
    await app.close()


def person(name: str, more: str = "") -> Message:
    return Message("memory:people", f'{{"id": "{name}", "note": "{BODY}"{more}}}'.encode(), position=f"people#{name}")


async def test_a_programs_own_handlers_get_each_event_with_its_error(
    app: App, written: io.StringIO, caplog: pytest.LogCaptureFixture
) -> None:
    await app.process(person("1"))

    failed, dead = caplog.records
    assert {(each.name, each.filename) for each in caplog.records} == {("idemconsumer", "summing.py")}
    assert (failed.levelno, dead.levelno) == (logging.WARNING, logging.ERROR)
    assert failed.getMessage().startswith("handler failed handler=keep error=UniqueViolation where=")
    assert vars(failed) | {"event": "handler failed", "handler": "keep", "position": "people#1"} == vars(failed)
    assert failed.exc_info is not None
    assert isinstance(failed.exc_info[1], psycopg.errors.UniqueViolation)
    assert vars(dead)["letter"] == 1
    lines = written.getvalue()
    assert "in keep\n" in lines
    assert "one_each" in lines
    assert ROW not in lines + caplog.text
    assert BODY not in lines + caplog.text


async def test_every_line_about_a_message_says_which_one(app: App, logged: LogCapture) -> None:
    await app.process(person("1"))
    await app.process(person("1"))
    await app.process(person("2", ', "no": 1'))
    await app.process(Message("memory:people", b"{", position="people#3"))

    said = {entry["event"]: entry for entry in logged.entries}
    assert list(said) == ["handler failed", "dead letter", "duplicate of a dead message", "rejected"]
    for entry in logged.entries:
        assert {"handler", "source", "position", "attempt"} <= entry.keys()
        assert ("key" in entry) == (entry.get("reason") != "undecodable")
    assert [entry["position"] for entry in entries(logged, "dead letter")] == ["people#1", "people#3"]
    assert [entry["letter"] for entry in entries(logged, "dead letter")] == [1, 2]
    assert said["dead letter"]["detail"]
    assert (said["rejected"]["error"], said["rejected"]["text"]) == ("Reject", "unwanted")


async def test_the_text_of_errors_can_be_kept_out(
    app: App, written: io.StringIO, monkeypatch: pytest.MonkeyPatch, database: str
) -> None:
    monkeypatch.setenv("IDEMCONSUMER_LOG_ERROR_TEXT", "no")
    await app.process(person("1"))
    await app.process(person("2", ', "no": 1'))
    assert "in keep\n" in written.getvalue()
    assert "error=UniqueViolation" in written.getvalue()
    assert "psycopg.errors.UniqueViolation\n" in written.getvalue(), "a traceback, with the type alone"
    assert "one_each" not in written.getvalue()
    with psycopg.connect(database) as connection:
        found = connection.execute("select error, traceback from idemconsumer.dead_letter").fetchone()
    assert found is not None
    assert "one_each" in found[0]
    assert "in keep\n" in found[1]
    assert found[1].endswith("constraint one_each)")


# ------------------------------------------------------------------------------------------------------------- one line
def test_a_line_is_one_line_and_steers_no_terminal(written: io.StringIO) -> None:
    log.warning("100% wrong", text="two\nlines, amqp://u:s3cret@h \x1b[2J\udcff", key=bytes(range(32)), name="x")
    assert written.getvalue() == (
        'WARNING idemconsumer: 100% wrong text="two\\nlines, amqp://u:***@h \\\\x1b[2J\\\\udcff"'
        " key=000102030405 name=x\n"
    )


def test_a_line_below_the_level_is_not_made() -> None:
    class Untouched:
        def __str__(self) -> str:
            raise AssertionError

    Log(logging.getLogger("idemconsumer.quiet")).bind(group="g").debug("filtered", what=Untouched())


CONFIGURES = """
import logging.config
from idemconsumer.logs import log
from idemconsumer.observe.logging import configure, keep_enabled
configure("json", "info")
logging.config.dictConfig({"version": 1})
keep_enabled()
log.info("here")
logging.getLogger("other").warning("%d", "no number")
"""


def test_an_app_that_configures_logging_does_not_switch_it_off() -> None:
    done = subprocess.run([sys.executable, "-c", CONFIGURES], capture_output=True, text=True, check=True)
    here, wrong = map(json.loads, done.stderr.splitlines())
    assert here["event"] == "here"
    assert (wrong["event"], wrong["logger"]) == ("cannot format a line of the log", "other")
    assert "no number" not in done.stderr


# ------------------------------------------------------------------------------------------------------------- summing
async def test_what_repeats_itself_is_summed_while_it_goes_on(
    logged: LogCapture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned(monkeypatch, summing_pause=0.01)
    failures = Summing()
    for number in range(5):
        kind, its = {"handler": "keep"}, {"position": f"q#{number}", "letter": number, "text": "boom"}
        failures.say(logging.ERROR, "dead letter", "dead letters", kind, its)
    await asyncio.sleep(0.05)
    assert len(logged.entries) == 1, "the others are not due"
    (counted,) = kinds_summed(failures)
    counted.repeats = replace(counted.repeats, pause=0.0)
    await until(lambda: len(logged.entries) == 2)
    first, others = logged.entries
    assert (first["event"], first["position"]) == ("dead letter", "q#0")
    assert (others["event"], others["count"], others["handler"]) == ("dead letters", 4, "keep")
    assert (others["first_letter"], others["last_letter"], others["last_position"]) == (1, 4, "q#4")
    await asyncio.sleep(0.05)
    assert len(logged.entries) == 2, "what is said is said once"


async def test_what_is_remembered_is_bounded_and_nothing_unsaid_is_lost(
    logged: LogCapture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned(monkeypatch, summed_kinds=3)
    failures = Summing()
    for name in "aabbcdef":
        failures.say(logging.WARNING, "failed", "failed again", {"handler": name}, {})
    assert len(kinds_summed(failures)) == 3
    assert [entry["handler"] for entry in entries(logged, "failed again")] == ["a", "b"]
    failures.close()
    assert len(entries(logged, "failed again")) == 2


async def test_a_child_says_nothing_of_what_its_parent_has_summed(logged: LogCapture) -> None:
    failures = Summing()
    for _ in range(2):
        failures.say(logging.WARNING, "failed", "failed again", {"handler": "keep"}, {})
    if (child := os.fork()) == 0:
        say_all()
        os._exit(len(entries(logged, "failed again")))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    say_all()
    assert len(entries(logged, "failed again")) == 1


async def test_in_dev_nothing_is_summed(logged: LogCapture) -> None:
    failures = Summing(every=True)
    for _ in range(3):
        failures.say(logging.WARNING, "failed", "failed again", {"handler": "a"}, {}, ValueError("boom"))
    assert [entry["exception"] for entry in logged.entries] == ["ValueError: boom"] * 3
