"""Sagas: leased mode, from the claim to the end of an attempt.

The claim commits first, with the message, so that any worker can continue the saga. This file owns the sagas that the
process holds: it claims them, takes them over, answers an unknown COMMIT with a new token, and gives them up at a drain
or when the lease is lost. `attempt` decides what happens to a saga that is held.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import msgspec
import structlog

from idemconsumer.engine.engine import Engine
from idemconsumer.engine.work import Work
from idemconsumer.errors import CommitUnknown, Contention, Fenced, StoreUnavailable
from idemconsumer.ports.leases import LeasedSaga, LeaseStore
from idemconsumer.ports.observer import NullObserver, Observer, Point
from idemconsumer.rules.values import Mark, Outcome, OutcomeKind, Record, State
from idemconsumer.rules.verdicts import Verdict, judge
from idemconsumer.sagas.attempt import Attempt

log = structlog.get_logger("idemconsumer")

_STORED = (OutcomeKind.BUSY, OutcomeKind.RETRYING, OutcomeKind.FENCED, OutcomeKind.CANCELLED)


class LeasedEngine:
    """Owns every saga that this process holds. Raises StoreUnavailable when nothing could be decided."""

    def __init__(
        self,
        engine: Engine,
        leases: LeaseStore,
        observer: Observer | None = None,
        *,
        lease: float = math.inf,
        chance: Callable[[], float] = random.random,
    ) -> None:
        """`lease` is the worker's, in seconds."""
        self._engine = engine
        self._leases = leases
        self._at = (observer or NullObserver()).at
        self._lease = lease
        self._chance = chance
        self._active: dict[asyncio.Task[object], Attempt | None] = {}
        self._in_hand: set[Work] = set()
        self._lost: set[asyncio.Task[object]] = set()
        self._drained: set[asyncio.Task[object]] = set()

    def lose(self) -> None:
        """The lease is lost: every saga is interrupted as fenced, in time before another worker may take it."""
        for task, attempt in self._active.items():
            if attempt is not None and attempt.run is not None:
                attempt.run.interrupt(Fenced("the lease of this worker was lost"))
            self._lost.add(task)
            task.cancel()

    def drain(self) -> None:
        """Release every saga at once, so that other workers go on with them (L21)."""
        for task in self._active:
            self._drained.add(task)
            task.cancel()

    async def run(
        self, work: Work, claimed: Callable[[], Awaitable[None]], *, defer: bool = False, unfed: bool = False
    ) -> Outcome:
        """Claim the saga, or continue one that was taken over, and run this attempt to its end.

        `claimed` is awaited as soon as our claim is committed (L1): the message may be settled then. When
        StoreUnavailable is raised afterwards, `work` remembers the saga it holds, and may be presented again. With
        `defer` a saga that has begun is not taken over here. `unfed`: no source of this process continues sagas that an
        earlier call left behind, so this call does.
        """
        task = asyncio.current_task()
        assert task is not None
        self._active[task] = None
        self._in_hand.add(work)
        try:
            outcome = await self._go(work, claimed, defer=defer, unfed=unfed)
        except (StoreUnavailable, CommitUnknown, Contention) as error:
            work.of_saga.in_doubt = work.leased is not None  # L11
            if isinstance(error, StoreUnavailable):
                raise
            raise StoreUnavailable(f"not decided: {error}") from error
        except Fenced:
            outcome = self._fenced(work)
        except asyncio.CancelledError:
            if task in self._lost:
                outcome = self._fenced(work)
            else:
                self._active.pop(task, None)  # the release must not be cancelled
                await self._release(work)
                if task not in self._drained:
                    raise
                outcome = Outcome(OutcomeKind.CANCELLED, state=None if work.leased is None else work.leased.state)
        finally:
            self._active.pop(task, None)
            self._in_hand.discard(work)
            for cancelled in (self._lost, self._drained):
                if task in cancelled:
                    cancelled.discard(task)
                    task.uncancel()
        if outcome.kind in _STORED and work.handler.options.settle == "finished" and not work.of_saga.resumed:
            work.of_saga.leased = None
            return msgspec.structs.replace(outcome, state=None)  # L20: held until the saga ends
        return outcome

    def _fenced(self, work: Work) -> Outcome:
        log.warning("fenced", handler=work.handler.name, key=work.key.hex()[:12])
        # If it was cancelled before its claim was known, it may not be stored, and the broker must keep the message.
        return Outcome(OutcomeKind.FENCED, state=None if work.leased is None else State.PROCESSING)

    async def _release(self, work: Work) -> None:
        """Release the saga at once, without counting the attempt. If that fails, the lease expires."""
        if work.leased is not None:
            # In a task of its own: the store gives no connection to one that is being cancelled.
            await asyncio.gather(self._leases.release(work.leased, 0.0, None, count=False), return_exceptions=True)

    async def _go(self, work: Work, claimed: Callable[[], Awaitable[None]], *, defer: bool, unfed: bool) -> Outcome:
        saga = work.of_saga
        if saga.leased is None:
            begun = await self._begin(work, defer=defer, unfed=unfed)
            if isinstance(begun, Outcome):
                return begun
            saga.leased = begun
        if saga.in_doubt:
            again = await self._retake(work, saga.leased)
            if isinstance(again, Outcome):
                return again
            saga.leased, saga.in_doubt = again, False
        while True:
            if work.handler.options.settle == "claimed":
                await claimed()
            end = await self._attempt(work, saga.leased)
            if isinstance(end, Outcome):
                return end
            saga.leased = end

    async def _begin(self, work: Work, *, defer: bool, unfed: bool) -> LeasedSaga | Outcome:
        call = work.call
        assert call is not None
        options = work.handler.options
        while True:
            try:
                found = await self._leases.begin(call.claim, work.message, work.handler.name, options.version)
            except CommitUnknown:
                if (ours := await self._leases.retake(work.key, None)) is not None:
                    work.of_saga.noted = True
                    return ours
                continue
            if isinstance(found, LeasedSaga):
                work.of_saga.noted = True
                self._at(Point.CLAIMED, work.handler.name, (work.key,))
                return found
            if isinstance(found, Record) and judge(found, call.claim.fingerprint) is Verdict.BUSY:
                if not work.of_saga.noted:
                    work.of_saga.noted = True
                    await self._leases.note(work.key, "redelivered", f"{work.message.source} {work.message.position}")
                if defer:
                    return Outcome(OutcomeKind.BUSY, state=found.state)
                # A redelivery may be the first to notice that the owner was lost.
                unheld = await self._unheld(work) if unfed else ()
                app, name = work.handler.app, work.handler.name
                taken = await self._leases.take(app, [name], 1, unheld=unheld, key=work.key)
                return taken[0] if taken else Outcome(OutcomeKind.BUSY, state=found.state)
            return Outcome(OutcomeKind.BUSY) if found is Mark.BUSY else await self._engine.endings.replay(work, found)

    async def _unheld(self, work: Work) -> Sequence[tuple[bytes, int]]:
        """This saga, if it is ours and no other call holds it or may be about to: each call enters `_in_hand` first."""
        own = await self._leases.own(work.key)
        return () if any(other.key == work.key for other in self._in_hand if other is not work) else own

    async def _attempt(self, work: Work, saga: LeasedSaga) -> Outcome | LeasedSaga:
        """One run of the handler. When a COMMIT's answer was lost: the saga with a new token, to be run again."""
        attempt = Attempt(work, self._leases, self._at, self._lease, self._chance)
        task = asyncio.current_task()
        assert task is not None
        self._active[task] = attempt
        try:
            return await attempt.go()
        except CommitUnknown as unknown:
            log.warning("commit unknown, taking the saga over again", handler=work.handler.name, error=str(unknown))
            return await self._retake(work, work.leased or saga)

    async def _retake(self, work: Work, saga: LeasedSaga) -> Outcome | LeasedSaga:
        """A new token for our saga, once all writes under the old one have ended; its outcome if it has ended."""
        retaken = await self._leases.retake(saga.key, saga.token)
        if retaken is not None:
            return replace(retaken, stale=saga.stale)  # being stale may have been dealt with already
        (record,) = await self._engine.peek([saga.key])
        if record is not None and judge(record, None) is not Verdict.BUSY:
            if work.call is None:  # unreadable, so it can only have been put aside, by us or by a worker in between
                return Outcome(OutcomeKind.DEAD, state=record.state)
            return await self._engine.endings.replay(work, record)
        raise Fenced("the saga has another owner")
