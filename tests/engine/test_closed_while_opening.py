"""O36: an app that is closed while calls of its still open what they need."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aio_pika
import pytest
from aiokafka import AIOKafkaProducer

from idemconsumer import App, BrokerUnavailable, Message, Saga, StoreUnavailable, Tx
from idemconsumer.brokers.sqs.sqs_client import SqsLink
from idemconsumer.stores import joined
from idemconsumer.stores.agreed_hashing import settle_hashing
from idemconsumer.worker.saga_lease import SagaLease
from tests.support.ledger import SOURCE, Ledger, message, write
from tests.support.waiting import PATIENCE, until

CLOSED = "`close` was called before this call had begun, so nothing was done"


class Gate:
    pass


class Later:
    pass


class Held:
    """Stands in for what opens something: it begins, and does not end by itself."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.cut_off = False

    async def __call__(self, *_: Any, **__: Any) -> Any:
        self.begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.cut_off = True


@pytest.fixture
def held() -> Held:
    return Held()


@pytest.fixture
async def app(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[App]:
    monkeypatch.setenv("IDEMCONSUMER_DSN", ledger.dsn)
    app = App("shop")

    @app.resource
    async def gate() -> AsyncIterator[Gate]:
        yield Gate()

    @app.idempotent_handler(SOURCE, key="id", max_attempts=1)
    async def pay(order: dict[str, Any], tx: Tx, gate: Gate) -> None:
        await write(tx, order["id"])

    @app.idempotent_handler("memory:rides", key="id", max_attempts=1)
    async def ride(order: dict[str, Any], saga: Saga) -> None: ...

    yield app
    await app.close()


def calls(app: App) -> dict[str, Callable[[], Awaitable[object]]]:
    pay, ride = app.handlers["pay"], app.handlers["ride"]
    return {
        "process": lambda: app.process(message(1)),
        "result": lambda: app.result(pay, key="1"),
        "accept": lambda: app.accept(pay, {"id": "1"}, key="1"),
        "accepted": lambda: app.accepted(pay, key="1"),
        "signal": lambda: app.signal(ride, key="1", name="go"),
    }


async def closed_meanwhile(app: App, held: Held, *given: Callable[[], Awaitable[object]]) -> list[object]:
    calling = [asyncio.ensure_future(call()) for call in given]
    async with asyncio.timeout(PATIENCE):
        await held.begun.wait()
        await app.close()
        return await asyncio.gather(*calling, return_exceptions=True)


async def test_calls_that_open_the_database_are_ended_and_nothing_is_counted(
    ledger: Ledger, app: App, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(joined, "settle_hashing", held)
        for error in await closed_meanwhile(app, held, *calls(app).values()):
            assert isinstance(error, StoreUnavailable)
            assert CLOSED in str(error)
    assert (ledger.letters, ledger.attempts, ledger.states) == ([], [], [])
    await until(lambda: ledger.sessions("idle", "active", "idle in transaction") == 0)
    assert (await app.process(message(1))).kind == "applied", "it opens again"


async def test_what_swallows_its_end_is_closed_all_the_same(
    ledger: Ledger, app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `asyncio.wait_for` does before Python 3.12. The call that has lost its app takes no parts of the next."""
    begun = asyncio.Event()

    async def swallowing(*given: Any) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await settle_hashing(*given)

    with monkeypatch.context() as patched:
        patched.setattr(joined, "settle_hashing", swallowing)
        calling = asyncio.ensure_future(app.process(message(1)))
        async with asyncio.timeout(PATIENCE):
            await begun.wait()
            await app.close()
        with pytest.raises(StoreUnavailable, match=CLOSED):
            await calling
    assert (ledger.letters, ledger.attempts, ledger.states) == ([], [], [])
    await until(lambda: ledger.sessions("idle", "active", "idle in transaction") == 0)


async def test_resources_that_are_being_made_are_ended_and_those_before_them_closed(
    ledger: Ledger, app: App, held: Held
) -> None:
    @app.resource
    async def later() -> AsyncIterator[Later]:
        await held()
        yield Later()

    for error in await closed_meanwhile(app, held, *[calls(app)["process"]] * 2):
        assert isinstance(error, StoreUnavailable)
    assert (held.cut_off, ledger.letters, ledger.attempts) == (True, [], [])


async def test_a_lease_that_is_being_registered_is_ended(
    ledger: Ledger, app: App, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SagaLease, "open", held)
    ride = Message("memory:rides", b'{"id": 1}')
    (error,) = await closed_meanwhile(app, held, lambda: app.process(ride))
    assert isinstance(error, StoreUnavailable)
    assert (held.cut_off, ledger.letters, ledger.attempts) == (True, [], [])


@pytest.mark.parametrize(
    ("destination", "owner", "connects"),
    [
        ("kafka:orders", AIOKafkaProducer, "start"),
        ("rabbitmq:orders", aio_pika, "connect"),
        ("sqs:orders", SqsLink, "connect"),
    ],
)
async def test_a_broker_that_is_being_reached_is_left(
    app: App, held: Held, monkeypatch: pytest.MonkeyPatch, destination: str, owner: object, connects: str
) -> None:
    monkeypatch.setenv("IDEMCONSUMER_KAFKA", "127.0.0.1:1")
    monkeypatch.setenv("IDEMCONSUMER_RABBITMQ", "amqp://127.0.0.1:1")
    monkeypatch.setenv("IDEMCONSUMER_SQS", "http://127.0.0.1:1")
    monkeypatch.setattr(owner, connects, held)

    async def publish() -> None:
        await app.publish(destination, {"id": 1})

    for error in await closed_meanwhile(app, held, *[publish] * 2):
        assert isinstance(error, BrokerUnavailable)
        assert CLOSED in str(error)
    assert held.cut_off
