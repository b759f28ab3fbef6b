"""When a schedule's slots are, and which of them to start, as pure functions (L53).

Theory of operation. A slot is a moment that a cron expression gives in a time zone, as in Debian's cron: a time that a
clock change skips is the moment after the gap, and one that it repeats is the first of the two, unless the schedule
runs every hour or more often. A schedule's row holds the time up to which its slots are dealt with; `due` decides
which slots follow.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import islice, takewhile
from typing import Final, Literal, get_args
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from cronsim import CronSim, CronSimError

from idemconsumer.errors import ConfigurationError

CatchUp = Literal["all", "last", "skip"]

MOST_AT_ONCE: Final = 100  # slots in one transaction
LATE: Final = timedelta(minutes=1)  # a slot that is later than this was missed
_FIELDS: Final = 5
_LONGEST_NAME: Final = 200
_WINDOWS: Final = (timedelta(days=1), timedelta(days=32), timedelta(days=367))


@dataclass(frozen=True, slots=True)
class Schedule:
    """A cron expression in a time zone, the handler that it starts, and what to do with missed slots."""

    name: str
    expression: str
    timezone: str
    catch_up: CatchUp
    handler: str

    @property
    def rule(self) -> str:
        return f"{self.expression} {self.timezone}"

    def key(self, slot: datetime) -> str:
        """The key of a slot's saga, the same in every worker (L53)."""
        return f"{self.name}@{slot.astimezone(UTC):%Y-%m-%dT%H:%MZ}"

    def payload(self, slot: datetime) -> dict[str, object]:
        """The payload of a slot's saga."""
        return {"schedule": self.name, "slot": slot}

    def slots(self, after: datetime) -> Iterator[datetime]:
        """The slots after a moment, in UTC. Raises CronSimError for an invalid expression."""
        for slot in CronSim(_fixed(self.expression), after.astimezone(ZoneInfo(self.timezone))):
            if slot > after:  # within a repeated hour, cronsim begins with the first of the two
                yield slot.astimezone(UTC)


def _fixed(expression: str) -> str:
    """The expression without stars in minutes and hours, unless it runs every hour: cronsim takes a star there for a
    schedule that follows elapsed time, and not the clock."""
    minute, hour, *rest = expression.split()
    if hour in ("*", "*/1"):
        return expression
    return " ".join([minute.replace("*", "0-59"), hour.replace("*", "0-23"), *rest])


def checked_schedule(schedule: Schedule) -> Schedule:
    """Return `schedule`. Raises ConfigurationError if it is invalid."""
    name, where = schedule.name, f"schedule {schedule.name!r}"
    if not name.isprintable() or not 0 < len(name) <= _LONGEST_NAME:
        raise ConfigurationError(f"{where}: a name is a printable text of up to {_LONGEST_NAME} characters")
    if schedule.catch_up not in get_args(CatchUp):
        raise ConfigurationError(f'{where}: catch_up={schedule.catch_up!r}; write "all", "last" or "skip"')
    if len(schedule.expression.split()) != _FIELDS:
        raise ConfigurationError(f'{where}: {schedule.expression!r} does not have five fields; write e.g. "0 3 * * *"')
    try:
        next(schedule.slots(datetime(2000, 1, 1, tzinfo=UTC)))
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise ConfigurationError(f'{where}: no time zone {schedule.timezone!r} ({error}); write e.g. "UTC"') from None
    except (CronSimError, StopIteration) as error:
        raise ConfigurationError(f'{where}: {schedule.expression!r}: {error}; write e.g. "0 3 * * *"') from None
    return schedule


def due(schedule: Schedule, last: datetime, now: datetime) -> tuple[list[datetime], datetime]:
    """The slots to start, and the moment up to which all slots are dealt with once they are started.

    "all" starts every missed slot, `MOST_AT_ONCE` at a time; "last" only the last one; "skip" none that is more than a
    minute late.
    """
    if now <= last:  # the database's clock was set back: nothing is started again
        return [], last
    if schedule.catch_up == "all":
        found = list(islice(_between(schedule, last, now), MOST_AT_ONCE))
        return found, found[-1] if len(found) == MOST_AT_ONCE else now
    if schedule.catch_up == "skip":
        return list(_between(schedule, max(last, now - LATE), now)), now
    for window in _WINDOWS:
        if found := list(_between(schedule, max(last, now - window), now)):
            return found[-1:], now
    return list(_between(schedule, last, now))[-1:], now


def _between(schedule: Schedule, after: datetime, until: datetime) -> Iterator[datetime]:
    return takewhile(lambda slot: slot <= until, schedule.slots(after))
