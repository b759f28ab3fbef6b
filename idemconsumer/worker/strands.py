"""Strands: deliveries that must run one after another, and which strand is next.

A strand is the deliveries of one order (D2), or, of what has no order, those of one key, in order of arrival. A key is
in one strand (D1): its later deliveries follow it there, whatever their order is. One lane at a time has a strand, and
runs its first deliveries. So a delivery that is slow, or fails, holds up its own strand and no other (D3, D14).

Strands that can run stand in one heap, by the arrival of their first delivery. The others are taken by a lane, or wait:
for their next attempt (D15), in quarantine (D17), or for a rival (D5). Their deliveries count as waiting, so that their
source may deliver others in their place (D8).

No function here waits or reads a clock: `now` is an argument. The lanes and their timers are in `lanes`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import count, islice, takewhile
from typing import Final

from idemconsumer.message.delivered import held_size
from idemconsumer.rules.backoff import backoff
from idemconsumer.worker.in_flight import InFlight, Strand, Wait
from idemconsumer.worker.quarantine import Ledger, Quarantine

_MOST_BYTES: Final = 16 * 1024 * 1024  # of the messages that wait for their next attempt
_FIRST, _LAST = 0.05, 1.0  # seconds between two rounds; they double while no delivery leaves
_AHEAD: Final = 1 << 62  # of all that ever arrives


class Strands:
    """The strands of one handler. `room`: how many of them may wait for their next attempt, and how many deliveries of
    one source for a rival. `forget` is called with deliveries that their broker has taken back."""

    def __init__(self, ledger: Ledger, forget: Callable[[Iterable[InFlight]], None], room: int) -> None:
        self.quarantine = Quarantine(ledger)
        self._forget = forget
        self._room = room
        self._all: dict[Strand, None] = {}
        self._of_order: dict[Hashable, Strand] = {}
        self._of_key: dict[bytes, tuple[Strand, int]] = {}  # and how many deliveries a key has
        self._long: dict[Strand, None] = {}  # those with more than one delivery
        self._heap: list[tuple[int, Strand]] = []  # one that is over stays in it until its turn
        self._later: list[tuple[float, int, Strand]] = []  # a heap of retries; some do not wait any more
        self._waiting: dict[Wait, dict[Strand, None]] = {wait: {} for wait in Wait}
        self._numbers = count(1)
        self._bytes = 0
        self.round_at = math.inf
        self._in_vain = 0  # rounds
        self._one_left = False  # since the last round

    # -------------------------------------------------------------------------------------------------------------- add
    def add(self, held: InFlight, order: Hashable | None) -> bool:
        """Add a delivery. True if another strand can run now. A saga that this process holds is outside the order:
        deliveries that wait here for its end must not delay it, and it waits behind no other message."""
        before, ours = len(self._heap), held.work.leased is not None
        strand = None if ours else self._known(held.work.key, order)
        held.number = next(self._numbers) - ours * _AHEAD
        begins = strand is None
        strand = strand or self._begin(None if ours else order)
        self._append(strand, held)
        self.learn(held)
        if begins:
            self._queue(strand, held.number)
        return len(self._heap) > before

    def learn(self, held: InFlight) -> None:
        """Register the key of a delivery, which may be known only now, because it could not be read before."""
        if (key := held.work.key) and not held.key:
            held.key = key
            strand, others = self._of_key.get(key, (held.strand, 0))
            self._of_key[key] = (strand if strand.line else held.strand, others + 1)

    def _known(self, key: bytes, order: Hashable | None) -> Strand | None:
        of_key = self._of_key[key][0] if key in self._of_key else None
        for strand in (of_key, self._of_order.get(order)):
            if strand is not None and self._still_ours(strand):
                return strand
        return None

    def _begin(self, order: Hashable | None) -> Strand:
        strand = Strand(order)
        self._all[strand] = None
        if order is not None:
            self._of_order[order] = strand
        return strand

    def _append(self, strand: Strand, held: InFlight) -> None:
        held.strand = strand
        strand.line.append(held)
        held.delivery.epoch.waiting += strand.waits is not None
        if len(strand.line) == 2:
            self._long[strand] = None

    def _queue(self, strand: Strand, rank: int) -> None:
        if not strand.ready:
            strand.ready = True
            heappush(self._heap, (rank, strand))

    def _queue_last(self, strand: Strand) -> None:
        self._queue(strand, next(self._numbers))

    # ------------------------------------------------------------------------------------------------------------- take
    def take(self, size: int, now: float, *, beside: int = 0, probing: bool = False) -> list[InFlight]:
        """Take a group of at most `size` deliveries for a lane, which holds their strands from now on. As many are left
        for each of `beside` other lanes that could run, too. A group is never waited for to fill."""
        group: list[InFlight] = []
        most = max(1, math.ceil(len(self._heap) / (1 + beside)))
        strand = self._first(now, probing)
        while strand is not None:
            strand.taken, most = True, most - 1
            self.quarantine.trying += strand.permitted
            for held in strand.line:
                # A delivery that has failed before is not put behind others: they would run again with it.
                if len(group) == size or held.abandoned or (group and held.due):
                    break
                held.running = True
                group.append(held)
            # No strand joins one that may hang (D17), or one whose claim waits for a rival differently (D5).
            alone = most == 0 or len(group) == size or strand.permitted
            after = None if alone else self.next_ready(now, probing)
            may_join = after is not None and after.deferred is strand.deferred and not after.line[0].due
            strand = self._pop() if may_join else None
        return group

    def _first(self, now: float, probing: bool) -> Strand | None:
        """The strand with which a lane begins its group."""
        ready = self.next_ready(now, probing)
        if probing:
            fresh = () if ready else self._fresh()
            return self._pop() or self._let_go(min(fresh, key=self.quarantine.beside, default=None), permitted=False)
        if not ready or (self.quarantine.has_turn() and not self.quarantine.trying):
            return self._let_go(next(self._quarantined(), None), permitted=True) or self._pop()
        return self._pop()

    def _peek(self) -> Strand | None:
        while self._heap:
            strand = self._heap[0][1]
            # A strand in the heap may wait for a retry by now: a round has decided that in the meantime.
            if not strand.taken and self._still_ours(strand) and strand.waits in (None, Wait.RIVAL):
                return strand
            self._unqueue()
        return None

    def _unqueue(self) -> None:
        _, strand = heappop(self._heap)
        strand.ready = False

    def _pop(self) -> Strand | None:
        if (strand := self._peek()) is not None:
            self._unqueue()
        return strand

    def takeable(self, *, probing: bool) -> int:
        """An upper bound of how many groups could begin now."""
        if probing:
            return len(self._heap) or any(True for _ in self._fresh())
        return len(self._heap) + len(self._waiting[Wait.QUARANTINE])

    @property
    def ready(self) -> int:
        """How many strands can run now."""
        return len(self._heap)

    @property
    def next_is_ours(self) -> bool:
        """Whether a saga that this process holds is next."""
        return bool(self._heap) and self._heap[0][0] < 0

    # ----------------------------------------------------------------------------------------------------- what follows
    def end(self, held: InFlight) -> None:
        """Remove a delivery that is settled, given back, or no longer owned by this process."""
        strand = held.strand
        strand.line.remove(held)
        held.delivery.epoch.waiting -= strand.waits is not None
        if held.key:
            where, others = self._of_key.pop(held.key)
            if others > 1:
                self._of_key[held.key] = (where, others - 1)
        self._shorter(strand)

    def _shorter(self, strand: Strand) -> None:
        if len(strand.line) < 2:
            self._long.pop(strand, None)
        if not strand.line:
            self._leave(strand)
            self._go_on(strand)
            del self._all[strand]
            if self._of_order.get(strand.order) is strand:
                del self._of_order[strand.order]

    def put_back(self, strand: Strand) -> None:
        """Give a strand that is not finished back its place. A strand that waits for a rival goes on waiting for it,
        because it has not been decided."""
        self._leave(strand)
        if strand.waits is Wait.RIVAL:
            self._queue_last(strand)
        else:
            self._queue(strand, strand.line[0].number)

    def rest(self, strand: Strand, now: float) -> None:
        """Let a strand wait until its first delivery is due for its next attempt."""
        self._wait(strand, Wait.RETRY, now)
        first = strand.line[0]
        strand.due, strand.bytes = first.due, held_size(first.work.message)
        self._bytes += strand.bytes
        heappush(self._later, (strand.due, next(self._numbers), strand))

    @property
    def full(self) -> bool:
        """Whether no more strands may wait for their next attempt."""
        return len(self._waiting[Wait.RETRY]) >= self._room or self._bytes >= _MOST_BYTES

    @property
    def retries(self) -> int:
        """How many strands wait for their next attempt."""
        return len(self._waiting[Wait.RETRY])

    def _wait(self, strand: Strand, wait: Wait, now: float) -> None:
        self._leave(strand)
        if strand.waits is not wait:
            self._go_on(strand)
            strand.waits, strand.since = wait, now
            self._waiting[wait][strand] = None
            for held in strand.line:
                held.delivery.epoch.waiting += 1

    def _go_on(self, strand: Strand) -> None:
        """End the waiting of a strand."""
        if strand.waits is None:
            return
        del self._waiting[strand.waits][strand]
        self._one_left |= strand.waits is Wait.RIVAL
        for held in strand.line:
            held.delivery.epoch.waiting -= 1
        self._bytes -= strand.bytes
        strand.waits, strand.bytes = None, 0

    def _leave(self, strand: Strand) -> None:
        """Mark a strand as held by no lane and no round."""
        if strand.taken:
            self.quarantine.trying -= strand.permitted
            strand.taken = strand.permitted = False
            for held in takewhile(_runs, strand.line):
                held.running = False

    def wake(self, now: float) -> None:
        """Strands whose retry is due can run, behind all that are ready."""
        while self._later and self._later[0][0] <= now:
            due, _, strand = heappop(self._later)
            if strand.waits is Wait.RETRY and strand.due == due:
                self._go_on(strand)
                self._queue_last(strand)

    @property
    def next_due(self) -> float:
        """When the first retry is due."""
        return self._later[0][0] if self._later else math.inf

    # ------------------------------------------------------------------------------------------------------ rivals (D5)
    def await_rival(self, held: InFlight, now: float) -> bool:
        """Let a delivery wait for a rival. It gives up its order, and so do later deliveries of its key. False if the
        room of its source is full."""
        strand, source = held.strand, held.delivery.message.source
        if strand.waits is not Wait.RIVAL:
            if sum(each.delivery.message.source == source for each in self.rivals) >= self._room:
                return False
            strand = strand if strand.order is None else self._split(held)
        strand.deferred = True
        if not self._waiting[Wait.RIVAL]:
            self._in_vain, self._one_left, self.round_at = 0, False, now + _FIRST
        self._wait(strand, Wait.RIVAL, now)
        return True

    def _split(self, held: InFlight) -> Strand:
        strand, alone = held.strand, self._begin(None)
        for each in [each for each in strand.line if each.key == held.key]:
            strand.line.remove(each)
            each.running = False
            self._append(alone, each)
        self._of_key[held.key] = (alone, self._of_key[held.key][1])
        self._shorter(strand)
        return alone

    def round(self, now: float) -> list[InFlight]:
        """Take all deliveries that wait for a rival, to read their records. Call `claim_again` with them afterwards."""
        self._in_vain = 0 if self._one_left else self._in_vain + 1
        self._one_left = False
        self.round_at = now + backoff(self._in_vain + 1, first=_FIRST, cap=_LAST)
        asked: list[InFlight] = []
        for strand in [*self._waiting[Wait.RIVAL]]:
            if not strand.taken and self._still_ours(strand):
                strand.taken = True
                asked += [held for held in strand.line if held.key == strand.line[0].key]
        if not self._waiting[Wait.RIVAL]:
            self.round_at = math.inf
        return asked

    def claim_again(self, asked: Iterable[InFlight], *, probing: bool = False) -> None:
        """Let lanes claim those of a round's deliveries that are still undecided, after all strands that are ready now.
        While the handler is probed only one: each claim takes the turn of a message that has not failed."""
        undecided = [strand for strand in dict.fromkeys(held.strand for held in asked) if strand.line and strand.taken]
        for strand in undecided:
            self._leave(strand)
        for strand in undecided[: 1 if probing else None]:
            self._queue_last(strand)

    @property
    def rivals(self) -> Sequence[InFlight]:
        """The deliveries that wait for a rival."""
        return [held for strand in self._waiting[Wait.RIVAL] for held in strand.line]

    def oldest(self, now: float) -> float:
        """For how many seconds the first of them has waited."""
        first = next(iter(self._waiting[Wait.RIVAL]), None)
        return 0.0 if first is None else now - first.since

    # ------------------------------------------------------------------------------------------------- quarantine (D17)
    def next_ready(self, now: float, probing: bool) -> Strand | None:
        """The next strand that may run. Strands before it that belong in quarantine are moved there. Quarantine has no
        bound of its own: its source limits how many deliveries are in flight."""
        while (strand := self._peek()) is not None and self.quarantine.keeps(strand, probing=probing):
            self._unqueue()
            if not self._waiting[Wait.QUARANTINE]:
                self.quarantine.begin(now)
            self._wait(strand, Wait.QUARANTINE, now)
            strand.permitted = False
        return strand

    def _quarantined(self) -> Iterator[Strand]:
        for strand in [*self._waiting[Wait.QUARANTINE]]:
            if self._still_ours(strand) and strand.waits is Wait.QUARANTINE:
                yield strand

    def _fresh(self) -> Iterator[Strand]:
        """The strands that are in quarantine because of their tenant, and have not failed themselves."""
        return (strand for strand in self._quarantined() if not self.quarantine.failed(strand))

    def _let_go(self, strand: Strand | None, *, permitted: bool) -> Strand | None:
        if strand is not None:
            self._go_on(strand)
            strand.permitted = permitted
        return strand

    def let_out(self, now: float, *, probing: bool) -> None:
        """Release all strands from quarantine once the handler works again. Until then release one that has failed,
        each time one is due."""
        if not self.quarantine.opens(now, probing=probing):
            return
        out = (strand for strand in self._quarantined() if not probing or self.quarantine.failed(strand))
        for strand in islice(out, 1 if probing else None):
            self._let_go(strand, permitted=probing)
            self._queue_last(strand)

    # ------------------------------------------------------------------------------------------ what is known, and ends
    def _still_ours(self, strand: Strand) -> bool:
        """Whether this process still owns a delivery of the strand. Deliveries that the broker has taken back are
        forgotten (D10) unless a lane or a round holds the strand, and the deliveries behind them go on."""
        if strand.taken:
            return True
        first = strand.line[0] if strand.line else None
        while strand.line and (gone := strand.line[0]).abandoned and not gone.running:
            self.end(gone)
            self._forget([gone])
        if strand.line and strand.line[0] is not first and strand.waits in (Wait.RETRY, Wait.QUARANTINE):
            self._go_on(strand)
            self._queue(strand, strand.line[0].number)
        return bool(strand.line)

    def sweep(self) -> None:
        """Forget all deliveries that this process no longer owns."""
        for strand in [*self._all]:
            self._still_ours(strand)

    def __len__(self) -> int:
        return len(self._all)

    @property
    def keys(self) -> set[bytes]:
        """The keys of all deliveries, except those that only wait for a rival."""
        return {held.key for strand in self._all for held in strand.line if held.key and not _only_waits(held)}

    @property
    def resting(self) -> tuple[int, float | None]:
        """How many deliveries wait for a point in time, and when the first of them may run."""
        retries, quarantine = self._waiting[Wait.RETRY], self._waiting[Wait.QUARANTINE]
        dues = [*(strand.due for strand in retries), *(self.quarantine.next_out for _ in quarantine)]
        return sum(len(strand.line) for strand in (*retries, *quarantine)), min(dues, default=None)

    @property
    def about_to_begin(self) -> Iterator[InFlight]:
        """The deliveries that wait only for a lane."""
        return (held for strand in self._all if strand.waits is None for held in strand.line if not held.running)

    def beyond(self, each: int) -> int:
        """How many deliveries are behind the first `each` of their strand, so that no other lane can run them."""
        return sum(max(0, len(strand.line) - each) for strand in self._long if strand.waits is None)

    def give_back(self) -> list[InFlight]:
        """Remove the deliveries that wait only for a lane, of each strand in which all of them can be returned at no
        cost (O14)."""
        back: list[InFlight] = []
        for strand in [each for each in self._all if each.waits is None]:
            waiting = [held for held in strand.line if not held.running]
            if all(held.can_go_back for held in waiting):
                back += waiting
        for held in back:
            self.end(held)
        return back

    def clear(self) -> list[InFlight]:
        """Remove all deliveries."""
        everything = [held for strand in self._all for held in strand.line]
        for held in everything:
            self.end(held)
        return everything


def _runs(held: InFlight) -> bool:
    return held.running


def _only_waits(held: InFlight) -> bool:
    return held.strand.waits is Wait.RIVAL and not held.running and held.work.leased is None
