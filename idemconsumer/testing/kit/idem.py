"""The fixture `idem`, and the Kit with which a test sends messages to its apps and inspects the results."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, LiteralString, Self

import psycopg

from idemconsumer.admin.dead_letters import Admin, DeadLetterDetail
from idemconsumer.app.app import App
from idemconsumer.brokers.adapters import destination as split_destination
from idemconsumer.brokers.sendable import check_sendable
from idemconsumer.errors import ConfigurationError
from idemconsumer.handlers.arguments import Duration
from idemconsumer.handlers.decorator import Handler
from idemconsumer.handlers.durations import parse_duration
from idemconsumer.message import codecs
from idemconsumer.message.headers import encode_headers
from idemconsumer.message.message import NO_PROPERTIES, Message
from idemconsumer.message.sources import consumes, split_source
from idemconsumer.ports.broker import Outgoing
from idemconsumer.rules.values import Outcome
from idemconsumer.testing.kit import clock
from idemconsumer.testing.kit.costs import counting
from idemconsumer.testing.kit.databases import SCHEMA, Databases, Setup
from idemconsumer.testing.kit.http_client import client_of
from idemconsumer.testing.kit.hub import LARGEST, Hub, Published
from idemconsumer.testing.kit.kit_sagas import SagaSeen, sagas_of
from idemconsumer.testing.kit.kit_workers import KitWorkers, Seen
from idemconsumer.testing.kit.left import Left, state
from idemconsumer.worker.retention import prune_once

if TYPE_CHECKING:
    import httpx

    from idemconsumer.testing.matrix import MarkedTest

_PAUSE: Final = 0.003  # seconds between two checks
_SEEN_LATE: Final = 0.02  # seconds; then time moves on to the next poll of the code that should notice what is due
_STEP: Final = 0.3  # seconds; shorter than any statement timeout
_BEHIND: Final = 0.001  # seconds
_APART: Final = 300  # moments that `advance` keeps apart; later ones may be merged


class NotQuiet(AssertionError):
    """A kit that is being drained still has work in progress."""


@dataclass(frozen=True, slots=True)
class Handled:
    """The `outcome` of one run of a `message` by the `handler` with that name."""

    handler: str
    message: Message
    outcome: Outcome


class Kit:
    """Apps at work in this test. The fixture `idem` creates and closes it.

    The apps' own workers handle every message, in this event loop, with their claims in the test's own Postgres.
    Brokers are in memory, whatever their scheme; `postgres:` is a queue in that Postgres.
    """

    def __init__(
        self,
        databases: Databases,
        setup: Setup,
        apps: Sequence[App],
        resources: Mapping[type, object],
        marked: MarkedTest | None,
    ) -> None:
        self._databases, self._setup, self._marked = databases, setup, marked
        self._hub = Hub()
        self._handled: list[Handled] = []
        self._sent: list[Message] = []
        self._seen = Seen(lambda *run: self._handled.append(Handled(*run)))
        self._crew = KitWorkers(apps, resources, self._hub, self._seen)
        self._connection: clock.Connection | None = None
        self._dsn = ""

    async def begin(self) -> Self:
        """Start the kit. Called by the fixture."""
        clock.take()
        self._dsn = await asyncio.to_thread(self._databases.one, self._setup)
        await self._connect()
        return self

    async def _connect(self) -> None:
        self._connection = await psycopg.AsyncConnection.connect(self._dsn, autocommit=True)
        await self._crew.begin(self._dsn, self._databases.locks)

    async def _disconnect(self) -> None:
        try:
            await self._crew.end()
        finally:
            if self._connection is not None:
                await self._connection.close()
                self._connection = None

    async def close(self) -> None:
        """Stop the workers and drop the database. Called by the fixture."""
        try:
            await self._disconnect()
        finally:
            self._hub.clear()
            if self._dsn:
                self._databases.drop(self._dsn)

    async def reset(self) -> None:
        """Make the kit as if new: another database, empty queues, no outcomes. Fakes keep their counts."""
        await self.close()
        self._handled.clear()
        self._sent.clear()
        await self.begin()

    @property
    def dsn(self) -> str:
        """The address of the kit's database. A `reset` changes it."""
        return self._dsn

    async def rows(self, query: LiteralString, params: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        """Run one statement with psycopg's placeholders, commit it at once, and return its rows, if it has any."""
        cursor = await self._open.execute(query, params or None)
        return await cursor.fetchall() if cursor.description else []

    # ------------------------------------------------------------------------------------------------------------- send
    async def send(
        self,
        source: str,
        payload: object,
        *,
        key: str | bytes | None = None,
        headers: Mapping[str, str | bytes] | None = None,
        properties: Mapping[str, str | int] = NO_PROPERTIES,
    ) -> None:
        """Send a message as a producer does: bytes as they are, anything else as JSON.

        `key` is the record key for Kafka, otherwise the message id. `properties` are RabbitMQ's, such as `reply_to`.
        The message is handled concurrently with the test; `drain` waits for that. Raises ConfigurationError for a
        source that no app of this kit consumes, and for a message that no broker of this scheme accepts.
        """
        scheme, name = split_source(source)
        self._check(source)
        encoded = codecs.encode(payload, "payload", "give")
        body = b"null" if encoded is None else encoded.body
        text = key.decode("utf-8", "surrogateescape") if isinstance(key, bytes) and scheme != "kafka" else key
        record_key = (text.encode() if isinstance(text, str) else text) if scheme == "kafka" else None
        given = Outgoing(body, headers or {}, text if isinstance(text, str) else None, record_key=record_key)
        check_sendable(scheme, name, given, LARGEST)
        message = self._hub.made(scheme, name, given, properties)
        if self._marked is not None and self._marked.due:
            await self._disconnect()
            await self._crew.disturb(self._marked, message, self._dsn)
            await self._connect()
        self._sent.append(message)
        await self._arrive(message)

    async def redeliver(self, times: int = 1) -> None:
        """Deliver each sent message `times` more, like a broker that has received no acknowledgement. The message is
        the same, marked as delivered before."""
        for before in range(1, times + 1):
            for message in self._sent:
                await self._arrive(message, before)

    async def _arrive(self, message: Message, before: int = 0) -> None:
        if not message.source.startswith("postgres:"):
            self._hub.arrive(message, before=before)
            return
        name = message.source.removeprefix("postgres:")
        await self._open.execute(
            "insert into idemconsumer.queue (name, message_id, body, headers, deliveries) values (%s, %s, %b, %b, %s)",
            (name, message.message_id, message.body, encode_headers(message.headers), before),
        )
        await self._open.execute("select pg_notify('idemconsumer_queue', %s)", (name,))

    def _check(self, source: str) -> None:
        consumed = [each for app in self._crew.apps for its in app.handlers.values() for each in its.plan.sources]
        if not any(consumes(each, source) for each in consumed):
            raise ConfigurationError(
                f"send to {source!r}: no app of this kit consumes it; they consume {', '.join(sorted(set(consumed)))}"
            )

    # ------------------------------------------------------------------------------------------------------------- wait
    async def drain(self, *, within: float = 30.0) -> Left:
        """Wait until no app has work to do now: messages, sagas, outbox, replies, dead letters, schedules.

        Returns the work that waits for its time or for a person: retries, sleeps, delays, schedules. `advance` moves
        the time. Real time passes too, so work that is due within some seconds may or may not be done. Raises NotQuiet
        after `within` seconds, naming the work in progress.
        """
        began, calm_since = time.monotonic(), time.monotonic()
        events, calm = -1, 0
        while True:
            self._crew.check()
            found = await state(self._open, self._crew.workers, self._crew.schedules, self._hub)
            now = time.monotonic()
            if found.busy or events != self._seen.events:
                events, calm_since, calm = self._seen.events, now, 0
            if found.quiet:
                calm += 1
                if calm == 2:  # one check may miss work that moves on meanwhile; the next check sees it
                    return found.left
            elif not found.busy and now - calm_since > _SEEN_LATE:
                await clock.move(self._open, _STEP)
                calm_since = time.monotonic()
            if now - began > within:
                raise NotQuiet(f"not quiet after {within:g} s: {found}")
            await asyncio.sleep(_PAUSE)

    async def advance(self, duration: Duration, *, within: float = 60.0) -> Left:
        """Let time pass, such as "3d", and do all work that becomes due meanwhile, one moment after the other: retries,
        sleeps, delays, schedules, timeouts, and finally retention. Returns the work that is left, as `drain` does.

        This moves two clocks. The database's: `now()` in SQL gives the new time, but `current_timestamp` does not. The
        event loop's: `asyncio.sleep` ends, but Python's `datetime.now()` does not change. The first few hundred moments
        are kept apart; some of those that follow may be merged into one. Raises NotQuiet as `drain` does, after
        `within` seconds in all.
        """
        seconds = passing = parse_duration(duration)
        began, moments = time.monotonic(), 0
        left = await self.drain()
        while passing > 0:
            step = passing if left.due is None else min(passing, max(left.due, 0.0) + _BEHIND)
            if moments >= _APART:
                step = min(passing, max(step, seconds / _APART))
            await clock.move(self._open, step)
            passing, moments = passing - step, moments + 1
            if (rest := within - (time.monotonic() - began)) <= 0:
                raise NotQuiet(f"{duration} have not passed after {within:g} s and {moments} moments: {left}")
            left = await self.drain(within=rest)
        await prune_once(self._dsn, SCHEMA)
        return left

    # ---------------------------------------------------------------------------------------------------------- inspect
    @property
    def outcomes(self) -> list[Outcome]:
        """The outcome of each run of a delivery, in order, with retries and duplicates. The outcome of a saga that
        waits is `busy`."""
        return [each.outcome for each in self._handled]

    @property
    def handled(self) -> list[Handled]:
        """Like `outcomes`, with the handler and the message."""
        return list(self._handled)

    async def published(self, target: str) -> list[Published]:
        """Return the messages that the apps have published there, in order, even those that have been handled since.
        They include replies and forwarded dead letters, but not the messages that the test has sent."""
        scheme, name = split_destination(target)
        if scheme != "postgres":
            return [each for each in self._hub.published if each.target == target]
        rows = await self.rows("select body, headers, key from idem_kit.published where name = %s order by id", (name,))
        return [Published(target, bytes(body), headers or {}, key) for body, headers, key in rows]

    async def saga(self, key: str, *, handler: Handler[..., Any] | None = None, tenant: str | None = None) -> SagaSeen:
        """Return the saga with this key, whichever handler runs it. Raises LookupError if no handler has one, or more
        than one."""
        found = await sagas_of(self._open, self._dsn, self._crew.apps, key, handler, tenant)
        if len(found) != 1:
            raise LookupError(
                f"{' and '.join(found)} have a saga of the key {key!r}; pass handler="
                if found
                else f"no saga has the key {key!r}; of what was handled: {self._keys() or 'nothing'}"
            )
        (seen,) = found.values()
        return seen

    def _keys(self) -> str:
        return ", ".join(dict.fromkeys(f"{each.handler} {each.outcome.kind}" for each in self._handled))

    async def dead_letters(self) -> list[DeadLetterDetail]:
        """Return the dead letters that were neither redriven nor discarded, oldest first."""
        return [letter async for letter in Admin(self._dsn, SCHEMA).export()][::-1]

    def http(self, asgi_app: Any, *, base_url: str = "http://test") -> AbstractAsyncContextManager[httpx.AsyncClient]:
        """Open `async with kit.http(api) as client`: an httpx client that calls an ASGI app in this process, and runs
        its lifespan. Apps behind it use the kit's database; `drain` does the work that they accept or publish."""
        return client_of(asgi_app, base_url)

    def assert_commits(self, expected: int) -> AbstractAsyncContextManager[None]:
        """Put `async with kit.assert_commits(1):` around code that sends messages. It drains, and raises AssertionError
        unless the workers made exactly this number of commits for these messages: effects, records, steps, attempts and
        dead letters. Commits of the relay and of code outside of handlers do not count."""
        return self._assert("commits", expected)

    def assert_statements(self, expected: int) -> AbstractAsyncContextManager[None]:
        """Like `assert_commits`, for the number of statements that the workers sent for these messages: those of
        handlers and steps, and those around them, BEGIN and COMMIT included. Taking messages from a queue does not
        count."""
        return self._assert("statements", expected)

    def assert_round_trips(self, expected: int) -> AbstractAsyncContextManager[None]:
        """Like `assert_statements`, for how often the workers waited for a result from the database. Statements whose
        rows a handler never reads are pipelined after a few runs, so send some messages before."""
        return self._assert("round_trips", expected)

    @asynccontextmanager
    async def _assert(self, what: str, expected: int) -> AsyncIterator[None]:
        if not isinstance(expected, int):
            raise ConfigurationError(f"assert_{what}({expected!r}): write how many, as in assert_{what}(2)")
        await self.drain()
        with counting() as cost:
            yield
            await self.drain()
        made = getattr(cost, what)
        handled = self._keys() or "nothing"
        assert made == expected, f"{made} {what.replace('_', ' ')}, not {expected}; handled: {handled}"

    @property
    def _open(self) -> clock.Connection:
        if self._connection is None:
            raise ConfigurationError("this kit was closed")
        return self._connection


class Idem:
    """Makes the kits of one test, and closes them afterwards."""

    def __init__(self, databases: Databases, setup: Setup, marked: MarkedTest | None) -> None:
        self._databases, self._setup, self._marked = databases, setup, marked
        self._kits: list[Kit] = []
        self._loop = asyncio.get_running_loop()

    async def __call__(self, *apps: App, resources: Mapping[type, object] | None = None) -> Kit:
        """Start these apps. `resources` replace, by type, those that `@app.resource` would make.

        Raises ConfigurationError for an app that no worker could run, and EmbeddedUnavailable if there is no Postgres.
        """
        if asyncio.get_running_loop() is not self._loop:
            raise ConfigurationError(
                "the test runs in another event loop than its fixture `idem`; set asyncio_default_fixture_loop_scope "
                "to the loop_scope of the test"
            )
        if not apps:
            raise ConfigurationError("idem() was given no app; write kit = await idem(app)")
        for app in apps:
            if not isinstance(app, App):
                given = app.__name__ if isinstance(app, type) else type(app).__name__
                raise ConfigurationError(f"idem() was given {given}, which is not an app; give an App, as in idem(app)")
        kit = Kit(self._databases, self._setup, apps, resources or {}, self._marked)
        self._kits.append(kit)
        return await kit.begin()

    async def close(self) -> None:
        """Close the kits, the last one first."""
        while self._kits:
            await self._kits.pop().close()
        if self._marked is not None:
            self._marked.check()
