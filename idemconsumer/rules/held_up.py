"""What holds up a handler, as a word and as a sentence (O34). Gauge, alerts, `status` and `doctor` read this."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Final

import msgspec

from idemconsumer.redaction import without_values

WORKS: Final = "works"  # the state of a handler that nothing holds up


class HeldUp(StrEnum):
    """Why a handler gets nothing done, or not all that it has to do."""

    PAUSED = "paused"
    DATABASE_AWAY = "database_away"
    SOURCE_AWAY = "source_away"
    LOCKED = "locked"
    FAILS = "fails"


class Condition(msgspec.Struct, frozen=True):
    """`text` says what it is, without a payload; `seconds`: for how long; `workers`: in how many."""

    by: HeldUp
    text: str
    seconds: float
    workers: int = 1


class Failures(msgspec.Struct, frozen=True):
    """So many `runs` in a row have failed. `what` fails; `error`: what the last one was, and where."""

    what: str
    runs: int
    error: str
    seconds: float


class Holder(msgspec.Struct, frozen=True):
    """Who has a lock that others wait for, as the server says. What it does not tell this role is None; pid 0 is a
    transaction that was prepared. `since`: when its transaction began."""

    pid: int
    program: str | None = None
    role: str | None = None
    state: str | None = None
    statement: str | None = None
    since: str | None = None

    def __str__(self) -> str:
        if not self.pid:
            return "a prepared transaction, see pg_prepared_xacts"
        known = ", ".join(filter(None, (self.program, self.role)))
        ran = f" `{without_values(self.statement)}`" if self.statement else ""
        does = f"running{ran}" if self.state == "active" else f"{self.state or 'in a state that this role may not see'}"
        behind = f" after{ran}" if ran and self.state != "active" else ""
        began = f", in a transaction since {self.since}" if self.since else ""
        return f"pid {self.pid}{f' ({known})' if known else ''}, {does}{behind}{began}"


def paused(by: str, reason: str | None, seconds: float, workers: int) -> Condition:
    """`workers` know of it."""
    return Condition(HeldUp.PAUSED, f"paused by {by}{f' ({reason})' if reason else ''}", seconds, workers)


def conditions(
    *,
    database: float | None = None,
    why: str = "",
    away: Mapping[str, float],
    holder: Holder | None = None,
    waits: float = 0.0,
    failing: Failures | None = None,
) -> list[Condition]:
    """What one worker knows of one of its handlers. `database`: for how long it cannot be used, and `why`; `away`: its
    sources that are, for so long; `holder`: of a lock that its transactions have waited for, for so long."""
    found = []
    if database is not None:
        found.append(
            Condition(HeldUp.DATABASE_AWAY, f"the database cannot be used{f' ({why})' if why else ''}", database)
        )
    if away:
        are = "is" if len(away) == 1 else "are"
        text = f"{' and '.join(sorted(away))} {are} unreachable"
        found.append(Condition(HeldUp.SOURCE_AWAY, text, max(away.values())))
    if holder is not None:
        found.append(Condition(HeldUp.LOCKED, f"waits for a lock, held by {holder}; it has waited", waits))
    if failing is not None:
        text = f"{failing.what}: {failing.runs:,} runs in a row, the last one with {failing.error}; they have failed"
        found.append(Condition(HeldUp.FAILS, text, failing.seconds))
    return found


def together(known: Iterable[Condition]) -> list[Condition]:
    """What several workers know of one handler: of each kind that which has lasted for longest."""
    found: dict[HeldUp, Condition] = {}
    for each in sorted(known, key=lambda each: -each.seconds):
        before = found.get(each.by)
        found[each.by] = (
            each if before is None else msgspec.structs.replace(before, workers=before.workers + each.workers)
        )
    return list(found.values())
