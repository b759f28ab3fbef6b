"""What holds up a handler, as a word and as a sentence (O34). The gauge, alerts, `status` and `doctor` use it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Final

import msgspec

from idemconsumer.redaction import without_values

WORKS: Final = "works"  # the state of a handler that nothing holds up


class HeldUp(StrEnum):
    """Why a handler makes no progress, or not enough."""

    PAUSED = "paused"
    DATABASE_AWAY = "database_away"
    SOURCE_AWAY = "source_away"
    LOCKED = "locked"
    FAILS = "fails"


class Condition(msgspec.Struct, frozen=True):
    """`text`: a description without payload. `seconds`: for how long. `workers`: how many workers report it."""

    by: HeldUp
    text: str
    seconds: float
    workers: int = 1


class Failures(msgspec.Struct, frozen=True):
    """`runs` runs in a row have failed. `what`: what fails. `error`: the last error, and where it was raised."""

    what: str
    runs: int
    error: str
    seconds: float


class Holder(msgspec.Struct, frozen=True):
    """The session that holds a lock that others wait for, as the server shows it. Fields that this role may not see are
    None. pid 0 is a prepared transaction. `since`: when its transaction began."""

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
    """The handler is paused; `workers` of its workers know."""
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
    """What holds up one handler, as one worker sees it. `database`: for how many seconds it has been unusable, and
    `why`. `away`: its unreachable sources, each with the seconds. `holder`: the session that holds a lock for which
    this handler's transactions have waited, for `waits` seconds."""
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
    """Merge what several workers report of one handler: of each kind the condition that has lasted longest."""
    found: dict[HeldUp, Condition] = {}
    for each in sorted(known, key=lambda each: -each.seconds):
        before = found.get(each.by)
        found[each.by] = (
            each if before is None else msgspec.structs.replace(before, workers=before.workers + each.workers)
        )
    return list(found.values())
