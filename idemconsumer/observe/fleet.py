"""What a launcher knows about its workers. Its totals never decrease, even when a worker dies (O11)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from idemconsumer.observe.counts import Counts
from idemconsumer.observe.reports import Report, decoded
from idemconsumer.ports.broker import Lag
from idemconsumer.rules.health import Phase, WorkerHealth, against_life, against_readiness


@dataclass(slots=True)
class _Member:
    """A live worker: its last report, and when that arrived."""

    report: Report | None = None
    heard: float = 0.0


class Fleet:
    """The workers of one launcher, by number. `deaths`: how many have ended without being asked to.

    What a killed worker did after its last report, a second at most, is lost: it is counted nowhere, and nothing is
    counted twice.
    """

    def __init__(self, workers: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.workers = workers
        self.app = ""
        self.deaths = 0
        self.stopping = False
        self.given_up = ""
        self._clock = clock
        self._members: dict[int, _Member] = {}
        self._gone = Counts()

    def begun(self, worker: int) -> None:
        self._members[worker] = _Member()

    def told(self, worker: int, line: bytes) -> None:
        """Take a report of a worker. A line of another version cannot be read, and changes nothing."""
        if (report := decoded(line)) is not None and worker in self._members:
            self._members[worker] = _Member(report, self._clock())
            self.app = report.app

    def ended(self, worker: int) -> None:
        """Call this after the worker's last line."""
        report = self._members.pop(worker).report
        if report is not None:
            self._gone.add(report.counts)

    # ------------------------------------------------------------------------------------------------------------- told
    @property
    def reports(self) -> Iterator[Report]:
        """The last report of each live worker."""
        return (each.report for each in self._members.values() if each.report is not None)

    @property
    def counts(self) -> Counts:
        """The counts of all workers, including those that have ended."""
        counts = Counts()
        for each in (self._gone, *(report.counts for report in self.reports)):
            counts.add(each)
        return counts

    @property
    def sources(self) -> list[str]:
        """All sources that its workers read."""
        return sorted({source for of in self.counts.handlers.values() for source in of.deliveries})

    @property
    def lag(self) -> dict[str, Lag]:
        """The lag by source. The lags of partitions add up; if workers report on the whole source, the larger number
        counts."""
        found: dict[str, Lag] = {}
        for report in self.reports:
            for source, lag in report.lag.items():
                found[source] = lag.beside(found[source]) if source in found else lag
        return found

    @property
    def up(self) -> dict[str, bool]:
        """By source, whether there is a worker and all that have begun are connected to it (O33)."""
        reports = list(self.reports)
        known = {source: [each.up[source] for each in reports if source in each.up] for source in self.sources}
        return {source: bool(of) and all(of) for source, of in known.items()}

    @property
    def states(self) -> dict[str, int]:
        """How many workers are in each phase. Of the consuming ones, those that wait for a server count as `waiting`.
        `vacant` are the places whose worker has ended."""
        standings = self._standings()
        waiting = sum(each.phase is Phase.CONSUMING and bool(each.lacking) for each in standings)
        number = {str(phase): sum(each.phase is phase for each in standings) for phase in Phase}
        number[Phase.CONSUMING] -= waiting
        return number | {"waiting": waiting, "vacant": max(0, self.workers - len(standings))}

    # ----------------------------------------------------------------------------------------------------------- health
    def against_life(self) -> list[str]:
        """Why a restart is due; empty if it is not."""
        return against_life(self._standings(), self.given_up)

    def against_readiness(self) -> list[str]:
        """Why not all workers consume; empty if they do."""
        return against_readiness(self._standings(), self.workers, stopping=self.stopping)

    def _standings(self) -> list[WorkerHealth]:
        return [self._standing(worker, each) for worker, each in self._members.items()]

    def _standing(self, worker: int, member: _Member) -> WorkerHealth:
        report = member.report
        if report is None:
            return WorkerHealth(worker, Phase.STARTING, silent=0.0, patience=0.0)
        silent = self._clock() - member.heard
        return WorkerHealth(worker, report.phase, silent, report.patience, report.stalled, report.lacking)
