"""What waits for others, since all of its handler fails, or all of its tenant (D17). The rule is in `rules.breaker`."""

from __future__ import annotations

from typing import Protocol

from idemconsumer.engine.work import Work
from idemconsumer.rules import breaker as failing
from idemconsumer.worker.in_flight import Strand


class Ledger(Protocol):
    """What the engine knows of failures."""

    def has_failed(self, work: Work) -> bool: ...
    def failed_beside(self, work: Work) -> int: ...


class Quarantine:
    """Of one handler: which strands belong there, and when one may leave. `trying`: how many lanes run what has left it
    although it fails."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._probed = False
        self._has_turn = False
        self.next_out = 0.0
        self.trying = 0

    def keeps(self, strand: Strand, *, probing: bool) -> bool:
        """What is of a tenant whose messages fail waits for those of others. While they are probed, what has failed
        waits for those that have not."""
        if strand.permitted and not self.trying:
            return False
        beside = self.beside(strand)
        return beside >= failing.IN_A_ROW or (probing and (beside > 0 or self.failed(strand)))

    def failed(self, strand: Strand) -> bool:
        """Whether the first one of it has."""
        return self._ledger.has_failed(strand.line[0].work)

    def beside(self, strand: Strand) -> int:
        """How many of its tenant have failed, since one of it succeeded."""
        work = strand.line[0].work
        return 0 if work.tenant is None else self._ledger.failed_beside(work)

    def begin(self, now: float) -> None:
        """The first one is there."""
        self.next_out = now + failing.AGAIN

    def opens(self, now: float, *, probing: bool) -> bool:
        """Whether some may leave: once its handler works again, or, until then, in their time."""
        before, self._probed = self._probed, probing
        if now < self.next_out if probing else not before:
            return False
        self.begin(now)
        return True

    def has_turn(self) -> bool:
        """Each second time: what is there has its share, whatever else there is."""
        self._has_turn = not self._has_turn
        return not self._has_turn
