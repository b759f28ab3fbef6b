"""What a worker says of messages that fail: why, once (O10), and in each letter (O9)."""

from __future__ import annotations

from typing import Any

import pytest

from idemconsumer import App, Tx
from idemconsumer.admin.dead_letters import Admin
from idemconsumer.cli.dead import show
from tests.support.logs import LogCapture, entries
from tests.support.tuning import tuned
from tests.support.workers import SCHEMA, Bench, Item, note


def shop(text: str, **options: Any) -> App:
    app = App("shop")

    @app.idempotent_handler("memory:q", key="id", backoff="10ms, 10ms", **options)
    async def take(item: Item, tx: Tx) -> None:
        await note(tx, item)
        raise ValueError(text)

    return app


async def test_500_messages_with_one_fault_are_a_few_lines(
    bench: Bench, logged: LogCapture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned(monkeypatch, failures_in_a_row=1_000)  # else they would be tried one at a time (D17)
    await bench.publish("q", *(Item(str(n)) for n in range(500)))
    worker = await bench.until_empty(shop("no limit is set", max_attempts=1, group_size=1))
    assert worker.counts == {"dead": 500}

    about = [entry for entry in logged.entries if entry.get("handler") == "take"]
    assert len(about) <= 10, [entry["event"] for entry in about]
    first, summed = entries(logged, "handler failed"), entries(logged, "handler failed again")
    (failed,) = first
    assert (failed["error"], failed["text"]) == ("ValueError", "no limit is set")
    assert "in take" in failed["exception"]
    assert 1 + sum(entry["count"] for entry in summed) == 500
    (letter,), letters = entries(logged, "dead letter"), entries(logged, "dead letters")
    assert 1 + sum(entry["count"] for entry in letters) == 500
    numbers = {number for (number,) in bench.do("select id from idemconsumer.dead_letter")}
    named = {letter["letter"], letters[-1]["last_letter"]}  # lanes side by side commit in any order
    assert len(named) == 2
    assert named <= numbers
    assert logged.entries[-1]["event"] == "worker stopped", "nothing is left to say"


async def test_in_dev_each_failure_is_said_in_full(
    bench: Bench, logged: LogCapture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IDEMCONSUMER_DEV", "1")
    await bench.publish("q", *(Item(str(n)) for n in range(3)))
    await bench.until_empty(shop("boom", max_attempts=1))
    assert ["in take" in entry["exception"] for entry in entries(logged, "handler failed")] == [True] * 3
    assert len(entries(logged, "dead letter")) == 3


async def test_a_letter_keeps_the_traceback_of_its_last_error_as_long_as_its_message(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    await bench.publish("q", Item("a"))
    await bench.until_empty(shop("amqp://u:s3cret@h", max_attempts=1))
    admin = Admin(bench.dsn, SCHEMA)
    (listed,) = await admin.dead_letters()
    letter = await admin.dead_letter(listed.id)
    assert letter is not None
    assert letter.traceback is not None
    assert letter.traceback.startswith("Traceback (most recent call last):\n")
    assert letter.traceback.endswith("in take\n    raise ValueError(text)\nValueError: amqp://u:***@h")
    (cause,) = await admin.causes()
    assert (cause.exception, cause.place) == ("ValueError", listed.error.rpartition("(")[2].rstrip(")"))
    show(letter, [])
    assert letter.traceback in capsys.readouterr().out

    bench.do("update idemconsumer.dead_letter set emptied_at = clock_timestamp()")
    assert bench.do("select traceback from idemconsumer.dead_letter") == [(None,)]
