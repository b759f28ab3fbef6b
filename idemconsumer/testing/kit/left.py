"""The work that a kit still has: now, later, or only once a person decides."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, LiteralString

from idemconsumer.rules.schedules import Schedule, due
from idemconsumer.testing.kit.clock import Connection
from idemconsumer.testing.kit.hub import Hub
from idemconsumer.worker.worker import Worker

_UNITS: Final = {"d": 86_400, "h": 3_600, "m": 60}  # seconds
_NEVER: Final = 50 * 365 * 86_400.0  # seconds: a wait without a timeout ends in a hundred years
# Columns: the kind of work, how many, and in how many seconds the first is due (null: once a person decides).
_WAITING: Final[LiteralString] = """
with clock as materialized (select clock_timestamp() as now)
select what, count(*), (extract(epoch from min(at) - (select now from clock)))::float8 from (
    select concat('saga ', handler, ' (waits for ' || array_to_string(signals, ', ') || ')') as what, due as at
    from idemconsumer.saga where worker is null and parked is null
    union all
    select 'saga ' || handler || ' parked: ' || parked, null from idemconsumer.saga where parked is not null
    union all
    select 'message of ' || case when name like '~%%' then ltrim(name, '~') else 'postgres:' || name end, due_at
    from idemconsumer.delayed where name = any(%(queues)s)
    union all
    select 'outgoing message to ' || destination, coalesce(due_at, (select now from clock))
    from idemconsumer.outbox where parked_at is null
    union all
    select 'refused message to ' || destination, null from idemconsumer.outbox where parked_at is not null
    union all
    select 'accepted message of ' || a.handler, a.until from idemconsumer.accepted as a
    join idemconsumer.record as r on r.key = a.key and r.state = 0 where a.until is not null
) as w group by what order by 3 nulls last, 1
"""
_SCHEDULES: Final[LiteralString] = "select app, name, rule, last, clock_timestamp() from idemconsumer.schedule"
_RUNNING: Final[LiteralString] = "select key from idemconsumer.saga where key = any(%s)"


@dataclass(frozen=True, slots=True)
class LeftWaiting:
    """`count` of `what` wait; the first is due in `due` seconds, or, with None, once a person or a signal comes."""

    what: str
    count: int
    due: float | None

    def __str__(self) -> str:
        many = self.count > 1
        when = "" if self.due is None else f", {'the first ' if many else ''}in {_short(self.due)}"
        return f"{self.count} x {self.what}{when}" if many else f"{self.what}{when}"


@dataclass(frozen=True, slots=True)
class Left:
    """The work `waiting` after a drain, in the order in which it is due. False if there is none; as text, a list for
    people."""

    waiting: tuple[LeftWaiting, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.waiting)

    def __iter__(self) -> Iterator[LeftWaiting]:
        return iter(self.waiting)

    def __len__(self) -> int:
        return len(self.waiting)

    def __str__(self) -> str:
        return "; ".join(map(str, self.waiting)) or "nothing"

    @property
    def due(self) -> float | None:
        """The seconds until the first piece of work is due."""
        return min((each.due for each in self.waiting if each.due is not None), default=None)


@dataclass(frozen=True, slots=True)
class KitState:
    """`busy`: workers with work in progress. `late`: due work that no worker has noticed yet. `left`: the rest."""

    busy: tuple[str, ...]
    late: tuple[LeftWaiting, ...]
    left: Left

    @property
    def quiet(self) -> bool:
        """Whether no work is left to do now."""
        return not self.busy and not self.late

    def __str__(self) -> str:
        busy = [f"{each} works" for each in self.busy]
        return "; ".join([*busy, *(f"{each.what} is due" for each in self.late), *map(str, self.left)])


async def state(
    connection: Connection, workers: Mapping[str, Worker], schedules: Sequence[tuple[str, Schedule]], hub: Hub
) -> KitState:
    """The state of all workers, given by the names of their apps. The remaining work is queried only while no worker is
    busy: otherwise the answer would be out of date, and the query would take time from them."""
    standing = {app: await worker.standing() for app, worker in workers.items()}
    if busy := [f"app {app!r}" for app, its in standing.items() if its.busy]:
        return KitState(tuple(busy), (), Left(()))
    clock = asyncio.get_running_loop().time
    queues = [name for worker in workers.values() for name in _queues(worker)]
    rows = await (await connection.execute(_WAITING, {"queues": queues})).fetchall()
    waiting = [LeftWaiting(*row) for row in rows] + await _slots(connection, schedules)
    waiting += [LeftWaiting("message that was published with a delay", 1, at - clock()) for at in hub.delayed]
    for app, its in standing.items():
        rivals = len(its.rivals)
        if its.rivals:
            running = await (await connection.execute(_RUNNING, (list(its.rivals),))).fetchall()
            rivals -= len(running)
            waiting += [LeftWaiting(f"delivery of {app} whose saga goes on", 1, None) for _ in running]
        if rivals:
            busy.append(f"app {app!r}")
        if its.resting:
            after = None if its.due is None else its.due - clock()
            waiting.append(LeftWaiting(f"message of {app} that waits for its next attempt", its.resting, after))
    late = tuple(each for each in waiting if each.due is not None and each.due <= 0)
    later = [each for each in waiting if each not in late]
    later = [LeftWaiting(each.what, each.count, None) if (each.due or 0) > _NEVER else each for each in later]
    later.sort(key=lambda each: math.inf if each.due is None else each.due)
    return KitState(tuple(busy), late, Left(tuple(later)))


def _short(seconds: float) -> str:
    for unit, size in _UNITS.items():
        if seconds >= size:
            return f"{seconds / size:.3g}{unit}"
    return f"{seconds:.3g}s"


def _queues(worker: Worker) -> list[str]:
    sources = [source for handler in worker.handlers for source in (handler.own_source, handler.retry_source)]
    sources += [each.source for handler in worker.handlers for each in handler.subscriptions]
    return [source.removeprefix("postgres:") for source in sources if source.startswith("postgres:")]


async def _slots(connection: Connection, schedules: Sequence[tuple[str, Schedule]]) -> list[LeftWaiting]:
    """When the schedules start their next sagas."""
    if not schedules:
        return []
    rows: list[tuple[Any, ...]] = await (await connection.execute(_SCHEDULES)).fetchall()
    known: dict[tuple[str, str, str], tuple[datetime, datetime]] = {
        (app, name, rule): (last, now) for app, name, rule, last, now in rows
    }
    waiting = []
    for app, schedule in schedules:
        if (times := known.get((app, schedule.name, schedule.rule))) is None:
            waiting.append(LeftWaiting(f"schedule {schedule.name}", 1, 0.0))
            continue
        last, now = times
        slots, _ = due(schedule, last, now)
        after = 0.0 if slots else None
        if not slots and (following := next(schedule.slots(now), None)) is not None:
            after = (following - now).total_seconds()
        waiting.append(LeftWaiting(f"schedule {schedule.name}", 1, after))
    return waiting
