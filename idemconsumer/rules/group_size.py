"""How many messages the next group of a handler may take, and whether groups take turns. Pure: times are given.

Theory of operation. A larger group shares its commit among more messages. Three things bound it. *Time*: its handlers
hold their locks until the last of them is done. *Failures*: a group that fails has run for nothing. *Collisions*: a
group takes rows in the order of its messages, so two of them may wait for each other, and one has run for nothing. On
few rows small groups collide too, so the groups of a contended handler take turns instead: before its claim each waits
for the gate, a lock in the database that all processes share. One large group after another beats many small ones.

None of this holds for duplicates: they run no handler, lock nothing and cannot fail. After many in a row, as when a
topic is read again, records are read first, for as many messages as half of those that came in a row.
"""

from __future__ import annotations

import math
from typing import Final

import msgspec
from msgspec.structs import replace

MAX_GROUP: Final = 128  # keys in one claim; each holds an entry of the shared lock table until the commit

_START: Final = 32
_GROUP_SECONDS: Final = 0.05  # what the handlers of one group may take together
_GROUPS_UP, _GROUPS_DOWN = 8, 2  # over which the handler's time is averaged, when it rises and when it falls
_MESSAGES: Final = 128  # over which the share of failures is averaged
_BURST: Final = 0.2  # seconds; the collisions of all lanes within it have one cause
_GATE_FIRST, _GATE_LAST = 2.0, 60.0  # seconds
_FEW, _CALM = 8, 64  # clean groups that make up for a failure; for a collision, or a lock table that was full
_SCARCE: Final = 60.0  # seconds for which a lock table that was full is believed to be
_BUSY, _IDLE = 0.75, 0.5  # of one core
_REPEATS: Final = 32  # duplicates in a row, after which the next message is likely to be one
_LEAST_OPEN = 4  # groups; enough to keep a nearby database busy


def open_groups(limit: int, lanes: int, busy: float) -> int:
    """How many of a worker's lanes may have a group open. It was `limit`, and the CPU was busy for a share `busy`.

    G13. While a worker waits for the database or what its handlers call, every lane may. Once its own CPU is the limit,
    more open groups get no more done: each gets only one message, which bears the whole cost of its group. With fewer,
    what arrives meanwhile joins a lane's next group: 2,800 RabbitMQ messages a second with 8 lanes at once, and 5,000
    with 4.
    """
    if busy >= _BUSY:
        return min(limit, max(_LEAST_OPEN, limit // 2))
    return min(lanes, limit * 2) if busy < _IDLE else limit


class Least(msgspec.Struct, frozen=True):
    """The least of what was measured lately, in seconds: it rises by a hundredth with each larger one."""

    least: float = math.inf

    def seen(self, seconds: float) -> Least:
        return Least(min(seconds, self.least * 1.01))


class Gate(msgspec.Struct, frozen=True):
    """Whether the groups of a contended handler take turns, and for how long the next time."""

    until: float = -math.inf
    pause: float = _GATE_FIRST
    calm: int = 0

    def shut(self, now: float) -> bool:
        return now < self.until

    def closed(self, now: float) -> Gate:
        return Gate(now + self.pause, min(_GATE_LAST, self.pause * 2))

    def clean(self, now: float) -> Gate:
        """A group has gone through without the gate: after enough of them the contention is over."""
        if self.pause == _GATE_FIRST or self.shut(now):
            return self
        return Gate() if self.calm + 1 >= _CALM else replace(self, calm=self.calm + 1)


class GroupSize(msgspec.Struct, frozen=True):
    """What is known of one handler's groups. `level` is what lost transactions and collisions have left of `cap`, and
    `cap` what a full lock table has left of `most`.

    An adaptive size begins with one message until the handler's time is known. A fixed one begins with all of `cap`,
    and a failure halves it.
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
        """`configured` is at most MAX_GROUP; None is adaptive. All lanes together stay within our share of the lock
        table (G4)."""
        cap = max(1, min(configured or MAX_GROUP, most_locks // max(1, lanes)))
        return cls(cap, configured is None, min(cap, _START) if configured is None else cap, cap)

    @property
    def size(self) -> int:
        """How many the next group may hold, duplicates included."""
        return max(self.to_claim, min(self.cap, self.repeats // 2))

    @property
    def to_claim(self) -> int:
        """How many may be claimed together, since their handlers may have to run."""
        return min(self.level, self._timely, self._careful) if self.adaptive else self.level

    @property
    def reads_first(self) -> bool:
        """Whether to look for duplicates before anything is claimed."""
        return self.repeats >= _REPEATS

    @property
    def _timely(self) -> int:
        """So that a slow handler runs alone (G11)."""
        if self.seconds is None:
            return 1
        return max(1, int(_GROUP_SECONDS / max(self.seconds, 1e-6)))

    @property
    def _careful(self) -> int:
        """Where the commits that a larger group saves pay for the handlers that it runs for nothing.

        If a transaction costs as much as `a` handlers, and a share `p` of messages fails, a message costs about
        a/n + pn/2, which is least at n = sqrt(2a/p). The measured costs were 1 to 8 handlers; a = 5 is within 4 % of
        the best for all of them, and for every share.
        """
        return max(1, int(math.sqrt(10 / max(self.failing, 1e-6))))

    def gated(self, now: float) -> bool:
        """Whether the next transaction has to wait for its turn, even if it holds a single message: that did 2,200/s,
        and 80/s if only groups waited. Slow handlers run alone and never wait: one at a time would be a standstill."""
        return self.gate.shut(now) and self.to_claim > 1

    # --------------------------------------------------------------------------------------------------- what happened
    def clean_group(self, messages: int, seconds: float, now: float, duplicates: int = 0) -> GroupSize:
        """A group was committed; `seconds` is how long the handlers of its `messages` took together, and the group's
        own work for each that was sent ahead. The more `duplicates` beside them, the more of it is the group's."""
        changed = self
        if messages:
            each, known = seconds / messages, self.seconds
            if known is not None:
                # Down quickly: waiting for rows makes any handler look slow, and one that seems too slow for a group
                # does not use the gate, which would end the waiting.
                share = messages / (messages + duplicates)
                each = known + share * (each - known) / (_GROUPS_UP if each > known else _GROUPS_DOWN)
            failing = self.failing and self.failing * (1 - 1 / _MESSAGES) ** messages
            changed = replace(self, seconds=each, failing=failing)
        grown, gate = changed._uncapped(now)._grown(), self.gate.clean(now)
        return grown if gate is self.gate else replace(grown, gate=gate)

    def repeated(self, duplicates: int) -> GroupSize:
        """So many were duplicates, and nothing among them was new. 0: something was."""
        return replace(self, repeats=min(self.repeats + duplicates, 2 * MAX_GROUP) if duplicates else 0)

    def _uncapped(self, now: float) -> GroupSize:
        """After a while of clean groups, whoever used up the lock table may be gone."""
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
        """The transaction's end is unknown, or it had none: perhaps it took too long (G14)."""
        return replace(self, level=max(1, self.to_claim // 2), clean=0)

    def collided(self, now: float) -> GroupSize:
        """A group waited too long for rows that another transaction holds."""
        if now - self.collided_at < _BURST:
            return self
        changed = replace(self, clean=0, collided_at=now)
        if self.gate.shut(now):  # with one that takes no turns: a smaller size would not prevent the next collision
            return changed
        if self.to_claim > _START and self.gate == Gate():
            return replace(changed, level=_START)
        return replace(changed, gate=self.gate.closed(now))

    def out_of_locks(self, now: float) -> GroupSize:
        """53200, out of shared memory: half of what was allowed (G4), until it has been enough for a while."""
        cap = max(1, self.cap // 2)
        return replace(self, cap=cap, level=min(self.level, cap), clean=0, scarce_until=now + _SCARCE, spared=0)
