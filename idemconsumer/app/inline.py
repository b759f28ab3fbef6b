"""An app without a worker: runs single messages and waits for results."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, Final

from idemconsumer.app.results import Results
from idemconsumer.engine.engine import Engine
from idemconsumer.engine.work import Suspicion, Work
from idemconsumer.errors import ConfigurationError, HandlerFault, NestedRun, StoreUnavailable
from idemconsumer.handlers.decorator import Handler
from idemconsumer.handlers.handler import BoundHandler, HandlerPlan
from idemconsumer.logs import log
from idemconsumer.message.message import Message
from idemconsumer.opening import Opening
from idemconsumer.ports.observer import NullObserver
from idemconsumer.ports.tracing import Tracing
from idemconsumer.redaction import SHOWN
from idemconsumer.rules.claim import Claim
from idemconsumer.rules.values import Outcome, OutcomeKind, Record, Signalled, State
from idemconsumer.rules.verdicts import Settlement, final, settle
from idemconsumer.settings import Settings
from idemconsumer.stores.acceptance import Acceptance, AcceptedStanding, accept, look_up, scope_id
from idemconsumer.stores.checks import check_database
from idemconsumer.stores.grants import Kind
from idemconsumer.stores.joined import PostgresStore
from idemconsumer.stores.leased_saga import Runs
from idemconsumer.stores.signals import Signal
from idemconsumer.user_code.resources import Resources

if TYPE_CHECKING:
    from idemconsumer.worker.saga_lease import SagaLease

_NESTED: Final = (
    "{}: app.{} was called in a transaction that app.process has opened, so it would wait for a second connection "
    "while holding the first; {}, or call app.{} once app.process has returned"
)
_PASS_ON: Final = (
    "give the message to app.publish(…, tx=tx) or app.start(…, tx=tx), which commit it with this transaction"
)
_BEFORE: Final = "read it before app.process, and pass it to the handler"
_WITH_TX: Final = "give it tx=tx, so that it is part of this transaction"
_MAX_ATTEMPTS: Final = 10_000  # keys; beyond that, the counts of the oldest keys are forgotten


class InlineRunner:
    """Opened by the first call that needs it. A saga lease and the resources are opened only once a call needs them."""

    def __init__(
        self,
        settings: Settings,
        dsn: str,
        store: PostgresStore,
        leased: Sequence[HandlerPlan],
        resources: Resources,
        tracing: Tracing,
        kind: Kind,
    ) -> None:
        self.settings = settings
        self._kind = kind
        SHOWN.text = settings.log_error_text
        self._leased = leased
        self._dsn = dsn
        self._store = store
        self._engine = Engine(store, tracing=tracing)
        self._results = Results(store.peek)
        self.resources = resources
        self.bound: dict[Handler[..., Any], BoundHandler] = {}  # bound to `resources`
        self._opening = Opening(StoreUnavailable)
        self._resourceful = False
        self._saga_lease: SagaLease | None = None
        self._attempts: dict[bytes, int] = {}

    @classmethod
    async def open(
        cls,
        settings: Settings,
        plans: Sequence[HandlerPlan],
        resources: Resources,
        tracing: Tracing,
        kind: Kind,
        locks: int | None = None,
    ) -> InlineRunner:
        """With the rights of this kind. `locks`: see `Surroundings`. Raises ConfigurationError or StoreUnavailable."""
        if settings.dsn is None:
            raise ConfigurationError("no database is given; set IDEMCONSUMER_DSN")
        leased = [plan for plan in plans if plan.signature.needs_saga]
        store = await PostgresStore.open(
            settings.dsn,
            settings.schema,
            connections=settings.concurrency,
            longest_run=max((plan.options.timeout for plan in plans), default=30.0),
            beside=min((plan.options.lease for plan in leased), default=None),
            hasty=True,
            require_standby=settings.require_synchronous_standby,
            kind=kind,
            most_locks=locks,
        )
        looked_at: Kind = kind if locks is None else "worker"
        return cls(settings, settings.dsn, store, leased, resources, tracing, looked_at)

    async def allow(self, kind: Kind) -> None:
        """Check the database for a call of this kind, unless the call that opened this needed the same rights (H56: a
        process that serves the front door alone needs fewer). Raises ConfigurationError if the role lacks rights, and
        StoreUnavailable."""
        if kind == "worker" and self._kind != kind:
            await check_database(self._dsn, self.settings.schema)
            self._kind = kind

    async def close(self) -> None:
        await self._opening.close()
        async with AsyncExitStack() as stack:  # from the last to the first
            stack.push_async_callback(self.resources.close)
            stack.push_async_callback(self._store.close)
            stack.push_async_callback(self._engine.deliveries.close)
            stack.callback(self._engine.endings.telling.close)
            if self._saga_lease is not None:
                stack.push_async_callback(self._saga_lease.close)
            stack.push_async_callback(self._results.close)

    async def process(self, handler: BoundHandler, message: Message) -> Outcome:
        """Run a message to the end of one attempt. If another run holds the saga, wait as its handler says."""
        self._refuse_nested(f"handler {handler.name!r}", "process", _PASS_ON)
        if not self._resourceful:
            await self._open_resources()
        work = Work.of(handler, message, own_id=message.position or message.message_id or None)
        if work.call is None:
            await self._engine.read(work)
        if not handler.leased or work.call is None:
            return await self._joined(work)
        lease = self._saga_lease or await self._open_saga_lease(handler)
        outcome = await lease.engine.run(work, _settled_by_caller, unfed=True)
        wait = handler.options.wait if outcome.kind is OutcomeKind.BUSY else 0.0
        if wait and await self._results.over(work.key, wait) is not None:
            (replayed,) = await self._engine.replay_committed([work])
            return replayed or outcome
        return outcome

    def _refuse_nested(self, subject: str, call: str, instead: str) -> None:
        """Refuse a call from a handler whose transaction is open: it would need a second connection (J29). Raises
        NestedRun, or HandlerFault in a step."""
        if self._store.pool.held_here:
            raise NestedRun(_NESTED.format(subject, call, instead, call))
        if self._saga_lease is not None and self._saga_lease.pool.held_here:
            raise HandlerFault(_NESTED.format(subject, call, instead, call))

    async def _joined(self, work: Work) -> Outcome:
        """Run one attempt. Earlier failed attempts in this process count, as for a delivery that a worker holds."""
        work.attempts = self._attempts.get(work.key, 0)
        if self._engine.lost_connections.suspected(work.key):
            work.suspicion = Suspicion.BEGUN
        try:
            outcome = await self._engine.process(work)
        except NestedRun as nested:
            raise ConfigurationError(*nested.args) from nested
        self._attempts.pop(work.key, None)
        if work.attempts and settle(outcome) is not Settlement.FINISH:
            if len(self._attempts) >= _MAX_ATTEMPTS:
                self._attempts.pop(next(iter(self._attempts)))
            self._attempts[work.key] = work.attempts
        return outcome

    async def _open_resources(self) -> None:
        async with self._opening.turn():
            if not self._resourceful:
                await self.resources.open()
                self._resourceful = True

    async def result(self, digest: bytes, wait: float) -> Outcome:
        """The outcome in the key's record, once it is final or `wait` seconds have passed."""
        self._refuse_nested("a result", "result", _BEFORE)
        record = await self._results.over(digest, wait) if wait else None
        if record is None:
            (record,) = await self._store.peek([digest])
        return _outcome(record)

    async def accept(self, acceptance: Acceptance) -> Record | None:
        """See `stores.accepting`."""
        self._refuse_nested("a message", "accept", _WITH_TX)
        return await accept(self._store.pool, acceptance)

    async def scope_id(self, claim: Claim) -> int:
        """The id of the claim's scope, which is committed first."""
        return await scope_id(self._store.pool, claim)

    async def standing(self, digest: bytes, scope: str) -> AcceptedStanding | None:
        """The record of a key in this scope."""
        self._refuse_nested("a key", "accepted", _BEFORE)
        return await look_up(self._store.pool, digest, scope)

    async def signal(self, signal: Signal) -> Signalled:
        self._refuse_nested("a signal", "signal", _WITH_TX)
        ((answer,),) = await self._store.pool.alone("send_signal", signal.params)
        return Signalled(answer)

    async def _open_saga_lease(self, handler: BoundHandler) -> SagaLease:
        from idemconsumer.worker.saga_lease import SagaLease  # imports all of sagas: only apps that have some pay

        async with self._opening.turn():
            if self._saga_lease is None:
                leased = [*(plan.options for plan in self._leased), handler.options]  # `handler` may not be included
                self._saga_lease = await SagaLease.open(
                    self._dsn,
                    self.settings.schema,
                    self._engine,
                    NullObserver(),
                    connections=self.settings.concurrency,
                    lease=min(each.lease for each in leased),
                    longest_run=max(each.timeout for each in leased),
                    runs=[Runs(*plan.identity(handler.app), plan.options.version) for plan in self._leased],
                    build=self.settings.build or "",
                    takes=False,
                    require_standby=self.settings.require_synchronous_standby,
                    left_open=self._left_open,
                )
            return self._saga_lease

    def _left_open(self) -> None:
        if self._saga_lease is not None and self._saga_lease.engine.runs_any:
            log.warning(
                "event loop ended before the app was closed, running sagas wait for a worker",
                instead="write `async with app:` around the code that uses it, or `await app.close()` after it",
            )


async def _settled_by_caller() -> None:
    """Does nothing: the caller of `process` settles the message by its outcome."""


def _outcome(record: Record | None) -> Outcome:
    if record is None:
        return Outcome(OutcomeKind.ABSENT)
    if record.state is State.DEAD:
        return Outcome(OutcomeKind.DEAD, state=record.state)
    if record.state not in (State.COMPLETED, State.FAILED):
        return Outcome(OutcomeKind.BUSY, state=record.state)
    return final(OutcomeKind.DUPLICATE, record.state, record.result)
