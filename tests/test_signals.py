"""Signals from code, from messages and from the command line, to sagas of a whole worker."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import psycopg
import pytest
from click.testing import CliRunner

from idemconsumer import App, ConfigurationError, HandlerError, Key, Saga, Signalled, Tx
from idemconsumer.cli.main import main
from idemconsumer.process.child import Exit
from idemconsumer.rules.values import State
from idemconsumer.settings import Settings
from tests.support.servers.postgres import migrated
from tests.support.waiting import until


class Ride(msgspec.Struct):
    id: str


class Settled(msgspec.Struct):
    id: str
    ride: str
    amount: int


class Rides:
    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        self.app = app = App("rides")

        @app.idempotent_handler("postgres:rides", key="id")
        async def book(ride: Ride, saga: Saga) -> int:
            return (await saga.wait("settled", into=Settled)).amount

        @app.signal_handler("postgres:settled", saga=book, name="settled", key="id", saga_key="ride", max_attempts=2)
        async def settled(payment: Settled, tx: Tx) -> Settled:
            await tx.execute("insert into payment values (%s)", (payment.id,))
            return payment

        @app.idempotent_handler("postgres:joined", key="id")
        async def joined(ride: Ride, tx: Tx) -> None:
            await app.signal(book, key=ride.id, name="settled", payload=Settled("p", ride.id, 5), tx=tx)

        self.book, self.settled = book, settled

    @asynccontextmanager
    async def worker(self) -> AsyncIterator[None]:
        worker = self.app.worker(Settings(dsn=self.dsn, concurrency=2))
        running = asyncio.create_task(worker.run())
        try:
            async with asyncio.timeout(30):
                yield
        finally:
            worker.drain()
            await running

    async def sql(self, query: str) -> list[tuple[Any, ...]]:
        async with await psycopg.AsyncConnection.connect(self.dsn) as connection:
            return await (await connection.execute(query.encode())).fetchall()

    async def waits(self) -> bool:
        """Whether the one saga waits, and is in no process."""
        return await self.sql("select signals from idemconsumer.saga where worker is null") == [(["settled"],)]

    def type(self, *words: str) -> tuple[int, str]:
        result = CliRunner().invoke(main, ["sagas", *words, "--dsn", self.dsn])
        return result.exit_code, result.output


@pytest.fixture
async def rides(database: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rides]:
    migrated(database, "idemconsumer")
    monkeypatch.setenv("IDEMCONSUMER_DSN", database)
    async with await psycopg.AsyncConnection.connect(database) as connection:
        await connection.execute("create table payment (id text unique deferrable initially deferred)")
    rides = Rides(database)
    yield rides
    await rides.app.close()


async def test_a_saga_waits_for_what_code_sends_it(rides: Rides) -> None:
    async with rides.worker():
        await rides.app.start(rides.book, Ride("r"), key="r")
        await until(rides.waits, "it waits")
        sent = await rides.app.signal(rides.book, key="r", name="settled", payload=Settled("p", "r", 7))
        assert sent is Signalled.STORED
        assert (await rides.app.result(rides.book, key="r", wait="20s")).result == b"7"
    assert await rides.app.signal(rides.book, key="r", name="settled") is Signalled.ENDED


async def test_a_signal_in_a_transaction_is_sent_with_it(rides: Rides) -> None:
    async def send(connection: psycopg.AsyncConnection[Any], amount: int) -> Signalled:
        payload = Settled("p", "r", amount)
        return await rides.app.signal(rides.book, key="r", name="settled", payload=payload, tx=connection)

    async with await psycopg.AsyncConnection.connect(rides.dsn) as connection:
        assert await send(connection, 1) is Signalled.EARLY
        await connection.rollback()
        assert await send(connection, 2) is Signalled.EARLY
        await connection.commit()
    async with rides.worker():
        await rides.app.start(rides.book, Ride("r"), key="r")
        assert (await rides.app.result(rides.book, key="r", wait="20s")).result == b"2"


async def test_a_handler_sends_a_signal_with_its_own_commit(rides: Rides) -> None:
    async with rides.worker():
        await rides.app.start(rides.book, Ride("r"), key="r")
        await rides.app.publish("postgres:joined", Ride("r"))
        assert (await rides.app.result(rides.book, key="r", wait="20s")).result == b"5"


async def test_a_message_is_a_signal_once(rides: Rides) -> None:
    for ride in ("r", "r", "s"):  # one that arrives twice, and one more
        await rides.app.publish("postgres:settled", Settled(f"pay {ride}", ride, 9))
    async with rides.worker():
        await until(lambda: rides.sql("select from idemconsumer.queue having count(*) = 0"), "all are handled")
        assert await rides.sql("select count(*) from idemconsumer.signal") == [(2,)]
        await rides.app.start(rides.book, Ride("r"), key="r")
        assert (await rides.app.result(rides.book, key="r", wait="20s")).result == b"9"
        answer = await rides.app.result(rides.settled, key="pay r", wait="20s")
    assert (answer.state, answer.result) == (State.COMPLETED, b'"early"')
    assert await rides.sql("select count(*) from payment") == [(2,)]
    assert await rides.sql("select count(*) from idemconsumer.signal") == [(1,)]


async def test_a_message_that_is_not_committed_is_no_signal(rides: Rides) -> None:
    await rides.sql("insert into payment values ('pay r') returning id")
    await rides.app.publish("postgres:settled", Settled("pay r", "r", 9))
    async with rides.worker():
        await until(lambda: rides.sql("select from idemconsumer.dead_letter"), "it has failed at each COMMIT")
    assert await rides.sql("select count(*) from idemconsumer.signal") == [(0,)]


async def test_the_command_line_says_what_a_saga_waits_for_and_sends_it(rides: Rides) -> None:
    def type_all() -> None:
        code, listed = rides.type("list")
        assert code == 0
        assert "processing, signal settled until 2" in listed
        (line,) = json.loads(rides.type("list", "--json")[1])
        assert line["waits"] == ["signal settled"]
        shown = rides.type("show", line["key"][:8])[1]
        assert "waits for   signal settled" in shown
        assert "step settled waits for signal settled" in shown
        (step,) = json.loads(rides.type("show", line["key"][:8], "--json")[1])["steps"]
        assert (step["kind"], step["state"], step["signal"]) == ("wait", "waiting", "settled")
        assert step["until"] is not None
        code, said = rides.type("signal", line["key"][:8], "--name", "settled", "--payload", "{")
        assert (code, "--payload is not JSON" in said) == (2, True)
        given = '{"id": "p", "ride": "r", "amount": 3}'
        code, said = rides.type("signal", "--handler", "book", "--key", "r", "--name", "settled", "--payload", given)
        assert (code, said) == (0, f"sent: settled to {line['key'][:12]}\n")

    async with rides.worker():
        await rides.app.start(rides.book, Ride("r"), key="r")
        await until(rides.waits, "it waits")
        await asyncio.to_thread(type_all)
        assert (await rides.app.result(rides.book, key="r", wait="20s")).result == b"3"
    given = ("signal", "--handler", "book", "--key", "r", "--name", "settled", "--json")
    code, said = await asyncio.to_thread(rides.type, *given)
    assert code == Exit.ERROR
    assert '"ended"' in said


async def test_a_signal_needs_a_saga_of_the_app_and_a_name(rides: Rides) -> None:
    with pytest.raises(ConfigurationError, match="'settled' is not a saga of this app"):
        await rides.app.signal(rides.settled, key="r", name="settled")
    with pytest.raises(ConfigurationError, match="a signal's name is ''"):
        await rides.app.signal(rides.book, key="r", name="")
    with pytest.raises(ConfigurationError, match="'child:ab', and names that begin with 'child:' are for the ends of"):
        await rides.app.signal(rides.book, key="r", name="child:ab")


def test_a_signal_handler_is_refused_when_it_is_decorated() -> None:
    app = App("rides")

    @app.idempotent_handler("postgres:rides", key="id")
    async def book(ride: Ride, saga: Saga) -> None: ...

    with pytest.raises(HandlerError, match="it sends signals and takes Saga"):

        @app.signal_handler("postgres:a", saga=book, name="n", key="id")
        async def one(payment: Settled, saga: Saga) -> None: ...

    with pytest.raises(HandlerError, match="saga_key"):

        @app.signal_handler("postgres:a", saga=book, name="n", key=Key.message_id(), saga_key="nothing")
        async def two(payment: Settled) -> None: ...

    with pytest.raises(ConfigurationError, match="the signal's name is 'child:ab', and names that begin with"):

        @app.signal_handler("postgres:a", saga=book, name="child:ab", key="id")
        async def four(payment: Settled) -> None: ...

    with pytest.raises(ConfigurationError, match="is not a saga of this app"):

        @App("other").signal_handler("postgres:a", saga=book, name="n", key="id")
        async def three(payment: Settled) -> None: ...


def test_a_signal_handler_has_a_tenant_if_its_sagas_have_one() -> None:
    """Its signals were kept for sagas that never begin, and those that waited never got them."""
    app = App("rides")

    @app.idempotent_handler("postgres:rides", key="id", tenant="city")
    async def book(ride: dict[str, str], saga: Saga) -> None: ...

    with pytest.raises(HandlerError, match=r"each saga of 'book' has one.*; write tenant= here too"):

        @app.signal_handler("postgres:a", saga=book, name="n", key="id")
        async def without(payment: dict[str, str]) -> None: ...

    @app.signal_handler("postgres:a", saga=book, name="n", key="id", tenant="town")
    async def with_one(payment: dict[str, str]) -> None: ...
