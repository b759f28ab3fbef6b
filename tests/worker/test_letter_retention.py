"""How long dead letters are kept, and what of them (O5); what a duplicate of one is told (O6)."""

from __future__ import annotations

from typing import Any

import pytest

from idemconsumer import App, Message, Saga, Tx
from idemconsumer.admin.dead_letters import ALL, Admin, Which
from idemconsumer.admin.redrives import Redrives
from idemconsumer.rules.redriven import Redriven
from idemconsumer.rules.values import OutcomeKind
from idemconsumer.settings import Settings
from idemconsumer.worker.retention import keep_letters, prune_once
from tests.support.logs import capture_logs
from tests.support.workers import SCHEMA, Bench, Item, body, note


def failing(**options: Any) -> App:
    app = App("shop")

    @app.idempotent_handler("memory:q", key="id", max_attempts=1, **options)
    async def take(item: Item, tx: Tx) -> None:
        await note(tx, item)
        raise ValueError(f"no such customer: {item.entity}")

    return app


async def prune(bench: Bench, app: App) -> None:
    await keep_letters(bench.dsn, SCHEMA, app.bound_handlers(Settings()))
    bench.do("update idemconsumer.upkeep set by = null, until = '-infinity'")  # a worker may have left within its pass
    await prune_once(bench.dsn, SCHEMA)


def age(bench: Bench, days: int) -> None:
    bench.do("update idemconsumer.dead_letter set last_at = last_at - make_interval(days => %s)", days)


async def test_letters_and_their_messages_go_when_their_handler_says_so(bench: Bench) -> None:
    app = failing(retain_dead="90d", retain_dead_body="30d", tenant="entity")
    await bench.publish("q", Item("a", "Ann"), b"{")
    await bench.until_empty(app)
    await prune(bench, app)
    admin = Admin(bench.dsn, SCHEMA)
    letters = [each async for each in admin.export(ALL)]
    assert sorted(each.body for each in letters) == [b"{", body(Item("a", "Ann"))]

    age(bench, 40)
    await prune(bench, failing())  # as another deploy says: for ever
    assert all(each.body for each in [each async for each in admin.export(ALL)])
    await prune(bench, app)
    letters = [each async for each in admin.export(ALL)]
    assert [(each.body, list(each.headers), each.emptied_at is not None) for each in letters] == [(b"", [], True)] * 2
    (failed,) = [each for each in letters if each.reason == "attempts_exhausted"]
    assert failed.error.startswith("ValueError (test_letter_retention.py:")
    assert failed.body_size == len(body(Item("a", "Ann")))
    assert bench.do("select count(*) from idemconsumer.record") == [(1,)], "its key stays dead"
    done = await Redrives(bench.dsn, SCHEMA).redrive(ALL, by="ann", run="r")
    assert done.counts == {Redriven.INCOMPLETE: 2}

    age(bench, 60)
    await prune(bench, app)
    assert bench.do("select count(*) from idemconsumer.dead_letter") == [(0,)]


async def test_what_is_redriven_stays_and_is_whole_when_it_fails_again(bench: Bench) -> None:
    app = failing(retain_dead="30d", retain_dead_body="30d")
    await bench.publish("q", Item("a"))
    await bench.until_empty(app)
    age(bench, 40)
    await Redrives(bench.dsn, SCHEMA).redrive(ALL, by="ann", run="r")
    await prune(bench, app)
    assert bench.do("select body <> '' from idemconsumer.dead_letter") == [(True,)]
    bench.do("update idemconsumer.dead_letter set body = '', emptied_at = now()")  # it took longer than that
    await bench.until_empty(app)
    (letter,) = [each async for each in Admin(bench.dsn, SCHEMA).export(ALL)]
    assert (letter.body, letter.emptied_at) == (body(Item("a")), None)


async def test_a_dead_record_goes_once_it_has_no_letter(bench: Bench) -> None:
    app = failing()
    await bench.publish("q", Item("a"), Item("b"))
    await bench.until_empty(app)
    bench.do("update idemconsumer.scope set retain = '0'")
    await prune(bench, app)
    assert bench.do("select count(*) from idemconsumer.record") == [(2,)]
    ((number,),) = bench.do("select min(id) from idemconsumer.dead_letter")
    assert await Admin(bench.dsn, SCHEMA).discard(Which(ids=[number]), by="ann") == 1
    await prune(bench, app)
    assert bench.do("select count(*) from idemconsumer.record") == [(1,)]


async def test_a_saga_that_waits_for_a_person_keeps_its_letter_and_its_record(bench: Bench) -> None:
    app = App("shop")

    @app.idempotent_handler("memory:q", key="id", max_attempts=1, retain_dead="1d", retain_dead_body="1d")
    async def book(item: Item, saga: Saga) -> None:
        raise ValueError

    await bench.publish("q", Item("a"))
    async with bench.running(app) as running:
        await running.until(lambda: bench.do("select 1 from idemconsumer.dead_letter") != [])
    age(bench, 40)
    await prune(bench, app)
    assert bench.do("select body <> '' from idemconsumer.dead_letter") == [(True,)]
    bench.do("delete from idemconsumer.dead_letter")
    bench.do("update idemconsumer.scope set retain = '0'")
    await prune(bench, app)
    assert bench.do("select count(*) from idemconsumer.record") == [(1,)]


async def test_a_worker_says_how_long(bench: Bench) -> None:
    app = failing(retain_dead="90d")
    async with bench.running(app) as running:
        await running.until(lambda: bench.do("select 1 from idemconsumer.dead_retention") != [])
    kept = bench.do("select app, handler, letters = interval '90 days', bodies from idemconsumer.dead_retention")
    assert kept == [("shop", "take", True, None)]


async def test_a_duplicate_of_a_dead_key_names_its_letter(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IDEMCONSUMER_DSN", bench.dsn)
    app = failing()
    message = Message("memory:q", body(Item("a")), position="q#1")
    assert (await app.process(message)).kind is OutcomeKind.DEAD
    ((number,),) = bench.do("select id from idemconsumer.dead_letter")
    with capture_logs() as logs:
        again = await app.process(message)
    assert (again.kind, again.reason, again.letter) == (OutcomeKind.DEAD, "attempts_exhausted", number)
    (line,) = [each for each in logs if each["event"] == "duplicate of a dead message"]
    assert (line["letter"], line["reason"], line["position"]) == (number, "attempts_exhausted", "q#1")
    bench.do("delete from idemconsumer.dead_letter")
    assert (await app.process(message)).letter is None
    await app.close()
