"""How many messages the next group of a handler may take, and whether groups take turns. Pure: times are given.

Theory of operation. A larger group shares its commit among more messages. Three things bound it. *Time*: its handlers
hold their locks until the last of them is done. *Failures*: a group that fails has run for nothing. *Collisions*: a
group locks rows in the order of its messages, so two groups may wait for each other, and one of them has run for
nothing. If there are few rows, small groups collide too, so the groups of a contended handler take turns instead:
before its claim each waits for the gate, a lock in the database that all processes share. One large group after another
is faster than many small ones at once.

None of this holds for duplicates: they run no handler, lock nothing and cannot fail. After many duplicates in a row, as
when a topic is read again, records are read before anything is claimed, for half as many messages as came in that row.
"""

from __future__ import annotations

import math
from typing import Final

import msgspec
from msgspec.structs import replace

MAX_GROUP: Final = 128  # keys in one claim; each holds an entry of the shared lock table until the commit

_START: Final = 32
_GROUP_SECONDS: Final = 0.05  # what the handlers of one group may take together
_GROUPS_UP, _GROUPS_DOWN = 8, 2  # groups over which the handler's time is averaged, when it rises and when it falls
_MESSAGES: Final = 128  # over which the share of failures is averaged
_BURST: Final = 0.2  # seconds; collisions of any lanes within it have one cause
_GATE_FIRST, _GATE_LAST = 2.0, 60.0  # seconds
_FEW, _CALM = 8, 64  # clean groups that make up for a failure; for a collision or a full lock table
_SCARCE: Final = 60.0  # seconds for which the lock table is assumed to stay full
_BUSY, _IDLE = 0.75, 0.5  # of one core
_REPEATS: Final = 32  # duplicates in a row, after which the next message is likely to be one
_LEAST_OPEN = 4  # groups; enough to keep a nearby database busy


def open_groups(limit: int, lanes: int, busy: float) -> int:
    """How many of a worker's lanes may have a group open. So far it was `limit`, at a CPU load of `busy` (1 = a core).

    G13. While a worker waits for the database or for what its handlers call, every lane may. Once its own CPU is the
    limit, more open groups do not raise the throughput: each gets only one message, which bears the whole cost of its
    group. With fewer, messages that arrive meanwhile join a lane's next group: 2,800 RabbitMQ messages a second with 8
    open groups, and 5,000 with 4.
    """
    if busy >= _BUSY:
        return min(limit, max(_LEAST_OPEN, limit // 2))
    return min(lanes, limit * 2) if busy < _IDLE else limit


class Least(msgspec.Struct, frozen=True):
    """The smallest of the recent measurements, in seconds. Each larger measurement raises it by a hundredth."""

    least: float = math.inf

    def seen(self, seconds: float) -> Least:
        return Least(min(seconds, self.least * 1.01))


class Gate(msgspec.Struct, frozen=True):
    """Whether the groups of a contended handler take turns, and for how many seconds if that begins again."""

    until: float = -math.inf
    pause: float = _GATE_FIRST
    calm: int = 0

    def shut(self, now: float) -> bool:
        return now < self.until

    def closed(self, now: float) -> Gate:
        return Gate(now + self.pause, min(_GATE_LAST, self.pause * 2))

    def clean(self, now: float) -> Gate:
        """A group was committed without the gate. After enough of them the contention is over."""
        if self.pause == _GATE_FIRST or self.shut(now):
            return self
        return Gate() if self.calm + 1 >= _CALM else replace(self, calm=self.calm + 1)


class GroupSize(msgspec.Struct, frozen=True):
    """What is known of one handler's groups. `most` is the limit, `cap` is `most` reduced by full lock tables, and
    `level` is `cap` reduced by lost transactions and collisions.

    An adaptive size is one message until the handler's time is known. A fixed size begins with all of `cap`, and a
    failure halves it.
    """

    cap: int
    adaptive: bool
    level: int
    most: int
    clean: int = 0
    failing: float = 0.0
    seconds: float | None = None
    collided_at: float = -math.inf
    gate: Gate = Gate()
    scarce_until: float = -math.inf
    spared: int = 0  # clean groups since the cap was changed
    repeats: int = 0  # duplicates in a row

    @classmethod
    def start(cls, configured: int | None, *, lanes: int, most_locks: int) -> GroupSize:
        """`configured`: at most MAX_GROUP; None is adaptive. All lanes together stay within our share of the lock
        table (G4)."""
        cap = max(1, min(configured or MAX_GROUP, most_locks // max(1, lanes)))
        return cls(cap, configured is None, min(cap, _START) if configured is None else cap, cap)

    @property
    def size(self) -> int:
        """How many the next group may hold, duplicates included."""
        return max(self.to_claim, min(self.cap, self.repeats // 2))

    @property
    def to_claim(self) -> int:
        """How many messages may be claimed together, given that their handlers may have to run."""
        return min(self.level, self._timely, self._careful) if self.adaptive else self.level

    @property
    def reads_first(self) -> bool:
        """Whether to read the records first, since most messages are duplicates, before anything is claimed."""
        return self.repeats >= _REPEATS

    @property
    def _timely(self) -> int:
        """The limit by time: a slow handler runs alone (G11)."""
        if self.seconds is None:
            return 1
        return max(1, int(_GROUP_SECONDS / max(self.seconds, 1e-6)))

    @property
    def _careful(self) -> int:
        """The limit by failures: where the commits saved by a larger group outweigh the handlers run for nothing.

        If a transaction costs as much as `a` handlers, and a share `p` of messages fails, a message costs about
        a/n + pn/2, which is least at n = sqrt(2a/p). The measured costs were 1 to 8 handlers; a = 5 is within 4 % of
        the best for all of them, and for every share.
        """
        return max(1, int(math.sqrt(10 / max(self.failing, 1e-6))))

    def gated(self, now: float) -> bool:
        """Whether the next transaction has to wait for the gate, even if it holds a single message: that did 2,200/s,
        and 80/s if only groups waited. Slow handlers run alone and never wait: taking turns would stop them."""
        return self.gate.shut(now) and self.to_claim > 1

    # --------------------------------------------------------------------------------------------------- what happened
    def clean_group(self, messages: int, seconds: float, now: float, duplicates: int = 0) -> GroupSize:
        """A group was committed. `seconds`: the total time of the handlers of its `messages`, plus the group's own work
        on each message whose statements were pipelined. The more `duplicates` were in the group, the less that time
        says about the handler."""
        changed = self
        if messages:
            each, known = seconds / messages, self.seconds
            if known is not None:
                # Down quickly: waiting for rows makes any handler look slow, and a handler that seems too slow for
                # groups does not use the gate, which would end that waiting.
                share = messages / (messages + duplicates)
                each = known + share * (each - known) / (_GROUPS_UP if each > known else _GROUPS_DOWN)
            failing = self.failing and self.failing * (1 - 1 / _MESSAGES) ** messages
            changed = replace(self, seconds=each, failing=failing)
        grown, gate = changed._uncapped(now)._grown(), self.gate.clean(now)
        return grown if gate is self.gate else replace(grown, gate=gate)

    def repeated(self, duplicates: int) -> GroupSize:
        """So many messages in a row were duplicates. 0: something was new."""
        return replace(self, repeats=min(self.repeats + duplicates, 2 * MAX_GROUP) if duplicates else 0)

    def _uncapped(self, now: float) -> GroupSize:
        """After a while of clean groups, the other user of the lock table may be gone: raise the cap."""
        if self.cap >= self.most:
            return self
        if self.spared + 1 < _CALM or now < self.scarce_until:
            return replace(self, spared=self.spared + 1)
        return replace(self, cap=min(self.most, self.cap * 2), scarce_until=now + _SCARCE, spared=0)

    def _grown(self) -> GroupSize:
        if self.level >= self.cap:
            return self
        if self.clean + 1 < (_FEW if self.level < _START else _CALM):
            return replace(self, clean=self.clean + 1)
        return replace(self, level=min(self.cap, self.level * 2), clean=0)

    def failed(self) -> GroupSize:
        """A handler's message failed."""
        if not self.adaptive:
            return self.lost()
        return replace(self, failing=self.failing + (1 - self.failing) / _MESSAGES)

    def lost(self) -> GroupSize:
        """The end of the transaction is unknown, or it did not end: perhaps it took too long (G14)."""
        return replace(self, level=max(1, self.to_claim // 2), clean=0)

    def collided(self, now: float) -> GroupSize:
        """A group waited too long for rows that another transaction holds."""
        if now - self.collided_at < _BURST:
            return self
        changed = replace(self, clean=0, collided_at=now)
        if self.gate.shut(now):  # the rival does not use the gate: a smaller size would not prevent the next collision
            return changed
        if self.to_claim > _START and self.gate == Gate():
            return replace(changed, level=_START)
        return replace(changed, gate=self.gate.closed(now))

    def out_of_locks(self, now: float) -> GroupSize:
        """SQLSTATE 53200, out of shared memory: halve the cap (G4), until that has been enough for a while."""
        cap = max(1, self.cap // 2)
        return replace(self, cap=cap, level=min(self.level, cap), clean=0, scarce_until=now + _SCARCE, spared=0)
