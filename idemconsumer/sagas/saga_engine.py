"""Sagas: leased mode, from the claim to the end of an attempt.

The claim commits first, with the message, so that any worker can continue the saga. This module owns the sagas that the
process holds: it claims them, takes them over, resolves an unknown COMMIT with a new token, and releases them at a
drain or when the lease is lost. `attempt` decides what happens to a saga that is held.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, TypeAlias

from msgspec.structs import replace

from idemconsumer.engine.company import Stay
from idemconsumer.engine.engine import Engine
from idemconsumer.engine.failing import Subject
from idemconsumer.engine.work import Work, traced
from idemconsumer.errors import CommitUnknown, Fenced, Interrupted, RunEagerly, SagaCancelled, StoreUnavailable
from idemconsumer.logs import log
from idemconsumer.ports.observer import NullObserver, Observer, Point, SagaPoint
from idemconsumer.rules.habits import Habits
from idemconsumer.rules.values import Mark, Outcome, OutcomeKind, Record, State
from idemconsumer.rules.verdicts import Verdict, judge
from idemconsumer.sagas.attempt import Attempt
from idemconsumer.sagas.probes import Probes
from idemconsumer.sagas.saga_endings import SagaEndings
from idemconsumer.sagas.steps import StepFunctions
from idemconsumer.stores.decided import decided
from idemconsumer.stores.leased_saga import LeasedSaga
from idemconsumer.stores.leases import PostgresLeases
from idemconsumer.user_code.cancellation import CancellationWatch

_STORED = (OutcomeKind.BUSY, OutcomeKind.RETRYING, OutcomeKind.FENCED, OutcomeKind.CANCELLED)
_GAVE_WAY = Outcome(OutcomeKind.RETRYING)

# Why this process has cancelled a run. Other: a message that must run alone (L23), or a request to cancel the saga.
_By: TypeAlias = Literal["lost lease", "drain", "other"]


@dataclass(slots=True, eq=False)
class _Call:
    """One call of `LeasedEngine.run`, with its arguments and the task that runs it. `attempt`: the last one that ran
    the handler. `over`: no attempt will run any more, and the release must not be cancelled."""

    work: Work
    claimed: Callable[[], Awaitable[None]]
    defer: bool
    unfed: bool
    task: asyncio.Task[object]
    attempt: Attempt | None = None
    over: bool = False
    cancelled_by: set[_By] = field(default_factory=set)

    def cancel(self, by: _By) -> None:
        self.cancelled_by.add(by)
        self.task.cancel()


class LeasedEngine:
    """Owns every saga that this process holds. Raises StoreUnavailable if nothing could be decided."""

    def __init__(
        self,
        engine: Engine,
        leases: PostgresLeases,
        observer: Observer | None = None,
        *,
        lease: float = math.inf,
        chance: Callable[[], float] = random.random,
    ) -> None:
        """`lease`: the worker's, in seconds."""
        self._engine = engine
        self._company = engine.company
        self._leases = leases
        self._tell = (observer or NullObserver()).at
        self._moved = time.monotonic()
        self._lease = lease
        self._chance = chance
        self._probes = Probes(engine.endings.failing)
        self._habits: dict[str, Habits] = {}
        self._active: dict[asyncio.Task[object], _Call] = {}

    def standing(self) -> float:
        """For how many seconds no running saga has begun or ended anything. Called by the lease's thread (L38)."""
        running = any(call.attempt is not None and "lost lease" not in call.cancelled_by for call in self._going)
        return time.monotonic() - self._moved if running else 0.0

    @property
    def _going(self) -> list[_Call]:
        return [call for call in list(self._active.values()) if not call.over]

    @property
    def runs_any(self) -> bool:
        """Whether any saga runs, including one that was cancelled and is being released."""
        return bool(self._active)

    def patience(self) -> float:
        """For how many seconds a step of the running sagas may do nothing, by its own timeout (L45); 0 if nothing runs.
        Called by the lease's thread."""
        attempts = [call.attempt for call in self._going]
        runs = [attempt.run for attempt in attempts if attempt is not None]
        return max((run.longest for run in runs if run is not None), default=0.0)

    def _at(self, handler: str, key: bytes, point: Point | SagaPoint) -> None:
        self._moved = time.monotonic()
        self._tell(point, handler, (key,))

    def lose(self) -> None:
        """The lease is lost: every saga is interrupted as fenced, before another worker may take it."""
        for call in self._going:
            if call.attempt is not None and call.attempt.run is not None:
                call.attempt.run.interrupt(Fenced("the lease of this worker was lost"))
            call.cancel("lost lease")

    def drain(self) -> None:
        """Release every saga at once, so that other workers go on with them (L21)."""
        for call in self._going:
            call.cancel("drain")

    def _give_way(self, task: asyncio.Task[object]) -> None:
        """Release the saga of this run at once: another message must run alone in this process (L23)."""
        if (call := self._active.get(task)) is not None and not call.over and "other" not in call.cancelled_by:
            call.cancel("other")

    def cancel(self, keys: Collection[bytes]) -> None:
        """Cancellations of these sagas were requested (L50). Runs that do not know that are released; the next one
        does."""
        for call in self._going:
            if call.attempt is not None and call.attempt.unaware_of_cancel(keys):
                self._give_way(call.task)

    async def run(
        self, work: Work, claimed: Callable[[], Awaitable[None]], *, defer: bool = False, unfed: bool = False
    ) -> Outcome:
        """Claim the saga, or continue one that was taken over, and run this attempt to its end.

        `claimed` is awaited as soon as our claim is committed (L1): then the message may be settled. If
        StoreUnavailable is raised afterwards, `work` remembers the saga that it holds, and may be presented again. With
        `defer`, a saga that has begun is not taken over here. `unfed`: no source of this process continues sagas that
        an earlier call left behind, so this call does, and it also goes on after it was released for another message.
        """
        if work.call is not None:
            self._engine.endings.failing.succeeded(Subject.handler(work.handler), [work.identity])  # it is read (D25)
        task = asyncio.current_task()
        assert task is not None
        with traced(self._engine.tracing, [work]) as processing:
            while (outcome := await self._run(_Call(work, claimed, defer, unfed, task))) is _GAVE_WAY:
                if not unfed:
                    outcome = Outcome(OutcomeKind.RETRYING, state=None if work.leased is None else work.leased.state)
                    break
                work.of_saga.leased, work.of_saga.in_doubt = None, False
            if not work.of_saga.resumed:  # otherwise it came from the store, and is not a delivery
                if outcome.kind in _STORED and work.handler.options.settle == "finished":
                    work.of_saga.leased = None
                    outcome = replace(outcome, state=None)  # L20: the delivery stays unsettled until the saga ends
                self._engine.deliveries.add([work], [outcome])
            processing.decided([outcome])
            return outcome

    async def _run(self, call: _Call) -> Outcome:
        work, by, cancellation = call.work, call.cancelled_by, CancellationWatch()
        self._active[call.task] = call
        async with AsyncExitStack() as company:
            try:
                outcome = await self._in_company(call, company)
            except SagaCancelled:
                call.over = True
                await self._release(work)
                outcome = _GAVE_WAY
            except Fenced:
                outcome = self._fenced(work)
            except (StoreUnavailable, Interrupted) as error:
                work.of_saga.in_doubt = work.leased is not None  # L11: the next call takes a new token first
                if isinstance(error, StoreUnavailable):
                    raise
                raise StoreUnavailable(f"not decided: {error}") from error
            except asyncio.CancelledError:
                if "lost lease" in by:
                    outcome = self._fenced(work)
                else:
                    call.over = True
                    await self._release(work)
                    if "drain" in by:
                        state = None if work.leased is None else work.leased.state
                        outcome = Outcome(OutcomeKind.CANCELLED, state=state)
                    elif "other" in by:
                        outcome = _GAVE_WAY
                    else:
                        raise
            finally:
                self._active.pop(call.task, None)
                for _ in by:
                    call.task.uncancel()
        if outcome is _GAVE_WAY and cancellation.requested:  # cancelled from outside as well
            raise asyncio.CancelledError
        return outcome

    def _fenced(self, work: Work) -> Outcome:
        log.warning("fenced", **work.named)
        # If it was cancelled before the answer to its claim, it may not be stored: the broker must keep the message.
        return Outcome(OutcomeKind.FENCED, state=None if work.leased is None else State.PROCESSING)

    async def _release(self, work: Work) -> None:
        """Release the saga at once, without counting the attempt. If that fails, the lease expires."""
        if work.leased is not None:
            # In a task of its own: the store gives no connection to a task that is being cancelled.
            await asyncio.gather(self._leases.release(work.leased, 0.0, None, count=False), return_exceptions=True)

    async def _in_company(self, call: _Call, company: AsyncExitStack) -> Outcome:
        """Run the saga beside others. A suspect runs with no other beside it until it makes progress (L22, L23)."""
        work, saga, give_way = call.work, call.work.of_saga, partial(self._give_way, call.task)
        if saga.leased is None or not _runs_alone(work, saga.leased):
            stay = await company.enter_async_context(self._company.shared(give_way))
            if saga.leased is None:
                if work.abandoned():
                    return Outcome(OutcomeKind.CANCELLED)
                begun = await self._begin(call)
                if isinstance(begun, Outcome):
                    return begun
                saga.leased = begun
            if not _runs_alone(work, saga.leased):
                return await self._go(call, saga.leased, stay)
            await company.aclose()
        stay = await company.enter_async_context(self._company.alone_at_first(give_way))
        return await self._go(call, saga.leased, stay, alone=True)

    async def _go(self, call: _Call, leased: LeasedSaga, stay: Stay, *, alone: bool = False) -> Outcome:
        work, saga = call.work, call.work.of_saga
        if saga.in_doubt:
            again = await self._retake(work, leased)
            if isinstance(again, Outcome):
                return again
            leased = saga.leased = again
            saga.in_doubt = False
        if alone:
            await self._leases.count(leased)
            self._at(work.handler.name, work.key, Point.SUSPECT_COUNTED)
            await work.read()
        while True:
            if work.handler.options.settle == "claimed":
                await call.claimed()
            end = await self._attempt(call, leased, stay)
            if isinstance(end, Outcome):
                return end
            leased = saga.leased = end

    async def _begin(self, call: _Call) -> LeasedSaga | Outcome:
        work, message = call.work, call.work.call
        assert message is not None
        handler = work.handler
        found = await decided(
            lambda: self._leases.begin(message.claim, work.message, handler.name, handler.options.version),
            lambda _: self._leases.retake(work.key, None),
        )
        if isinstance(found, LeasedSaga):
            work.of_saga.noted = True
            self._at(work.handler.name, work.key, Point.CLAIMED)
            return found
        work.claimed(found)
        claim = message.claim
        if isinstance(found, Record) and claim.judge(found) is Verdict.BUSY:
            if not work.of_saga.noted:
                work.of_saga.noted = True
                await self._leases.note(work.key, "redelivered", f"{work.message.source} {work.message.position}")
            if call.defer:
                return Outcome(OutcomeKind.BUSY, state=found.state)
            # A redelivery may be the first to notice that the owner was lost.
            unheld = await self._unheld(work) if call.unfed else ()
            if taken := await self._leases.take(handler.app, [handler.name], 1, unheld=unheld, key=work.key):
                return taken[0]
            return Outcome(OutcomeKind.BUSY, state=found.state)
        return Outcome(OutcomeKind.BUSY) if found is Mark.BUSY else await self._engine.endings.replay(work, found)

    async def _unheld(self, work: Work) -> Sequence[tuple[bytes, int]]:
        """This saga, if it is ours and no other call holds or may claim it: a call is registered before it claims."""
        own = await self._leases.own(work.key)
        others = [call.work for call in self._active.values() if call.work is not work]
        return () if any(other.key == work.key for other in others) else own

    async def _attempt(self, call: _Call, saga: LeasedSaga, stay: Stay) -> Outcome | LeasedSaga:
        """One run of the handler. If the answer to a COMMIT was lost, returns the saga with a new token, to be run
        again. If a pipelined statement has failed, which decides nothing (J27), returns the saga unchanged, to be run
        again without pipelining."""
        work, engine, options = call.work, self._engine, call.work.handler.options

        def progressed() -> None:
            if (leased := work.leased) is not None and leased.suspect:
                work.of_saga.leased = replace(leased, suspect=False)
                self._company.share(stay)

        at, habits = partial(self._at, work.handler.name, saga.key), self._habits_of(work, saga)
        call.attempt = Attempt(
            work,
            SagaEndings(work, self._leases, at, self._chance, engine.endings.telling, self._probes),
            StepFunctions(work.handler.resources, options.timeout, self._lease, habits, engine.tracing),
            engine.endings.contended,
            engine.lost_connections,
            progressed,
        )

        async def doubted(unknown: CommitUnknown) -> Outcome | LeasedSaga:
            log.warning("commit unknown, taking the saga over again", **work.named, error=str(unknown))
            work.eager = True  # one of its pipelined statements may have broken the connection
            return await self._retake(work, work.leased or saga)

        self._moved = time.monotonic()
        try:
            return await decided(call.attempt.go, doubted)
        except RunEagerly:
            work.eager = True
            return work.leased or saga

    def _habits_of(self, work: Work, saga: LeasedSaga) -> Habits | None:
        if work.eager or saga.suspect:
            return None
        return self._habits.setdefault(work.handler.name, Habits(work.handler.options.timeout))

    async def _retake(self, work: Work, saga: LeasedSaga) -> Outcome | LeasedSaga:
        """A new token for our saga, once all writes under the old one have ended; its outcome if it has ended."""
        retaken = await self._leases.retake(saga.key, saga.token)
        if retaken is not None:
            # Keep both flags: what a lost worker leads to may have been dealt with already.
            return replace(retaken, stale=saga.stale, suspect=saga.suspect)
        (record,) = await self._engine.peek([saga.key])
        if record is not None and judge(record, None) is not Verdict.BUSY:
            if work.call is None:  # unreadable, so it can only have been parked, by us or by a worker in between
                return Outcome(OutcomeKind.DEAD, state=record.state)
            return await self._engine.endings.replay(work, record)
        raise Fenced("the saga has another owner")


def _runs_alone(work: Work, saga: LeasedSaga) -> bool:
    """Whether a suspect must run alone. Not if its attempts are used up: then nothing of it runs."""
    return saga.suspect and saga.attempt <= work.handler.options.max_attempts
