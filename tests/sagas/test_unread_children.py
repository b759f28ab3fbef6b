"""A child whose message is put aside unread has ended (L66)."""

from __future__ import annotations

import asyncio
import json

import psycopg
import pytest

from idemconsumer import (
    Message,
)
from idemconsumer.engine.dead_letter import dead_letter
from idemconsumer.engine.work import Work
from idemconsumer.errors import BadMessage
from idemconsumer.rules.values import State
from idemconsumer.settings import Settings
from idemconsumer.stores.columns import NewDeadLetter
from tests.support.families import (
    CLAIM_LOCK,
    RIDE,
    Family,
    nap,
    simple,
)
from tests.support.sagas import Bench
from tests.support.waiting import until


def unread(family: Family, body: bytes = b"{", reason: str = "undecodable") -> NewDeadLetter:
    """That of the message of the child `r`."""
    bound = family.bound["ride"]
    work = Work.of(bound, Message(bound.own_source, body, message_id="r"), refusal=BadMessage(reason, "at byte 1"))
    return dead_letter(work, reason, "at byte 1", 1)


@pytest.mark.parametrize("tenant", [None, "a/b%"])
async def test_a_child_whose_message_cannot_be_read_has_ended(family: Family, bench: Bench, tenant: str | None) -> None:
    """A worker puts its message aside, and the parent goes on."""
    family.book, parent = simple(family), family.app.handlers["book"]
    await family.app.start(parent, {"id": "t"}, key="t", tenant=tenant)
    bench.run(
        "create function spoil() returns trigger language plpgsql as $$ begin"
        " if new.name like '%/ride' then new.body = '{'; end if; return new; end $$"
    )
    bench.run("create trigger spoil before insert on idemconsumer.queue for each row execute function spoil()")
    worker = family.app.worker(Settings(dsn=bench.dsn, concurrency=2))
    running = asyncio.create_task(worker.run())
    try:
        outcome = await family.app.result(parent, key="t", tenant=tenant, wait="25s")
    finally:
        worker.drain()
        await running
        bench.run("drop function spoil() cascade")
    rejected = json.loads(outcome.result or b"")
    assert (outcome.state, rejected["code"], rejected["body"]["reason"]) == (State.FAILED, "dead_letter", "undecodable")
    assert [rejected["body"]["id"]] == [number for (number,) in bench.run("select id from idemconsumer.dead_letter")]
    assert family.states() == {"book": State.FAILED, "ride": State.FAILED}
    assert bench.effects == ["noted", "undo:noted:out:noted"]


async def test_a_child_that_has_begun_has_not_ended_with_a_copy_that_cannot_be_read(family: Family) -> None:
    family.ride = nap
    await family.begin(simple(family, "r"))
    await family.deliver()
    await family.station.store.bury(unread(family), None)
    assert family.states() == {"book": State.PROCESSING, "ride": State.PROCESSING}
    assert (await family.station.leases.look("shop", ["book"])).due == {}


async def test_a_child_that_begins_while_a_copy_is_put_aside_unread_has_not_ended(family: Family, bench: Bench) -> None:
    await family.begin(simple(family, "r"))
    async with await psycopg.AsyncConnection.connect(bench.dsn) as rival:
        await rival.execute("select set_config('idemconsumer.open', 't', true)")
        await rival.execute(CLAIM_LOCK, (RIDE,))
        burying = asyncio.create_task(family.station.store.bury(unread(family), None))
        await until(lambda: bench.waiting() == 1, "the letter waits for the claim")
        await rival.execute(
            "insert into idemconsumer.record (key, scope_id, state, changed_at) values (%s, 1, 1, clock_timestamp())",
            (RIDE,),
        )
        await rival.execute("select idemconsumer.seal('t')")
    await burying
    assert bench.run("select ended from idemconsumer.child") == [(False,)]


@pytest.mark.parametrize("body", [b"{", b"null"])
async def test_what_nobody_has_started_has_no_end_when_it_is_put_aside_unread(family: Family, body: bytes) -> None:
    await family.station.store.bury(unread(family, body), None)
    assert family.states() == {}


async def test_a_conflict_is_no_end_of_a_child(family: Family) -> None:
    await family.begin(simple(family, "r"))
    await family.station.store.bury(unread(family, reason="conflict"), None)
    assert family.states() == {"book": State.PROCESSING}
