"""Resources: made once a process, asked for by type, closed in reverse."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

import psycopg
import pytest

from idemconsumer import App, Batch, ConfigurationError, HandlerError, Message, Saga, Tx
from idemconsumer.handlers.batch import Items
from idemconsumer.settings import Settings
from idemconsumer.stores.migrations import migrate
from idemconsumer.worker.worker import Worker
from tests.support.logs import capture_logs


class Client:
    def __init__(self, number: int) -> None:
        self.number = number


class Cache:
    pass


class Gateway:
    pass


class Life:
    """An app with two resources, and what became of them."""

    def __init__(self) -> None:
        self.app = App("lives")
        self.events: list[str] = []
        self.finished = asyncio.Event()

        @self.app.resource
        async def client() -> AsyncIterator[Client]:
            self.events.append("client made")
            yield Client(7)
            self.events.append("client closed")

        @self.app.resource
        async def cache() -> AsyncGenerator[Cache, None]:
            self.events.append("cache made")
            yield Cache()
            self.events.append("cache closed")

    def settings(self, dsn: str, **more: Any) -> Settings:
        return Settings(dsn=dsn, concurrency=2, **more)


@pytest.fixture
def migrated(database: str) -> str:
    migrate(database, "idemconsumer")
    return database


async def publish(dsn: str, queue: str, *numbers: int) -> None:
    async with await psycopg.AsyncConnection.connect(dsn) as connection:
        for number in numbers:
            payload = f'{{"id":"{number}"}}'
            await connection.execute("select idemconsumer.publish(%s, %s::jsonb)", (queue, payload))


async def drained(worker: Worker, when: asyncio.Event) -> None:
    running = asyncio.create_task(worker.run())
    waiting = asyncio.create_task(when.wait())
    async with asyncio.timeout(20):
        await asyncio.wait([running, waiting], return_when=asyncio.FIRST_COMPLETED)
        worker.drain()
        await running
    waiting.cancel()


async def test_a_resource_is_made_once_before_the_first_message_and_closed_after_the_last(migrated: str) -> None:
    life, seen = Life(), list[Client]()

    @life.app.idempotent_handler("postgres:a", key="id")
    async def joined(payload: dict[str, str], message: Message, client: Client, tx: Tx, *, cache: Cache) -> None:
        assert isinstance(cache, Cache)
        await tx.execute("select 1")
        life.events.append(f"ran {payload['id']} with {client.number}")
        seen.append(client)

    @life.app.idempotent_handler("postgres:b", key="id")
    async def leased(payload: dict[str, str], client: Client, saga: Saga) -> str | None:
        life.events.append(f"ran {payload['id']} with {client.number}")
        seen.append(client)
        life.finished.set()
        return saga.recovery_point

    await publish(migrated, "a", 1)
    worker = life.app.worker(life.settings(migrated, handlers="joined", until_empty=True))
    await worker.run()
    assert life.events == ["client made", "cache made", "ran 1 with 7", "cache closed", "client closed"]

    life.events.clear()
    await publish(migrated, "b", 2)
    await drained(life.app.worker(life.settings(migrated)), life.finished)
    assert life.events == ["client made", "cache made", "ran 2 with 7", "cache closed", "client closed"]
    assert len({id(client) for client in seen}) == 2


async def test_a_plain_handler_gets_resources_too(migrated: str) -> None:
    life = Life()

    @life.app.idempotent_handler("postgres:a", key="id")
    def plain(payload: dict[str, str], client: Client) -> None:
        life.events.append(f"ran with {client.number}")

    await publish(migrated, "a", 1)
    await life.app.worker(life.settings(migrated, until_empty=True)).run()
    assert "ran with 7" in life.events


async def test_process_makes_resources_at_its_first_call_and_close_closes_them(
    migrated: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IDEMCONSUMER_DSN", migrated)
    life = Life()

    @life.app.idempotent_handler("memory:a", key="id")
    async def joined(payload: dict[str, str], client: Client) -> int:
        return client.number

    outcomes = await asyncio.gather(*(life.app.process(Message("memory:a", b'{"id":"%d"}' % n)) for n in range(3)))
    assert [outcome.result for outcome in outcomes] == [b"7"] * 3
    assert life.events == ["client made", "cache made"]
    await life.app.close()
    assert life.events[2:] == ["cache closed", "client closed"]


async def test_one_that_cannot_be_made_stops_the_start_and_closes_the_others(migrated: str) -> None:
    life = Life()

    @life.app.resource
    async def gateway() -> AsyncIterator[Gateway]:
        raise OSError("no route to the gateway")
        yield Gateway()

    @life.app.idempotent_handler("postgres:a", key="id")
    async def joined(payload: dict[str, str]) -> None: ...

    with pytest.raises(
        ConfigurationError, match="resource 'gateway' could not be made: OSError: no route to the gateway"
    ):
        await life.app.worker(life.settings(migrated)).run()
    assert life.events == ["client made", "cache made", "cache closed", "client closed"]


async def test_one_that_cannot_be_closed_does_not_keep_the_others_open(migrated: str) -> None:
    life = Life()

    @life.app.resource
    async def gateway() -> AsyncIterator[Gateway]:
        yield Gateway()
        raise OSError("already closed")

    @life.app.idempotent_handler("postgres:a", key="id")
    async def joined(payload: dict[str, str], gateway: Gateway) -> None: ...

    with capture_logs() as logs:
        await life.app.worker(life.settings(migrated, until_empty=True)).run()
    assert {"event": "resource not closed", "resource": "gateway"}.items() <= next(
        log for log in logs if "resource" in log
    ).items()
    assert life.events[-2:] == ["cache closed", "client closed"]


@pytest.mark.parametrize("when", ["made", "closed"])
async def test_one_that_is_cancelled_from_inside_is_told_like_any_that_fails(migrated: str, when: str) -> None:
    life = Life()

    @life.app.resource
    async def gateway() -> AsyncIterator[Gateway]:
        if when == "made":
            raise asyncio.CancelledError
        yield Gateway()
        raise asyncio.CancelledError

    @life.app.idempotent_handler("postgres:lives", key="id")
    async def live(payload: dict[str, Any], tx: Tx) -> None:
        life.finished.set()

    await publish(migrated, "lives", 1)
    worker = life.app.worker(life.settings(migrated))
    if when == "made":
        with pytest.raises(ConfigurationError, match="resource 'gateway' could not be made: CancelledError"):
            await worker.run()
    else:
        await drained(worker, life.finished)
    assert life.events == ["client made", "cache made", "cache closed", "client closed"]


async def test_a_start_that_is_cancelled_while_a_resource_is_made_is_cancelled(migrated: str) -> None:
    life, making = Life(), asyncio.Event()

    @life.app.resource
    async def gateway() -> AsyncIterator[Gateway]:
        making.set()
        await asyncio.Event().wait()
        yield Gateway()

    @life.app.idempotent_handler("postgres:lives", key="id")
    async def live(payload: dict[str, Any], tx: Tx) -> None: ...

    running = asyncio.create_task(life.app.worker(life.settings(migrated)).run())
    await making.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert life.events == ["client made", "cache made", "cache closed", "client closed"]


async def test_a_resource_without_a_yield_is_refused(migrated: str) -> None:
    app = App("lives")

    @app.resource
    async def client() -> AsyncIterator[Client]:
        if migrated == "":
            yield Client(1)

    @app.idempotent_handler("postgres:a", key="id")
    async def joined(payload: dict[str, str]) -> None: ...

    with pytest.raises(ConfigurationError, match="resource 'client' ended without a yield; yield the object once"):
        await app.worker(Settings(dsn=migrated)).run()


# ---------------------------------------------------------------------------------------------------------- definitions
async def coroutine() -> Client:
    return Client(1)


async def parameters(url: str) -> AsyncIterator[Client]:
    yield Client(len(url))


async def unannotated():  # type: ignore[no-untyped-def]
    yield Client(1)


async def too_common() -> AsyncIterator[dict[str, int]]:
    yield {}


async def a_number() -> AsyncIterator[int]:
    yield 5


async def of_the_engine() -> AsyncIterator[Message]:
    yield Message("memory:a", b"")


async def a_batch() -> AsyncIterator[Batch]:  # type: ignore[type-arg]
    yield Items([], [])


@pytest.mark.parametrize(
    ("fn", "says"),
    [
        (coroutine, "resource 'coroutine' is not an async generator; write `async def coroutine() -> AsyncIterator"),
        (parameters, "resource 'parameters' takes parameters, but none are passed"),
        (unannotated, "resource 'unannotated' has no usable return annotation; annotate it `-> AsyncIterator[Client]`"),
        (too_common, "has no usable return annotation"),
        (a_number, "has no usable return annotation"),
        (of_the_engine, "has no usable return annotation"),
        (a_batch, "has no usable return annotation"),
    ],
)
def test_what_is_not_a_resource_is_refused_where_it_is_defined(fn: Callable[..., Any], says: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        App("lives").resource(fn)
    assert says in str(caught.value)


async def test_two_of_one_type_are_refused() -> None:
    life = Life()

    async def another() -> AsyncIterator[Client]:
        yield Client(8)

    with pytest.raises(ConfigurationError, match="resources 'client' and 'another' both make Client"):
        life.app.resource(another)


async def test_a_parameter_that_no_resource_fills_stops_the_start() -> None:
    app = App("lives")

    @app.idempotent_handler("postgres:a", key="id")
    async def joined(payload: dict[str, str], tx: Tx, client: Client) -> None: ...

    with pytest.raises(HandlerError) as caught:
        app.worker(Settings(dsn="postgresql://nowhere"))
    assert str(caught.value) == (
        "handler 'joined': parameter `client` is of type Client, which cannot be injected; after the payload a "
        "handler can take Tx or Saga, Message, and the resources of app 'lives': no resources so far (@app.resource)"
    )

    @app.resource
    async def client() -> AsyncIterator[Client]:  # a handler may be defined before the resource that it asks for
        yield Client(1)

    app.worker(Settings(dsn="postgresql://nowhere"))
