"""Quarantine: strands that wait because all messages of their handler or tenant fail (D17). The rule is in
`rules.breaker`."""

from __future__ import annotations

from typing import Protocol

from idemconsumer.engine.work import Work
from idemconsumer.rules import breaker as failing
from idemconsumer.worker.in_flight import Strand


class Ledger(Protocol):
    """The engine's record of failures."""

    def has_failed(self, work: Work) -> bool: ...
    def failed_beside(self, work: Work) -> int: ...


class Quarantine:
    """Decides, for one handler, which strands belong in quarantine, and when one may leave it. `trying`: how many lanes
    run a strand that was let out although its handler or tenant still fails."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._probed = False
        self._has_turn = False
        self.next_out = 0.0
        self.trying = 0

    def keeps(self, strand: Strand, *, probing: bool) -> bool:
        """Whether a strand belongs in quarantine: its tenant's messages fail, or, while the handler is probed, its
        first message, or another one of its tenant, has failed."""
        if strand.permitted and not self.trying:
            return False
        beside = self.beside(strand)
        return beside >= failing.IN_A_ROW or (probing and (beside > 0 or self.failed(strand)))

    def failed(self, strand: Strand) -> bool:
        """Whether the first delivery of a strand has failed."""
        return self._ledger.has_failed(strand.line[0].work)

    def beside(self, strand: Strand) -> int:
        """How many messages of a strand's tenant have failed since one of that tenant succeeded."""
        work = strand.line[0].work
        return 0 if work.tenant is None else self._ledger.failed_beside(work)

    def begin(self, now: float) -> None:
        """Set the time of the next release. Called when the first strand comes, and at each release."""
        self.next_out = now + failing.AGAIN

    def opens(self, now: float, *, probing: bool) -> bool:
        """Whether strands may leave: when the handler works again, or, until then, once a second."""
        before, self._probed = self._probed, probing
        if now < self.next_out if probing else not before:
            return False
        self.begin(now)
        return True

    def has_turn(self) -> bool:
        """True every second time, so that strands in quarantine get their share, however many others are ready."""
        self._has_turn = not self._has_turn
        return not self._has_turn
