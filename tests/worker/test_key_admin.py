"""What is known of a key, and what a person decides about it (O7, O8)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from idemconsumer import App, ConfigurationError, Message, Reject, Saga, Tx
from idemconsumer.admin.dead_letters import ALL, Admin
from idemconsumer.admin.redrives import Redrives
from idemconsumer.admin.stored_keys import KeyDetail, Keys
from idemconsumer.errors import NothingFound
from idemconsumer.rules.values import State
from tests.support.waiting import until
from tests.support.workers import SCHEMA, Bench, Item, note


class Service:
    def __init__(self, **options: Any) -> None:
        self.app = App("shop")
        self.act: Callable[[Message], object] = fail

        @self.app.idempotent_handler("memory:q", key="id", max_attempts=2, **{"backoff": "10ms, 10ms", **options})
        async def take(item: Item, tx: Tx, message: Message) -> dict[str, str]:
            await note(tx, item)
            self.act(message)
            return {"name": "Ann"}


def fail(message: Message) -> None:
    raise ValueError("Ann is wrong")


def refuse(message: Message) -> None:
    raise Reject("no")


def succeed(message: Message) -> None:
    return


@pytest.fixture
def known(bench: Bench) -> Keys:
    return Keys(bench.dsn, SCHEMA)


async def explained(known: Keys) -> KeyDetail:
    return await known.explain(await known.find(handler="take", key="a"))


async def test_a_story_is_told_from_the_first_failure_to_the_end(bench: Bench, known: Keys) -> None:
    service = Service(backoff="1h, 1h")
    await bench.publish("q", Item("a"))
    await bench.until_empty(service.app)
    found = await explained(known)
    assert (found.state, found.attempts and found.attempts.count) == ("pending", 1)
    assert found.due is not None
    assert sorted(event.what for event in found.timeline[:2]) == ["pending", "tried"]
    assert [event.what for event in found.timeline[2:]] == ["next attempt"]

    bench.do("update idemconsumer.delayed set due_at = clock_timestamp()")
    await bench.until_empty(service.app)
    await bench.publish("q", Item("a"))
    await bench.until_empty(service.app)
    found = await explained(known)
    assert (found.state, found.attempts, found.due) == ("dead", None, None)
    assert sorted(event.what for event in found.timeline[:2]) == ["dead", "letter 1"]
    assert [event.what for event in found.timeline[2:]] == ["letter 1 again"]
    assert any("ValueError: Ann is wrong (test_key_admin.py:" in (event.detail or "") for event in found.timeline)
    assert "`dead redrive 1`" in found.next

    await Redrives(bench.dsn, SCHEMA).redrive(ALL, by="ann", run="r")
    assert "runs when it is due" in (await explained(known)).next
    service.act = succeed
    await bench.until_empty(service.app)
    found = await explained(known)
    assert (found.state, found.result) == ("completed", '{"name":"Ann"}')
    told = [event.what for event in found.timeline]
    assert told[:3] == ["letter 1", "letter 1 again", "redriven"]
    assert sorted(told[3:]) == ["completed", "redrive applied"]


@pytest.mark.parametrize(
    ("act", "says", "outcome"),
    [
        (succeed, "would get the stored result; with another payload it would be a conflict", "duplicate"),
        (refuse, "would get the stored rejection", "duplicate"),
        (fail, "its key is dead", "dead"),
    ],
)
async def test_what_would_happen_is_what_happens(
    bench: Bench, known: Keys, act: Callable[[Message], object], says: str, outcome: str
) -> None:
    service = Service()
    service.act = act
    await bench.publish("q", Item("b"))
    await bench.until_empty(service.app)
    assert (await explained(known)).next == "it would run: there is no record of its key"
    await bench.publish("q", Item("a"))
    await bench.until_empty(service.app)
    assert says in (await explained(known)).next
    await bench.publish("q", Item("a"))
    assert (await bench.until_empty(service.app)).counts == {outcome: 1}
    bench.do("update idemconsumer.scope set retain = '0'")
    assert ("once that is pruned, it would run" in (await explained(known)).next) == (outcome == "duplicate")


async def test_what_is_personal_is_forgotten_and_the_message_does_not_run_again(bench: Bench, known: Keys) -> None:
    service = Service()
    service.act = succeed
    await bench.publish("q", Item("a"))
    await bench.until_empty(service.app)
    key = await known.find(handler="take", key="a")
    assert await known.forget(key, by="ann") == 0
    found = await known.explain(key)
    assert (found.state, found.result) == ("completed", None)
    assert bench.do("select fingerprint, canonical from idemconsumer.record") == [(None, None)]
    await bench.publish("q", Item("a", "another payload"))
    assert (await bench.until_empty(service.app)).counts == {"duplicate": 1}
    await known.forget(key, by="ann", record=True)
    await bench.publish("q", Item("a"))
    assert (await bench.until_empty(service.app)).counts == {"applied": 1}

    service.act = fail
    await bench.publish("q", Item("dead"))
    await bench.until_empty(service.app)
    assert await known.forget(await known.find(handler="take", key="dead"), by="ann") == 1
    assert await Admin(bench.dsn, SCHEMA).dead_letters() == []
    await bench.publish("q", Item("dead"))
    assert (await bench.until_empty(service.app)).counts == {"dead": 1}


async def test_a_dead_or_rejected_key_is_released_and_no_other(bench: Bench, known: Keys) -> None:
    service = Service()
    acts = {"dead": fail, "rejected": refuse, "done": succeed}
    for name, act in acts.items():
        service.act = act
        await bench.publish("q", Item(name))
        await bench.until_empty(service.app)
    keys = {name: await known.find(handler="take", key=name) for name in acts}
    with pytest.raises(ConfigurationError, match="is COMPLETED, and would be applied twice"):
        await known.release(keys["done"], by="ann")
    for name in ("dead", "rejected"):
        await known.release(keys[name], by="ann")
    with pytest.raises(ConfigurationError, match="has no record"):
        await known.release(keys["dead"], by="ann")
    assert await Admin(bench.dsn, SCHEMA).dead_letters() == []
    (trace,) = (await known.explain(keys["dead"])).redrives
    assert (trace.by, trace.outcome) == ("ann", "released")
    service.act = succeed
    await bench.publish("q", *map(Item, acts))
    assert (await bench.until_empty(service.app)).counts == {"applied": 2, "duplicate": 1}


async def test_a_key_in_somebodys_hands_is_waited_for(bench: Bench, known: Keys) -> None:
    service = Service()
    await bench.publish("q", Item("a"))
    await bench.until_empty(service.app)
    key = await known.find(handler="take", key="a")
    async with await psycopg.AsyncConnection.connect(bench.dsn) as rival:
        lock = "select pg_advisory_xact_lock(('x' || encode(substring(%s::bytea for 8), 'hex'))::bit(64)::bigint)"
        await rival.execute(lock, [key])
        forgetting = asyncio.create_task(known.forget(key, by="ann"))
        query = "select 1 from pg_locks where locktype = 'advisory' and not granted"
        await until(lambda: bench.do(query) != [])
        assert not forgetting.done()
        await rival.commit()
    assert await forgetting == 1


async def test_what_is_stored_or_a_sagas_is_neither_forgotten_nor_released(bench: Bench, known: Keys) -> None:
    service = Service(backoff="1h, 1h")
    await bench.publish("q", Item("a"))
    await bench.until_empty(service.app)
    app = App("shop")

    @app.idempotent_handler("memory:s", key="id", max_attempts=1)
    async def book(item: Item, saga: Saga) -> None:
        raise ValueError

    await bench.publish("s", Item("a"))
    async with bench.running(app) as running:
        await running.until(lambda: bench.do("select 1 from idemconsumer.dead_letter") != [])
    stored, saga = [await known.find(handler=name, key="a") for name in ("take", "book")]
    for key, why in ((stored, "its message is stored"), (saga, "it is a saga's")):
        with pytest.raises(ConfigurationError, match=why):
            await known.forget(key, by="ann")
        with pytest.raises(ConfigurationError, match=why):
            await known.release(key, by="ann")
    assert "saga failed" not in (await known.explain(saga)).next
    assert "begun" in [event.what for event in (await known.explain(saga)).timeline]


async def test_keys_are_listed_page_by_page_and_found_by_text_hash_and_tenant(bench: Bench, known: Keys) -> None:
    service = Service(tenant="entity")
    service.act = succeed
    await bench.publish("q", Item("a", "x"), Item("a", "y"), Item("b", "x"))
    await bench.until_empty(service.app)
    lines = await known.list(limit=2)
    lines += await known.list(limit=2, after=lines[-1].key)
    assert len({line.key for line in lines}) == 3
    assert len(await known.list(tenant="x")) == 2
    assert await known.list(handler="nobody") == []
    assert [len(await known.list(state=state)) for state in (State.COMPLETED, State.DEAD)] == [3, 0]
    with pytest.raises(ConfigurationError, match="matches several keys"):
        await known.find(handler="take", key="a")
    of_x = await known.find(handler="take", key="a", tenant="x")
    assert await known.find(prefix=of_x.hex()[:20]) == of_x
    with pytest.raises(NothingFound, match="nothing is known of"):
        await known.find(prefix="00" * 32)
    with pytest.raises(ConfigurationError, match="nothing is stored under a handler 'nobody'"):
        await known.find(handler="nobody", key="a")
