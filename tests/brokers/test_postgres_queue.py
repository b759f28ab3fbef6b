"""The queue in Postgres: what is taken is hidden from others, and only its latest delivery settles it."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, closing
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from idemconsumer.brokers import postgres_broker as postgres
from idemconsumer.brokers.postgres_broker import PostgresBroker
from idemconsumer.brokers.postgres_session import PostgresSession
from idemconsumer.errors import BrokerUnavailable, ConfigurationError, SessionEnded
from idemconsumer.message.delivered import held_size
from idemconsumer.message.message import Subscription, Whole
from idemconsumer.ports.broker import Bounds, Delivery, Outgoing
from idemconsumer.settings import Settings
from idemconsumer.sql.answering import AnsweringConnection
from tests.support.inside import connection_of, doing_of, listening_connection, replace_doing
from tests.support.ledger import Ledger
from tests.support.servers.proxy import Proxy
from tests.support.tuning import tuned
from tests.support.waiting import PATIENCE, until

Opens = Callable[[], Awaitable[PostgresSession]]


@pytest.fixture
def ledger(database: str) -> Iterator[Ledger]:
    with closing(Ledger(database)) as ledger:
        yield ledger


@pytest.fixture
def broker(ledger: Ledger) -> PostgresBroker:
    return PostgresBroker(Settings(dsn=ledger.dsn))


@pytest.fixture
async def opened(broker: PostgresBroker) -> AsyncIterator[Opens]:
    async with AsyncExitStack() as stack:

        async def open_() -> PostgresSession:
            bounds = Bounds(lanes=1, group=1, room=10)
            session = await broker.open([Subscription("postgres:emails", "send", "shop")], bounds)
            stack.push_async_callback(session.close)
            return session

        yield open_


async def publish(broker: PostgresBroker, *bodies: bytes) -> None:
    await broker.publish("emails", [Outgoing(body) for body in bodies])


async def taken(session: PostgresSession) -> list[Delivery]:
    async with asyncio.timeout(30):
        while not (deliveries := await session.fetch()):
            pass
    return list(deliveries)


def waiting(ledger: Ledger) -> int:
    return len(ledger.run("select 1 from idemconsumer.queue"))


async def test_a_late_settlement_of_an_expired_delivery_deletes_nothing(
    ledger: Ledger, broker: PostgresBroker, opened: Opens
) -> None:
    await publish(broker, b"1")
    slow, quick = await opened(), await opened()
    (first,) = await taken(slow)
    ledger.run("update idemconsumer.queue set visible_at = clock_timestamp() - interval '1 second'")
    (second,) = await taken(quick)
    assert (second.suspect, second.count) == (True, 2)

    await slow.settle([first])
    assert waiting(ledger) == 1

    await quick.settle([second])
    assert waiting(ledger) == 0


async def test_of_a_body_above_the_limit_only_the_beginning_is_taken(broker: PostgresBroker) -> None:
    await publish(broker, b"x" * 100, b"x" * 101)
    bounds = Bounds(lanes=1, group=1, room=10, max_message_bytes=100)
    session = await broker.open([Subscription("postgres:emails", "send", "shop")], bounds)
    messages = [each.message for each in await taken(session)]
    assert bounds.memory.held == sum(map(held_size, messages))
    await session.close()

    assert [each.body for each in messages] == [b"x" * 100] * 2
    assert [each.whole for each in messages] == [None, Whole(101, hashlib.sha256(b"x" * 101).digest())]


async def test_what_another_is_taking_is_passed_over_and_not_waited_for(
    ledger: Ledger, broker: PostgresBroker, opened: Opens
) -> None:
    await publish(broker, b"1", b"2")
    session = await opened()
    with psycopg.connect(ledger.dsn) as other:
        other.execute("select 1 from idemconsumer.queue order by id limit 1 for update")
        async with asyncio.timeout(PATIENCE):
            assert [delivery.message.body for delivery in await taken(session)] == [b"2"]


@pytest.mark.parametrize("query", ["take", "finish", "extend"])
async def test_a_session_whose_server_says_nothing_ends(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch, query: str
) -> None:
    tuned(monkeypatch, queue_visibility=0.9 if query == "extend" else 10.0)
    async with Proxy(int(str(conninfo_to_dict(ledger.dsn)["port"]))) as proxy:
        broker = PostgresBroker(Settings(dsn=make_conninfo(ledger.dsn, host="127.0.0.1", port=proxy.port)))
        session = await broker.open([Subscription("postgres:emails", "send", "shop")], Bounds(lanes=1, group=1, room=9))
        await publish(broker, b"1")
        (delivery,) = await taken(session)
        proxy.freeze()
        connection_of(session).patience = 0.3
        async with asyncio.timeout(PATIENCE):
            if query == "finish":
                await session.settle([delivery])
            elif query == "extend":
                await until(lambda: delivery.epoch.ended)
            with pytest.raises(SessionEnded, match="no answer from the server"):
                await taken(session)
            await session.close()
        assert waiting(ledger) == 1


@pytest.fixture
def looks_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """At its beginning; what a session finds later it has been told of."""
    tuned(monkeypatch, queue_look_pause=3_600.0)


async def at_rest(session: PostgresSession) -> asyncio.Task[list[Delivery]]:
    """It has found nothing, and waits."""
    fetching = asyncio.create_task(taken(session))
    await until(lambda: bool(session._woken._waiters))
    return fetching


def counted(session: PostgresSession, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the statements that it sends from now on."""
    sent, do = list[str](), doing_of(session)

    async def send(query: str, params: dict[str, Any]) -> list[tuple[Any, ...]]:
        sent.append(query)
        return await do(query, params)

    replace_doing(monkeypatch, session, send)
    return sent


def unannounced(ledger: Ledger) -> None:
    ledger.run("insert into idemconsumer.queue (name, body) values ('emails', 'quiet')")


async def test_a_lost_listener_is_replaced_and_what_it_missed_is_looked_for(
    ledger: Ledger, broker: PostgresBroker, opened: Opens, looks_once: None
) -> None:
    woken: list[str] = []
    broker.wake_sagas_by(lambda: woken.append("look"))
    await publish(broker, b"held")
    session = await opened()
    (held,) = await taken(session)
    fetching = await at_rest(session)
    unannounced(ledger)
    ledger.run("select pg_terminate_backend(pid) from pg_stat_activity where query like 'listen %'")
    assert [delivery.message.body for delivery in await fetching] == [b"quiet"]
    assert woken, "a signal may have been missed, too"
    assert not held.epoch.ended, "what is in hand goes on"
    fetching = await at_rest(session)
    await publish(broker, b"announced")
    assert [delivery.message.body for delivery in await fetching] == [b"announced"]


async def test_a_listener_that_cannot_be_had_yet_keeps_no_session_from_opening(ledger: Ledger) -> None:
    """After a cut the two connections may reach two servers."""
    async with Proxy(int(str(conninfo_to_dict(ledger.dsn)["port"]))) as proxy:
        proxy.cut()
        listened = make_conninfo(ledger.dsn, host="127.0.0.1", port=proxy.port)
        broker = PostgresBroker(Settings(dsn=ledger.dsn, listen_dsn=listened))
        session = await emails_of(broker)
        await publish(broker, b"1")
        assert len(await taken(session)) == 1
        assert listening_connection(session) is None
        await proxy.restore()
        await until(lambda: listening_connection(session) is not None)
        await session.close()


async def test_a_listener_that_is_silent_is_replaced(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch, looks_once: None
) -> None:
    tuned(monkeypatch, listening_probe_pause=0.1)
    async with Proxy(int(str(conninfo_to_dict(ledger.dsn)["port"]))) as proxy:
        listen_dsn = make_conninfo(ledger.dsn, host="127.0.0.1", port=proxy.port)
        broker = PostgresBroker(Settings(dsn=ledger.dsn, listen_dsn=listen_dsn))
        session = await broker.open([Subscription("postgres:emails", "send", "shop")], Bounds(lanes=1, group=1, room=9))
        fetching = await at_rest(session)
        proxy.freeze()
        unannounced(ledger)
        silent = listening_connection(session)
        assert isinstance(silent, AnsweringConnection)
        silent.patience = 0.3
        await until(lambda: listening_connection(session) is not silent)
        proxy.thaw()
        assert [delivery.message.body for delivery in await fetching] == [b"quiet"]
        await session.close()


async def test_an_idle_session_sends_one_statement_a_look(opened: Opens, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned(monkeypatch, queue_look_pause=0.0)
    session = await opened()
    assert not await session.fetch()
    sent = counted(session, monkeypatch)
    for _ in range(3):
        assert not await session.fetch()
    assert sent == ["look_for_messages"] * 3


async def test_a_look_of_the_sagas_serves_its_queues_as_well(
    ledger: Ledger, broker: PostgresBroker, opened: Opens, monkeypatch: pytest.MonkeyPatch, looks_once: None
) -> None:
    session = await opened()
    fetching = await at_rest(session)
    sent = counted(session, monkeypatch)
    unannounced(ledger)
    assert broker.queues == ["emails", "control:"]
    broker.looked({"emails": -1.0})
    assert [delivery.message.body for delivery in await fetching] == [b"quiet"]
    assert "look_for_messages" not in sent
    await session.close()
    assert broker.queues == []


async def test_a_queue_that_held_up_a_look_of_the_sagas_is_in_none_until_it_has_looked_itself(
    ledger: Ledger, broker: PostgresBroker, opened: Opens, monkeypatch: pytest.MonkeyPatch, looks_once: None
) -> None:
    session = await opened()
    fetching = await at_rest(session)
    sent = counted(session, monkeypatch)
    async with await psycopg.AsyncConnection.connect(ledger.dsn) as rival:
        await rival.execute("lock table idemconsumer.queue")
        broker.held_up()
        assert broker.queues == []
        broker.looked({"emails": -1.0})  # of a look that was under way
        await until(lambda: sent == ["look_for_messages"], "it looks itself, and waits for the lock")
        assert broker.queues == []
        await rival.rollback()
    await until(lambda: broker.queues == ["emails", "control:"], "it has looked")
    unannounced(ledger)
    broker.looked({"emails": -1.0})
    assert [delivery.message.body for delivery in await fetching] == [b"quiet"]
    await session.close()


async def test_what_falls_due_between_two_looks_is_taken_then(ledger: Ledger, opened: Opens, looks_once: None) -> None:
    ledger.run("select idemconsumer.publish_bytes('emails', 'later', delay => interval '0.3 seconds')")
    assert [delivery.message.body for delivery in await taken(await opened())] == [b"later"]


async def test_what_is_announced_during_a_take_that_did_not_see_it_is_taken_next(
    ledger: Ledger, opened: Opens, monkeypatch: pytest.MonkeyPatch, looks_once: None
) -> None:
    session = await opened()
    do, late = doing_of(session), ["emails"]

    async def announced_late(query: str, params: dict[str, Any]) -> list[tuple[Any, ...]]:
        rows = await do(query, params)
        if query == "take" and late:
            unannounced(ledger)
            session._heard(late.pop())
        return rows

    replace_doing(monkeypatch, session, announced_late)
    assert [delivery.message.body for delivery in await taken(session)] == [b"quiet"]


async def test_a_queue_without_room_keeps_no_other_waiting(broker: PostgresBroker, looks_once: None) -> None:
    names = ["emails", "orders"]
    session = await broker.open(
        [Subscription(f"postgres:{name}", name, "shop") for name in names], Bounds(1, 1, room=0)
    )
    await publish(broker, b"1", b"2")
    (first,) = await taken(session)
    fetching = await at_rest(session)
    await broker.publish("orders", [Outgoing(b"other")])
    assert [delivery.message.source for delivery in await fetching] == ["postgres:orders"]
    fetching = await at_rest(session)
    await session.settle([first])
    assert [delivery.message.body for delivery in await fetching] == [b"2"]
    await session.close()


async def test_what_is_held_stays_hidden_from_others(
    monkeypatch: pytest.MonkeyPatch, ledger: Ledger, broker: PostgresBroker, opened: Opens
) -> None:
    tuned(monkeypatch, queue_visibility=6.0)  # so that it is moved on every two seconds
    await publish(broker, b"1")
    holder, other = await opened(), await opened()
    (held,) = await taken(holder)
    seen: set[object] = set()

    async def twice() -> bool:
        assert not await other.fetch()
        seen.add(ledger.run("select visible_at from idemconsumer.queue")[0])
        return len(seen) == 3

    await until(twice, "it is hidden for longer")
    await holder.settle([held])
    assert not await other.fetch()


async def test_what_was_never_started_comes_again_as_if_it_had_not_been_delivered(
    broker: PostgresBroker, opened: Opens
) -> None:
    await publish(broker, b"1")
    session = await opened()
    await session.release(await taken(session))
    (again,) = await taken(await opened())
    assert (again.suspect, again.count) == (False, 1)


async def test_what_was_begun_and_has_not_ended_comes_again_at_once_when_its_session_is_closed(
    broker: PostgresBroker, opened: Opens, ledger: Ledger
) -> None:
    await publish(broker, b"1")
    session = await opened()
    await taken(session)
    await session.close()
    assert ledger.run("select deliveries, visible_at <= clock_timestamp() from idemconsumer.queue") == [(1, True)]
    (again,) = await taken(await opened())
    assert (again.suspect, again.count) == (True, 2)


@pytest.fixture
async def proxy(ledger: Ledger) -> AsyncIterator[Proxy]:
    async with Proxy(int(str(conninfo_to_dict(ledger.dsn)["port"]))) as proxy:
        yield proxy


@pytest.fixture
def cut_off(ledger: Ledger, proxy: Proxy) -> PostgresBroker:
    """It reaches the database through the proxy."""
    return PostgresBroker(Settings(dsn=make_conninfo(ledger.dsn, host="127.0.0.1", port=proxy.port)))


async def lost(session: PostgresSession, proxy: Proxy) -> None:
    proxy.cut()
    with pytest.raises(SessionEnded):
        await taken(session)
    await session.close()
    await proxy.restore()


async def emails_of(broker: PostgresBroker) -> PostgresSession:
    return await broker.open([Subscription("postgres:emails", "send", "shop")], Bounds(lanes=1, group=1, room=10))


@pytest.mark.parametrize(("runs", "count"), [(False, 1), (True, 2)])
async def test_what_a_lost_session_had_is_there_as_soon_as_there_is_another(
    broker: PostgresBroker, cut_off: PostgresBroker, opened: Opens, proxy: Proxy, runs: bool, count: int
) -> None:
    """For others too, and not only when its time is over. What runs still may yet kill this process."""
    await publish(broker, b"1")
    session = await emails_of(cut_off)
    (delivery,) = await taken(session)
    if runs:
        delivery.epoch.start(1)
    await lost(session, proxy)
    next_one = await emails_of(cut_off)
    (again,) = await taken(next_one if runs else await opened())
    assert (again.suspect, again.count) == (runs, count)
    await next_one.close()


async def test_a_session_that_cannot_pay_names_its_queues_once(
    broker: PostgresBroker, cut_off: PostgresBroker, ledger: Ledger, proxy: Proxy
) -> None:
    await publish(broker, b"1")
    session = await emails_of(cut_off)
    await taken(session)
    await lost(session, proxy)
    ledger.run("alter schema idemconsumer rename to away")
    with pytest.raises(BrokerUnavailable, match=r"^postgres:emails: schema 'idemconsumer' does not exist"):
        await emails_of(cut_off)


async def test_a_settlement_that_was_lost_with_its_session_is_made_by_the_next_one(
    broker: PostgresBroker, cut_off: PostgresBroker, ledger: Ledger, proxy: Proxy
) -> None:
    await publish(broker, b"1", b"2")
    session = await emails_of(cut_off)
    one, two = await taken(session)
    proxy.cut()
    await session.settle([one])
    await session.release([two])
    await lost(session, proxy)
    rows = "select convert_from(body, 'UTF8'), deliveries, visible_at <= clock_timestamp() from idemconsumer.queue"
    assert ledger.run(rows) == [("1", 1, False), ("2", 1, False)]
    for _ in range(2):  # it is said once
        await (await emails_of(cut_off)).close()
    assert ledger.run(rows) == [("2", 0, True)]


async def test_what_a_session_took_without_hearing_of_it_is_there_too(
    broker: PostgresBroker, cut_off: PostgresBroker, opened: Opens, proxy: Proxy, ledger: Ledger
) -> None:
    """And what others have in hand stays theirs."""
    await publish(broker, b"1", b"2")
    other = await opened()
    async with asyncio.timeout(PATIENCE):
        assert len(await taken(other)) == 2
    await publish(broker, b"3")
    session = await emails_of(cut_off)
    proxy.cut_at(b"queue_token", mode="after", answer=b"")
    with pytest.raises(SessionEnded):
        await taken(session)
    await session.close()
    rows = "select convert_from(body, 'UTF8'), deliveries, visible_at <= clock_timestamp() from idemconsumer.queue"
    assert sorted(ledger.run(rows)) == [("1", 1, False), ("2", 1, False), ("3", 1, False)]
    await (await emails_of(cut_off)).close()
    assert sorted(ledger.run(rows)) == [("1", 1, False), ("2", 1, False), ("3", 0, True)]


async def test_what_cannot_be_given_back_either_is_given_back_later(
    broker: PostgresBroker, cut_off: PostgresBroker, opened: Opens, proxy: Proxy
) -> None:
    await publish(broker, b"1")
    session = await emails_of(cut_off)
    await taken(session)
    await lost(session, proxy)
    proxy.cut_at(b"set visible_at = clock_timestamp()", mode="before")
    with pytest.raises(BrokerUnavailable):
        await emails_of(cut_off)
    next_one = await emails_of(cut_off)
    (again,) = await taken(await opened())
    assert again.count == 1
    await next_one.close()


async def test_a_message_that_nothing_announced_is_found_within_seconds(ledger: Ledger, opened: Opens) -> None:
    session = await opened()
    assert not await session.fetch()
    ledger.run("insert into idemconsumer.queue (name, body) values ('emails', 'quiet')")
    assert [delivery.message.body for delivery in await taken(session)] == [b"quiet"]


async def test_an_opening_that_is_cut_off_closes_the_connection_that_it_makes(
    broker: PostgresBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    connecting, answer, closed = asyncio.Event(), asyncio.Event(), asyncio.Event()

    class Made:
        async def close(self) -> None:
            closed.set()

    async def connect(*_: object, **__: object) -> Made:
        connecting.set()
        await answer.wait()
        return Made()

    monkeypatch.setattr(postgres, "connect_async", connect)
    opening = asyncio.create_task(
        broker.open([Subscription("postgres:emails", "send", "shop")], Bounds(lanes=1, group=1))
    )
    await connecting.wait()
    opening.cancel()
    await asyncio.sleep(0)
    answer.set()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert closed.is_set()


async def test_what_cannot_be_published_leaves_nothing_of_its_batch(ledger: Ledger, broker: PostgresBroker) -> None:
    """Though all of it is sent before the first answer."""
    refused = Outgoing(b"2", delay=1e14)
    for batch in ([Outgoing(b"1"), refused], [refused, Outgoing(b"1")], [refused]):
        with pytest.raises(BrokerUnavailable, match="could not publish"):
            await broker.publish("emails", batch)
    assert waiting(ledger) == 0
    missing = PostgresBroker(Settings(dsn=ledger.dsn, schema="missing"))
    with pytest.raises(ConfigurationError, match="migrate up"):
        await missing.publish("emails", [Outgoing(b"1")])


async def test_a_message_arrives_in_the_room_of_its_bytes(
    broker: PostgresBroker, opened: Opens, tmp_path: Path
) -> None:
    session = await opened()
    with (tmp_path / "trace").open("w+") as traced:
        connection_of(session).pgconn.trace(traced.fileno())
        await publish(broker, b"\xff" * 10_000)
        (delivery,) = await taken(session)
        connection_of(session).pgconn.untrace()
        rows = re.findall(r"\tB\t(\d+)\tDataRow", (tmp_path / "trace").read_text(errors="replace"))
    assert len(delivery.message.body) == 10_000
    assert 10_000 < max(map(int, rows)) < 11_000, "as text it has twice as many"


async def test_what_others_have_overtaken_is_taken_once_it_is_committed(ledger: Ledger, opened: Opens) -> None:
    """P9. However far the low water has come meanwhile."""
    session = await opened()
    with psycopg.connect(ledger.dsn) as slow:
        slow.execute("select idemconsumer.publish_bytes('emails', 'slow')")
        for _ in range(2):
            ledger.run("insert into idemconsumer.queue (name, body) select 'emails', 'x' from generate_series(1, 300)")
            session.looked({"emails": 0.0})
            while waiting(ledger):
                await session.settle(await taken(session))
        assert ledger.run(
            "select low <= 1, cardinality(writers) from idemconsumer.low_water order by id desc limit 1"
        ) == [(True, 1)]
    (late,) = await taken(session)
    assert late.message.body == b"slow"


async def test_what_is_in_hand_for_long_does_not_keep_the_low_water(
    monkeypatch: pytest.MonkeyPatch, ledger: Ledger, broker: PostgresBroker, opened: Opens
) -> None:
    """P9. It gets a place behind all others, and is still there if its worker dies."""
    tuned(monkeypatch, queue_visibility=0.9, queue_long_in_hand=2)
    await publish(broker, b"long")
    session = await opened()
    (held,) = await taken(session)
    await until(lambda: ledger.run("select moved > id from idemconsumer.queue")[0][0], "it has another place")
    ledger.run("select setval('idemconsumer.queue_id_seq', 1000)")
    for _ in range(3):
        ledger.run("select idemconsumer.raise_low_water('queue', 'emails')")
    assert ledger.run(
        "select count(*) from idemconsumer.queue as q where idemconsumer.low_water_of('queue', q.name) > q.id"
    ) == [(1,)]
    await session.close()
    (again,) = await taken(await opened())
    assert (again.message.body, again.handle[0]) == (b"long", held.handle[0])
