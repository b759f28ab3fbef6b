"""Deliveries that wait for `decode=` on their way from a session to the lanes (D26).

In a strand, which has an order, the next delivery is decoded meanwhile, and dispatched after the one before it. If
several messages in a row could not be read, one is tried at a time (D17), and those that have failed do not hold up the
others.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Hashable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from contextvars import copy_context
from functools import partial

from idemconsumer.engine.failing import Subject
from idemconsumer.engine.work import Work
from idemconsumer.errors import NotReadNow
from idemconsumer.ports.broker import Delivery, Session
from idemconsumer.rules import breaker as failing
from idemconsumer.user_code.cancellation import end
from idemconsumer.worker.lanes import Lanes


class _Probe:
    """Serialises tries while all messages of a handler fail (D17): one at a time, unless the one that runs hangs."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[Callable[[], None]]:
        """Wait for a turn. Call what it yields when the message begins: if that hangs, the next message gets a turn
        meanwhile."""
        await self._lock.acquire()
        timer: asyncio.TimerHandle | None = None
        passed = False

        def begun() -> None:
            nonlocal timer
            timer = asyncio.get_running_loop().call_later(failing.HANGS, pass_on)

        def pass_on() -> None:
            nonlocal passed
            passed = True
            self._lock.release()

        try:
            yield begun
        finally:
            if timer is not None:
                timer.cancel()
            if not passed:
                self._lock.release()


class _Turns:
    """The turns to decode, of one handler."""

    def __init__(self, lanes: int) -> None:
        self.many = asyncio.Semaphore(lanes)
        self.one = {failed: _Probe() for failed in (False, True)}


class Readings:
    """The readings of one session. `dispatched` is called for each delivery that was given to a lane."""

    def __init__(
        self,
        session: Session,
        lanes: Lanes,
        *,
        given_up: Callable[[Delivery], bool],
        dispatched: Callable[[], None],
    ) -> None:
        """`given_up`: whether a delivery is not to be decoded any more."""
        self.session = session
        self._lanes = lanes
        self._engine = lanes.in_hand.engine
        self._given_up = given_up
        self._dispatched = dispatched
        self._turns: dict[str, _Turns] = {}
        self._going: dict[asyncio.Task[None], Delivery] = {}
        self._last: dict[Hashable, asyncio.Task[None]] = {}  # the last one of each strand
        self._first: set[asyncio.Task[None]] = set()
        self._late: list[Delivery] = []  # to be returned to the broker
        self._bug: BaseException | None = None
        self._context = copy_context()  # the caller of `add` may run alone, and the tasks that wait must not (B16)

    @property
    def busy(self) -> bool:
        """Whether any delivery waits."""
        return bool(self._going)

    @property
    def counted(self) -> bool:
        """Whether a delivery waits that would count as delivered if it was returned (D11)."""
        return any(delivery.epoch.returns_count for delivery in self._going.values())

    async def first(self, works: Sequence[Work]) -> None:
        """Try each once, all at the same time, since they are on record meanwhile (B17)."""
        tries = [asyncio.create_task(self._engine.read(work)) for work in works if not work.read_now()]
        self._first.update(tries)
        try:
            await asyncio.gather(*tries, return_exceptions=True)
        finally:
            self._first.difference_update(tries)
            await end(*tries)

    def add(self, work: Work, delivery: Delivery) -> None:
        """Dispatch it once it is decoded and everything before it in its strand is dispatched."""
        strand = None if work.leased is not None else work.handler.strand(work.message)
        before = None if strand is None else self._last.get(strand)
        readable = before is None and work.read_now() and not self._waits(work)
        if readable and strand is None:
            self._dispatch(work, delivery)
        elif self._given_up(delivery):  # as the deliveries before it in its strand may be
            self._late.append(delivery)
        elif readable:
            self._dispatch(work, delivery)
        else:
            self._begin(work, delivery, strand, before)

    def _begin(
        self, work: Work, delivery: Delivery, strand: Hashable | None, before: asyncio.Task[None] | None
    ) -> None:
        task = asyncio.create_task(self._read(work, delivery, before), context=self._context.copy())
        self._going[task] = delivery
        if strand is not None:
            self._last[strand] = task
        task.add_done_callback(partial(self._end, strand))

    def _end(self, strand: Hashable | None, task: asyncio.Task[None]) -> None:
        self._going.pop(task, None)
        if self._last.get(strand) is task:
            del self._last[strand]
        if not task.cancelled():
            self._bug = self._bug or task.exception()

    def check(self) -> None:
        """Raise the error that ended one of the readings: a bug there is a bug of the feed."""
        if self._bug is not None:
            raise self._bug

    async def drop_retired(self) -> None:
        """Stop decoding what the broker has taken back: it may be redelivered, and must not be decoded twice at once. A
        decoder that ignores its cancellation is waited for at most a second."""
        if retired := [task for task, delivery in self._going.items() if delivery.epoch.retiring]:
            for task in retired:
                task.cancel()
            await asyncio.wait(retired, timeout=1.0)

    async def give_up(self, *, counted: bool = True) -> None:
        """Stop decoding and return the deliveries: all of them, or without `counted` all but those that would count as
        delivered."""
        back = {task: each for task, each in self._going.items() if counted or not each.epoch.returns_count}
        await end(*back, *self._first)
        left = [*self._late, *(each for task, each in back.items() if task.cancelled())]
        self._late.clear()
        if left := [each for each in left if not each.epoch.retiring]:
            await self.session.release(left)

    async def end(self) -> None:
        """As `give_up`, for a session that is over: nothing is returned."""
        await end(*self._going, *self._first)

    async def _read(self, work: Work, delivery: Delivery, before: asyncio.Task[None] | None) -> None:
        if not work.read_now():
            await self._try(work)
        with _waiting(delivery):
            while isinstance(work.refusal, NotReadNow) and self._waits(work):
                ended = self._engine.endings.not_now(work, work.refusal)
                await asyncio.sleep(ended.due)
                await self._try(work)
            if before is not None:
                await asyncio.wait([before])
        if work.put_by:
            self._engine.endings.failing.ended(Subject.handler(work.handler), work.identity)
        self._dispatch(work, delivery)

    def _waits(self, work: Work) -> bool:
        """Whether to wait and decode again. A saga that this worker holds is released instead: another worker may read
        it."""
        return work.leased is None and self._engine.endings.is_not_now(work)

    async def _try(self, work: Work) -> None:
        async with self._turn(work):
            await self._engine.read(work)

    @asynccontextmanager
    async def _turn(self, work: Work) -> AsyncIterator[None]:
        handler, failed = work.handler, work.put_by > 0
        if (turns := self._turns.get(handler.name)) is None:
            turns = self._turns[handler.name] = _Turns(self._lanes.of(handler.name).count)
        if failed or self._engine.health(handler).probing:
            async with turns.one[failed].turn() as begun:
                if (health := self._engine.health(handler)).probing:
                    await asyncio.sleep(max(0.0, health.next_run - asyncio.get_running_loop().time()))
                if failed:
                    yield
                    return
                if health.probing:
                    begun()
                    async with turns.many:
                        yield
                    return
        async with turns.many:
            yield

    def _dispatch(self, work: Work, delivery: Delivery) -> None:
        if not delivery.epoch.retiring:  # it may be on record that nothing of the epoch runs (K10)
            self._lanes.dispatch(work, delivery, self.session)
            self._dispatched()


@contextmanager
def _waiting(delivery: Delivery) -> Iterator[None]:
    """Count the delivery as waiting, so that its source may deliver others in its place (D8)."""
    delivery.epoch.waiting += 1
    try:
        yield
    finally:
        delivery.epoch.waiting -= 1
