"""Whether a launcher and its workers are alive and ready: the reasons why they are not, as sentences (O12)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum


class Phase(StrEnum):
    """The phase of a worker: it opens what it needs; it consumes; it drains; it has nothing left to do and leaves."""

    STARTING = "starting"
    CONSUMING = "consuming"
    DRAINING = "draining"
    LEAVING = "leaving"


@dataclass(frozen=True, slots=True)
class WorkerHealth:
    """What a launcher knows of a worker. Times in seconds.

    `silent`: since its last report. `patience`: for how long its event loop may be silent. `stalled`: feeds whose poll
    has not returned, and for how long. `lacking`: what the worker waits for before it can consume.
    """

    worker: int
    phase: Phase
    silent: float
    patience: float
    stalled: Mapping[str, float] = field(default_factory=dict)
    lacking: Sequence[str] = ()


def against_life(workers: Sequence[WorkerHealth], given_up: str = "") -> list[str]:
    """Why a restart is due. A worker that starts, waits for a server, drains or is being restarted is no reason."""
    found = [given_up] if given_up else []
    for each in workers:
        if each.phase is not Phase.LEAVING and each.silent > each.patience:
            found.append(f"worker {each.worker}: its event loop has been blocked for {each.silent:.0f} s")
        else:
            found += [f"worker {each.worker}: no poll of {feed} for {s:.0f} s" for feed, s in each.stalled.items()]
    return found


def against_readiness(workers: Sequence[WorkerHealth], wanted: int, *, stopping: bool) -> list[str]:
    """Why not all of the `wanted` workers consume."""
    if stopping:
        return ["the launcher is stopping"]
    known = {each.worker for each in workers}
    found = [f"worker {number} has not started" for number in range(wanted) if number not in known]
    for each in workers:
        if each.phase is not Phase.CONSUMING:
            found.append(f"worker {each.worker} is {each.phase}")
        found += [f"worker {each.worker} waits for {what}" for what in each.lacking]
    return found
