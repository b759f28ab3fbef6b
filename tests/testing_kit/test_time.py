"""Time passes as a test says, for the database and for what runs in this process."""

from __future__ import annotations

import asyncio
import time
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Any

from idemconsumer.sql.connecting import connect_async
from idemconsumer.testing import Idem
from tests.support.waiting import until
from tests.testing_kit.services import Letter, answer, api, office

DAY = timedelta(days=1)


async def test_a_schedule_starts_a_saga_at_each_of_its_slots(idem: Idem) -> None:
    kit = await idem(office)
    assert "schedule nightly" in str(await kit.drain())
    await kit.advance("3d")
    slots = [datetime.fromisoformat(each.message.message_id.partition("@")[2]) for each in kit.handled
             if each.handler == "nightly" and each.message.message_id]  # fmt: skip
    assert [two - one for one, two in pairwise(slots)] == [DAY, DAY]
    saga = await kit.saga(f"nightly@{slots[0]:%Y-%m-%dT%H:%MZ}")
    assert saga.state == "completed"


async def test_delays_end_and_retention_forgets(idem: Idem) -> None:
    kit = await idem(office)
    ((began,),) = await kit.rows("select now()")
    await kit.send("rabbitmq:letters", Letter("1"))
    await kit.drain()
    assert await kit.rows("select * from effect") == []
    await kit.advance("11m")
    assert await kit.rows("select id from effect") == [("1",)]
    await kit.advance("3d")
    assert await kit.rows("select id from effect") == [("1",)], "the other one was a duplicate"
    await kit.send("sqs:later", Letter("1"))
    await kit.drain()
    assert await kit.rows("select id from effect") == [("1",), ("1",)], "its record was kept for two days"
    ((now,),) = await kit.rows("select now()")
    assert timedelta(minutes=11) <= now - began - 3 * DAY < timedelta(minutes=12)


async def test_who_sleeps_in_this_loop_wakes_up(idem: Idem) -> None:
    kit, began = await idem(office), time.monotonic()
    sleeping = asyncio.create_task(asyncio.sleep(3600))
    await kit.advance("1h")
    await sleeping
    assert time.monotonic() - began < 30


async def test_a_reply_and_a_dead_letter_are_published(idem: Idem) -> None:
    kit = await idem(office)
    await kit.send("rabbitmq:letters", Letter("1"), properties={"reply_to": "me", "correlation_id": "c"})
    await kit.send("rabbitmq:letters", b"no letter")
    await kit.advance("1m")
    (reply,) = await kit.published("rabbitmq:me")
    assert (reply.json, reply.headers["correlation-id"]) == ("answered 1", "c")
    (dead,) = await kit.published("kafka:dead")
    assert (dead.body, dead.headers["idemconsumer-dead-reason"]) == (b"no letter", "undecodable")
    (letter,) = await kit.dead_letters()
    assert letter.handler == answer.name


async def test_requests_come_through_the_front_door(idem: Idem) -> None:
    kit = await idem(office)
    async with kit.http(api) as client:
        headers = {"idempotency-key": "k", "x-customer": "c"}
        answers: list[Any] = [await client.post("/notes", json={"id": "n"}, headers=headers) for _ in range(2)]
        assert [(each.status_code, each.json()) for each in answers] == [(200, {"id": "n"})] * 2
        assert await kit.rows("select id from effect") == [("n",)]
        accepted = await client.post("/asked", json={"id": "a"}, headers=headers | {"idempotency-key": "a"})
        assert accepted.status_code == 202
        await kit.drain()
        done = await client.get(accepted.headers["location"], headers=headers)
        assert (done.status_code, done.json()) == (201, {"id": "a"})


async def test_what_waits_for_an_answer_of_the_database_meanwhile_gets_it(idem: Idem) -> None:
    """As a worker may that prunes, however slow the server is."""
    kit = await idem(office)
    async with await connect_async(kit.dsn) as connection:
        asked = asyncio.create_task(connection.execute("select pg_sleep(0.5)"))
        at_work = "select 1 from pg_stat_activity where query = 'select pg_sleep(0.5)' and state = 'active'"
        await until(lambda: kit.rows(at_work), "the server has the statement")
        await kit.advance("1d")
        await asked


async def test_who_has_asked_for_the_clock_before_sees_it_move(idem: Idem) -> None:
    """Else a worker that waits for a moment is woken at once again and again, until its own clock has come there."""
    kit = await idem(office)
    clock = asyncio.get_running_loop().time
    before = clock()
    await kit.advance("1d")
    assert clock() - before >= DAY.total_seconds()
