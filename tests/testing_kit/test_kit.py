"""What is sent to a kit goes through the product's own workers, until nothing is left to do."""

from __future__ import annotations

import time
from typing import Any

import pytest

from idemconsumer import App, ConfigurationError, OutcomeKind
from idemconsumer.testing import Idem
from tests.testing_kit.apps import Gateway, Order, post, shop


async def test_a_message_is_handled_once_however_often_it_comes(idem: Idem) -> None:
    kit = await idem(shop, resources={Gateway: (fake := Gateway())})
    await kit.send("kafka:orders", Order("1"), key=b"1")
    await kit.redeliver(2)
    await kit.drain()
    first, *rest = kit.outcomes
    assert (first.kind, first.result) == (OutcomeKind.APPLIED, b'"1"')
    assert [each.kind for each in rest] == [OutcomeKind.DUPLICATE] * 2
    assert fake.charged == ["1"]
    assert await kit.rows("select id from effect") == [("1",)]


async def test_what_cannot_be_is_refused_where_it_is_written(idem: Idem) -> None:
    with pytest.raises(ConfigurationError, match="was given App, which is not an app"):
        await idem(App)  # type: ignore[arg-type]
    kit = await idem(shop, resources={Gateway: Gateway()})
    with pytest.raises(ConfigurationError, match="no app of this kit consumes it; they consume kafka:orders"):
        await kit.send("kafka:order", Order("1"))
    wrong: Any = {"attempt": 1}
    with pytest.raises(ConfigurationError, match="'attempt' is of type int; give text or bytes"):
        await kit.send("kafka:orders", Order("1"), headers=wrong)
    assert not await kit.drain()
    assert kit.outcomes == []


async def test_a_chain_over_two_apps_ends_in_one_drain(idem: Idem) -> None:
    kit = await idem(shop, post, resources={Gateway: Gateway()})
    for _ in range(2):
        began = time.perf_counter()
        await kit.send("kafka:orders", Order("1"))
        left = await kit.drain()
        print("chain", time.perf_counter() - began)
        assert not left, left
    assert await kit.rows("select id from effect order by place") == [("1",), ("shipped 1",)]
    assert [each.handler for each in kit.handled] == ["pay", "pack", "ship", "pay"]


async def test_what_waits_is_said_and_what_was_published_is_kept(idem: Idem) -> None:
    kit = await idem(shop, post, resources={Gateway: (fake := Gateway(fails=1))})
    await kit.send("kafka:orders", Order("1"))
    left = await kit.drain()
    assert "message of shop that waits for its next attempt" in str(left)
    assert fake.charged == []
    left = await kit.advance("1m")
    assert not left, left
    assert [each.kind for each in kit.outcomes[:2]] == [OutcomeKind.RETRYING, OutcomeKind.APPLIED]
    (paid,) = await kit.published("rabbitmq:paid")
    assert (paid.json, paid.headers, paid.key) == ({"id": "1"}, {"by": "shop"}, "1")
    (packed,) = await kit.published("postgres:packed")
    assert (packed.json, packed.key) == ({"id": "1"}, "1")
    assert [each.json for each in await kit.published("sqs:mail")] == [{"id": "1"}]


async def test_a_message_that_fails_each_time_is_a_dead_letter_in_the_end(idem: Idem) -> None:
    kit = await idem(shop, resources={Gateway: Gateway(fails=99)})
    await kit.send("kafka:orders", Order("1"))
    await kit.send("kafka:orders", b"no json")
    await kit.advance("3d")
    bad, failed = await kit.dead_letters()
    assert (bad.reason, failed.reason, failed.attempts) == ("undecodable", "attempts_exhausted", 5)
    kinds = [each.outcome.kind for each in kit.handled if each.message.body != b"no json"]
    assert kinds == [OutcomeKind.RETRYING] * 4 + [OutcomeKind.DEAD]


async def test_a_saga_sleeps_as_long_as_it_says(idem: Idem) -> None:
    kit = await idem(shop, resources={Gateway: (fake := Gateway(fails=2))})
    await kit.send("postgres:rides", {"id": "r"})
    for duration, charged, steps in [("0s", [], ()), ("2h", [], ()), ("3h", ["r"], ("charged",))]:
        left = await kit.advance(duration)
        saga = await kit.saga("r")
        assert (fake.charged, saga.steps, saga.state) == (charged, steps, "processing"), (duration, left)
    assert "saga ride" in str(await kit.drain())
    await kit.advance("1d")
    assert (await kit.saga("r")).steps == ("charged", "rests")
    await kit.advance("1d")
    saga = await kit.saga("r")
    assert (saga.state, saga.result, fake.charged) == ("completed", "done", ["r"])
    with pytest.raises(LookupError, match="no saga has the key 'x'"):
        await kit.saga("x")


async def test_after_a_reset_nothing_has_happened(idem: Idem) -> None:
    kit = await idem(shop, resources={Gateway: (fake := Gateway())})
    for charged in (["1"], ["1", "1"]):
        await kit.send("kafka:orders", Order("1"))
        await kit.drain()
        assert fake.charged == charged
        assert [each.kind for each in kit.outcomes] == [OutcomeKind.APPLIED]
        await kit.reset()
    assert not await kit.published("rabbitmq:paid")
    assert not kit.outcomes
    assert await kit.rows("select * from effect") == []


async def test_a_message_costs_as_many_commits_as_it_is_said_to(idem: Idem) -> None:
    kit = await idem(shop, post, resources={Gateway: Gateway()})
    await kit.send("kafka:orders", Order("0"))
    async with kit.assert_commits(3):
        await kit.send("kafka:orders", Order("1"))
    with pytest.raises(AssertionError, match="3 commits, not 4; handled: pay applied"):
        async with kit.assert_commits(4):
            await kit.send("kafka:orders", Order("2"))
    wrong: Any = "3"
    with pytest.raises(ConfigurationError, match=r"assert_commits\('3'\): write how many, as in assert_commits\(2\)"):
        async with kit.assert_commits(wrong):
            await kit.send("kafka:orders", Order("3"))


async def test_statements_and_round_trips_are_those_of_the_protocol(idem: Idem) -> None:
    kit = await idem(shop, post, resources={Gateway: Gateway()})
    for number in range(4):  # of what its rows are not read the handler does not wait then
        await kit.send("sqs:notes", {"id": str(number)})
        await kit.drain()
    for each in "ab":
        async with kit.assert_statements(6), kit.assert_round_trips(2), kit.assert_commits(1):
            await kit.send("sqs:notes", {"id": each})
    with pytest.raises(AssertionError, match="2 round trips, not 1; handled: note applied"):
        async with kit.assert_round_trips(1):
            await kit.send("sqs:notes", {"id": "c"})


async def test_what_a_saga_costs_is_what_the_protocol_says(idem: Idem) -> None:
    kit = await idem(shop, post, resources={Gateway: Gateway()})
    for number in range(4):
        await kit.send("sqs:walks", {"id": str(number)})
        await kit.drain()
    async with kit.assert_statements(8 + 2 * 5), kit.assert_round_trips(2 + 2 * 2), kit.assert_commits(4):
        await kit.send("sqs:walks", {"id": "last"})
