"""R43: rights, tables or functions of ours that go away under a worker, and come back."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections import Counter
from collections.abc import Iterator

import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from idemconsumer import App, Saga, Tx
from tests.support.logs import LogCapture, entries, times
from tests.support.workers import Bench, Item, note

CHANGED = "store schema or rights changed, waiting for repair"
GRANTS = (
    "grant usage on schema idemconsumer to {0}; grant all on all tables in schema idemconsumer to {0}; "
    "grant usage on all sequences in schema idemconsumer to {0}; "
    "grant all on effect to {0}; grant execute on all functions in schema idemconsumer to {0}"
)
TAKEN = {
    "claim": ("revoke insert on idemconsumer.record from {0}", "permission denied for table record"),
    "count": ("revoke insert on idemconsumer.attempt from {0}", "permission denied for table attempt"),
    "publish": ("revoke insert on idemconsumer.outbox from {0}", "permission denied for table outbox"),
    "bury": ("alter table idemconsumer.dead_letter rename to gone", "relation .* does not exist"),
    "steps": ("alter table idemconsumer.step rename column output to gone", "column s.output does not exist"),
}
RENAMED = "alter table idemconsumer.gone rename to dead_letter", "alter table idemconsumer.step rename gone to output"
SOURCES = {"count": "fails", "bury": "ends", "publish": "publishes", "steps": "sagas"}
BACK = {"bury": RENAMED[0], "steps": RENAMED[1]}


@pytest.fixture
def owner(bench: Bench) -> Bench:
    return Bench(bench.dsn)


@pytest.fixture
def role(bench: Bench, owner: Bench) -> Iterator[str]:
    """Of the bench's workers. It has all rights."""
    name = f"worker_{secrets.token_hex(4)}"
    owner.do(f"create role {name} login password '{conninfo_to_dict(bench.dsn).get('password', '')}'")
    owner.do(f"revoke execute on all functions in schema idemconsumer from public; {GRANTS.format(name)}")
    bench.dsn = make_conninfo(bench.dsn, user=name)
    yield name
    owner.do(f"grant execute on all functions in schema idemconsumer to public; drop owned by {name}; drop role {name}")


@pytest.fixture
def app(bench: Bench) -> App:
    app, failed = App("changed"), set[str]()

    @app.idempotent_handler("memory:done", key="id", max_attempts=1)
    async def done(item: Item, tx: Tx) -> str:
        await note(tx, item)
        return item.id

    @app.idempotent_handler("memory:fails", key="id", max_attempts=2, backoff="10ms, 10ms")
    async def fails_once(item: Item, tx: Tx) -> None:
        await note(tx, item)
        if item.id not in failed:
            failed.add(item.id)
            raise ValueError

    @app.idempotent_handler("memory:ends", key="id", max_attempts=1)
    async def ends(item: Item) -> None:
        raise ValueError

    @app.idempotent_handler("memory:publishes", key="id", max_attempts=1)
    async def publishes(item: Item, tx: Tx) -> None:
        await note(tx, item)
        await app.publish("kafka:out", {}, tx=tx)

    @app.idempotent_handler("memory:sagas", key="id", max_attempts=1)
    async def saga(item: Item, saga: Saga) -> None:
        await saga.tx("noted", note, item)

    return app


@pytest.mark.parametrize("what", TAKEN)
async def test_what_goes_away_under_a_worker_is_nobodys_failure(
    bench: Bench, owner: Bench, role: str, app: App, logged: LogCapture, what: str
) -> None:
    taken, says = TAKEN[what]
    source, kind = SOURCES.get(what, "done"), "dead" if what == "bury" else "applied"
    items = [Item(str(n)) for n in range(20 if what == "claim" else 4)]
    async with bench.running(app) as running:
        await bench.publish("done", Item("first"))
        await running.until_count(applied=1)
        assert running.worker._lanes is not None
        outage = running.worker._lanes.in_hand.outage
        await asyncio.to_thread(owner.do, taken.format(role))  # a lane may have a lock on it
        await bench.publish(source, *items)
        await running.until(lambda: times(logged, CHANGED) == 1)
        if what != "count":  # each of them has failed by now, and fails no more
            await running.until(lambda: outage._failures > 1)
            assert running.worker._reporting.report().lacking.count("the database") == 1
        if what == "bury":
            await bench.publish("done", Item("other"))
            await running.until_count(applied=2)
            assert outage.lasts, "it is not over for what met it"
        else:  # whose messages have failed by themselves
            assert owner.attempts() == 0
        assert not running.worker.counts.get("dead")
        await asyncio.to_thread(owner.do, BACK.get(what, GRANTS.format(role)))
        await running.until_count(**{kind: len(items) + (kind == "applied")})  # "first" was applied too
        await running.until(lambda: times(logged, "store reachable again") == 1)
        await running.until(lambda: running.worker._reporting.report().lacking == [])
    (line,) = entries(logged, CHANGED)
    assert re.search(says, line["error"])
    assert "`idemconsumer" in line["error"], "what to do"
    if kind == "applied":
        assert Counter(owner.effects()) == Counter(["first", *(item.id for item in items)])
        assert owner.do("select count(*) from idemconsumer.dead_letter") == [(0,)]
