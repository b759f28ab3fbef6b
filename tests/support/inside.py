"""What tests see and change inside the package, under names of their own; its constants are in `tuning`."""

from __future__ import annotations

import asyncio
import os
import socket
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from idemconsumer.sagas.branches import Group
from idemconsumer.stores.connection import Connection
from idemconsumer.user_code import cancellation

if TYPE_CHECKING:
    import pytest

    from idemconsumer import App
    from idemconsumer.app.inline import InlineRunner
    from idemconsumer.brokers.kafka.kafka_session import KafkaSession
    from idemconsumer.brokers.memory import MemoryBroker
    from idemconsumer.brokers.postgres_broker import PostgresBroker
    from idemconsumer.brokers.postgres_session import PostgresSession
    from idemconsumer.brokers.rabbitmq.rabbitmq_session import RabbitmqSession
    from idemconsumer.brokers.sqs.sqs_session import SqsSession
    from idemconsumer.engine.company import Company
    from idemconsumer.engine.engine import Engine
    from idemconsumer.engine.group_sizes import GroupSizes
    from idemconsumer.handlers.handler import BoundHandler
    from idemconsumer.observe.summing import Summing
    from idemconsumer.rules.habits import Habits
    from idemconsumer.sagas.saga_engine import LeasedEngine
    from idemconsumer.settings import Settings
    from idemconsumer.stores.claims import PostgresClaims
    from idemconsumer.stores.heartbeat import Heartbeat
    from idemconsumer.stores.joined import PostgresStore
    from idemconsumer.stores.leases import PostgresLeases
    from idemconsumer.stores.pool import Pool
    from idemconsumer.stores.redis.keeping import Keeper
    from idemconsumer.stores.redis.redis_requests import RedisRequests
    from idemconsumer.stores.sharing import Sharing
    from idemconsumer.stores.tx import PostgresTx
    from idemconsumer.worker.deadlines import Deadlines
    from idemconsumer.worker.lanes import Lanes
    from idemconsumer.worker.worker import Worker


# --------------------------------------------------------------------------------------------------- apps and workers
def left_behind() -> set[asyncio.Task[Any]]:
    """The tasks of this process that did not end though they were cancelled."""
    return cancellation._LEFT_BEHIND


def give_settings(app: App, settings: Settings) -> None:
    """As if a worker of the app ran in this process, with these."""
    app._settings = settings


async def inline_of(app: App) -> InlineRunner:
    """What runs messages in this process, without a worker."""
    return await app._running()


def lanes_if_any(worker: Worker) -> Lanes | None:
    """None until it has connected."""
    return worker._lanes


def lanes_of(worker: Worker) -> Lanes:
    lanes = lanes_if_any(worker)
    assert lanes is not None, "it has not connected yet"
    return lanes


def in_flight(worker: Worker) -> int:
    return lanes_of(worker).in_hand.in_flight


def draining(worker: Worker) -> bool:
    lanes = lanes_if_any(worker)
    return lanes is not None and lanes.in_hand.draining


def nothing_in_flight(worker: Worker) -> bool:
    """It has connected, and nothing is in flight."""
    lanes = lanes_if_any(worker)
    return lanes is not None and lanes.in_hand.in_flight == 0


def waiting_room(worker: Worker, handler: str) -> list[Any]:
    """What of this handler waits for a rival elsewhere than in its lane."""
    lanes = lanes_if_any(worker)
    return [] if lanes is None else list(lanes.of(handler).strands.rivals)


def in_memory(broker: MemoryBroker, name: str) -> deque[Any]:
    """What waits in a queue in memory to be fetched."""
    return broker._queue(name).waiting


def pool_of(deadlines: Deadlines) -> Any:
    return deadlines._pool


def kinds_summed(summing: Summing) -> list[Any]:
    """Of each kind of line that comes often, what is still to be said."""
    return list(summing._kinds.values())


# ------------------------------------------------------------------------------------------------------------- engines
def sizes_of(engine: Engine) -> GroupSizes:
    return engine._sizes


def replace_size(engine: Engine, handler: BoundHandler, size: Any) -> None:
    sizes_of(engine)._sizes[handler.name] = size


def waiting_for(company: Company) -> int:
    """How many wait to be let in."""
    return len(company._waiting)


def impatient(company: Company) -> bool:
    """Whether it is going to ask those inside to give way."""
    return company._impatience is not None


def set_patience(company: Company, seconds: float) -> None:
    """Until those inside are asked to give way."""
    company._patience = seconds


def set_longest(company: Company, seconds: float) -> None:
    """Until one that was asked to give way is not waited for any longer."""
    company._longest = seconds


def token_of(saga: Any) -> int:
    """Under which this run of the saga writes."""
    return int(saga._run.steps.saga.token)


def is_interrupted(saga: Any) -> bool:
    """Whether this run has been ended, so that nothing follows from what its handler is still given."""
    return saga._run.interruption is not None


def texts_known(habits: Habits) -> list[str]:
    return list(habits._missing)


def sagas_in_hand(engine: LeasedEngine) -> set[Any]:
    return {call.work for call in engine._active.values()}


def stand_for(engine: LeasedEngine, seconds: float) -> None:
    """As if no saga had got on for so much longer."""
    engine._moved -= seconds


def when_stopped(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """`act` is called whenever a branch of an `all` has raised, so that no step begins any more."""
    stop = Group.stop

    def stopped(group: Group) -> None:
        stop(group)
        act()

    monkeypatch.setattr(Group, "stop", stopped)


# ------------------------------------------------------------------------------------------------------------ Postgres
def connections_of(app: App) -> Any:
    """The pool of psycopg's of an app whose process runs without a worker."""
    inline = app._opened.here().inline
    assert inline is not None
    return own_pool(inline._store)


def own_pool(store: PostgresStore) -> Any:
    """The pool of psycopg's that a store's pool is made of."""
    return store.pool._pool


def watched(connection: Connection) -> bool:
    """Whether the loop watches its socket while nobody waits for an answer."""
    return connection._watched is not None


def patient_unless(monkeypatch: pytest.MonkeyPatch, silenced: Callable[[int], bool]) -> None:
    """However short the patience of stores is, it ends only with a connection of whose port here this is true: a server
    that a busy machine keeps from answering is waited for."""
    look_out = Connection._look_out

    def look(connection: Connection) -> None:
        with socket.socket(fileno=os.dup(connection.pgconn.socket)) as same:
            if not silenced(same.getsockname()[1]):
                connection._since = asyncio.get_running_loop().time()
        look_out(connection)

    monkeypatch.setattr(Connection, "_look_out", look)


def connection_of(owner: PostgresSession | PostgresClaims) -> Any:
    """What it sends its statements on."""
    return owner._connection


def converted(tx: PostgresTx) -> list[Any]:
    """The statements whose text is kept as Postgres reads it."""
    return list(tx._statements._converted)


def queries_of(owner: Any) -> dict[str, bytes]:
    """Of a heartbeat, or of schedules."""
    found: dict[str, bytes] = owner._queries
    return found


def replace_queries(owner: Any, queries: dict[str, bytes]) -> None:
    owner._queries = queries


def spare(sharing: Sharing) -> int:
    """How many connections are kept for no party."""
    return sharing._spare


def held_by_party(sharing: Sharing) -> dict[str, int]:
    return dict(sharing._held)


def worker_of(leases: PostgresLeases) -> int:
    """The process that holds the leases, as it is on record."""
    return leases._lease.worker


async def queue_connection(broker: PostgresBroker, dsn: str) -> Any:
    return await broker._connect(dsn)


def listening_connection(session: PostgresSession) -> Any:
    """None while it has lost one, and has no other yet."""
    assert session._waking is not None, "it cannot listen"
    assert session._waking._listening is not None, "it has not asked to be told"
    return session._waking._listening._connection


def is_told(session: PostgresSession) -> bool:
    """Whether it listens."""
    return session._waking is not None and session._waking.told


def saw_earlier(session: PostgresSession, seconds: float) -> None:
    """As if it had seen a message that had waited so much longer ago."""
    assert session._waking is not None, "it cannot listen"
    session._waking._busy_until -= seconds
    session._waking._all_looked -= seconds


async def told_how_many(session: PostgresSession) -> None:
    """It learns how many sessions with its queues there are, as it does every ten seconds."""
    assert session._waking is not None, "it cannot listen"
    await session._waking._turn()


def look_again_at(session: PostgresSession, when: float) -> None:
    """By the clock of the loop."""
    session._next_look = when


def doing_of(session: PostgresSession) -> Callable[[str, dict[str, Any]], Awaitable[list[tuple[Any, ...]]]]:
    """How a session runs one of its statements."""
    return session._do


def replace_doing(
    monkeypatch: pytest.MonkeyPatch,
    session: PostgresSession,
    do: Callable[[str, dict[str, Any]], Awaitable[list[tuple[Any, ...]]]],
) -> None:
    monkeypatch.setattr(session, "_do", do)


# ----------------------------------------------------------------------------------------------------------- heartbeats
def heart_connection(heartbeat: Heartbeat) -> Any:
    return heartbeat._connect()


def beats(heartbeat: Heartbeat) -> bool:
    return heartbeat._thread.is_alive()


def register(heartbeat: Heartbeat) -> None:
    """Take a lease, in this thread."""
    heartbeat._register()


def commits_go_on(pool: Pool, seconds: float) -> None:
    """As if so much more time had gone by since the server was last heard of by those that wait for a standby."""
    for connection in pool.slow_commits._slow:
        connection._since -= seconds


def heartbeat_of(app: App) -> Heartbeat:
    """Of an app whose process runs sagas without a worker."""
    inline = app._opened.here().inline
    assert inline is not None
    assert inline._saga_lease is not None
    return inline._saga_lease._heartbeat


def renewed_at(heartbeat: Heartbeat) -> float:
    """When the last renewal that succeeded began."""
    return heartbeat._good


def renewed_earlier(heartbeat: Heartbeat, seconds: float) -> None:
    """As if the last renewal had been so much longer ago."""
    heartbeat._good -= seconds


def renewal_of(heartbeat: Heartbeat) -> Callable[[Any], None]:
    return heartbeat._renew


def replace_renewal(heartbeat: Heartbeat, renew: Callable[[Any], Any]) -> None:
    heartbeat._renew = renew  # type: ignore[method-assign,assignment]


async def renew_now(heartbeat: Heartbeat, within: float) -> None:
    heartbeat._renewed.clear()
    heartbeat._wanted.set()
    async with asyncio.timeout(within):
        await heartbeat._renewed.wait()


# --------------------------------------------------------------------------------------------------------------- Redis
def keeper_of(store: RedisRequests) -> Keeper:
    return store._keeper


def kept(store: RedisRequests) -> dict[bytes, Any]:
    """What this process holds, by its keys."""
    return store._keeper._mine


async def ask_redis(store: RedisRequests, *command: object) -> Any:
    """On the store's own connection."""
    return await store._redises.client.execute_command(*command)


# --------------------------------------------------------------------------------------------------------------- Kafka
def client_of(session: KafkaSession) -> Any:
    """aiokafka's consumer."""
    return session._consumer


def coordinator_of(session: KafkaSession) -> Any:
    """aiokafka's, which says what place in the group it has."""
    return client_of(session)._coordinator


def rejoin(session: KafkaSession) -> None:
    """The group is put together again; the partitions may come back to the same member."""
    coordinator_of(session).request_rejoin()


def rebalancing(session: KafkaSession) -> bool:
    return session._rebalancing


def subscription_of(session: KafkaSession) -> Any:
    """aiokafka's, with what it was assigned."""
    return client_of(session)._subscription


def partitions_of(session: KafkaSession) -> dict[Any, Any]:
    """What it reads now."""
    return session._reading.partitions


async def commit_now(session: KafkaSession) -> None:
    """And not when it is time to."""
    await session._commit()


def fail_next_commit(session: KafkaSession, error: Exception) -> None:
    real = session._commit

    async def fail(*, leaving: bool = False) -> None:
        session._commit = real  # type: ignore[method-assign]
        raise error

    session._commit = fail  # type: ignore[method-assign]


async def poll_ahead(session: KafkaSession) -> None:
    """It has fetched, and has not handed over yet."""
    session._poll = asyncio.create_task(session._next())
    await asyncio.wait({session._poll})


# -------------------------------------------------------------------------------------------------- RabbitMQ and Amazon
def not_fetched(session: RabbitmqSession | SqsSession) -> int:
    """How many deliveries have arrived that nobody has fetched."""
    return len(session._arrived)


def held_in(session: SqsSession) -> Any:
    """What has been received, and is neither deleted nor given back."""
    return session._held


def polls_of(session: SqsSession) -> int:
    return len(session._polls)


def keep_nothing_invisible(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is held is not extended in the background."""
    monkeypatch.setattr(
        "idemconsumer.brokers.sqs.sqs_session.SqsSession._keep_invisible", lambda self: asyncio.sleep(3600)
    )
