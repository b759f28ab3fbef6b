"""`top`: the tables of `status`, updated live, with rates."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import termios
import tty
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping
from datetime import datetime
from typing import Any, Final

from click import argument, option

from idemconsumer.admin.control import WorkerLine
from idemconsumer.admin.status import Status
from idemconsumer.admin.status import status as read_status
from idemconsumer.cli.flags import Finite, database, flag
from idemconsumer.cli.status_verb import Titled, counted, shown, state_of, tables, titled
from idemconsumer.cli.verbs import Given, Output, verb
from idemconsumer.errors import ConfigurationError, IdemConsumerError
from idemconsumer.missing import cannot_import
from idemconsumer.redaction import error_text

_FAILURES: Final = ("retrying", "failed", "dead", "conflict")
_MOST: Final = 1_000  # rows; `status` reads ten times as many
_SHORTEST: Final = 1.0  # seconds; the shortest time between two reports of a worker from which a rate is computed

Look = Callable[[], Awaitable[Status]]


@verb(
    "top",
    argument("app", metavar="[APP]", required=False),
    option("--interval", type=Finite(0.5), default=2.0, metavar="S", help="Seconds between updates.  [default: 2]"),
    flag("--once", help="Print it once, as plain text."),
    ends=database,
)
async def top(given: Given) -> Output | None:
    """Watch handlers, queues, sagas, dead letters and workers live; q ends it.

    DONE/S counts deliveries with an outcome, and FAILED/S those that failed. Workers record their counts every twelve
    seconds, so these are averages over the last twelve seconds, or since a worker began. LAG counts messages that wait
    in Postgres queues and at brokers. Workers ask the brokers only with --ops-port; otherwise LAG has a question mark.
    """
    dsn, schema = given.database

    async def look() -> Status:
        return await read_status(dsn, schema, given.app, most=_MOST)

    if given.once:
        return Output(text=shown(screen(await look(), Rates())))
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigurationError("top needs a terminal; write --once, or use `idemconsumer status --json`")
    await _live(look, given.interval)
    return None


class Rates:
    """The rates of handlers per second, computed from the counts that workers report."""

    def __init__(self) -> None:
        self._words: dict[int, tuple[datetime, dict[str, dict[str, int]]]] = {}
        self._rates: dict[int, dict[str, tuple[float, float]]] = {}

    def of(self, workers: list[WorkerLine]) -> Mapping[tuple[str, str], tuple[float, float]]:
        """All outcomes and the failures per second, by app and handler, of live workers."""
        sums: defaultdict[tuple[str, str], tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
        for line in workers:
            if line.id is None or not line.live or line.seen_at is None or line.started_at is None:
                continue
            said = {name: dict(doing.outcomes) for name, doing in line.handlers.items()}
            at, before = self._words.get(line.id, (line.started_at, {}))
            if (seconds := (line.seen_at - at).total_seconds()) >= _SHORTEST:
                self._words[line.id] = line.seen_at, said
                self._rates[line.id] = {
                    name: _per_second(its, before.get(name, {}), seconds) for name, its in said.items()
                }
            for name, (done, failed) in self._rates.get(line.id, {}).items():
                all_done, all_failed = sums[line.app, name]
                sums[line.app, name] = all_done + done, all_failed + failed
        return sums


def _per_second(now: Mapping[str, int], before: Mapping[str, int], seconds: float) -> tuple[float, float]:
    more = {kind: count - before.get(kind, 0) for kind, count in now.items()}
    return sum(more.values()) / seconds, sum(more.get(kind, 0) for kind in _FAILURES) / seconds


def screen(status: Status, rates: Rates) -> list[Titled]:
    """The tables of `status`, with rates and lag for each handler."""
    _, *others = tables(status)
    per_second = rates.of(status.workers)
    lags: defaultdict[str, int] = defaultdict(int)
    unread: defaultdict[str, bool] = defaultdict(bool)
    for queue in status.queues:
        if queue.handler is not None:
            lags[queue.handler] += queue.waiting
            unread[queue.handler] |= queue.more
    rows = []
    for each in status.handlers:
        name = f"{each.app}/{each.handler}"
        done, failed = per_second.get((each.app, each.handler), (0.0, 0.0))
        lag = counted(lags[name] + sum(its.messages for its in each.lag.values()), status.most, unread[name])
        if any(source not in each.lag and not source.startswith("postgres:") for source in each.sources):
            lag += " + ?"
        busy, state = f"{each.running}/{each.lanes}", state_of(each, status.at)
        rows.append((name, f"{done:,.1f}", f"{failed:,.1f}", lag, busy, each.workers, state))
    title = f"handlers, {status.at:%Y-%m-%d %H:%M:%S %Z}"
    return [titled(title, "handler, done/s, failed/s, lag, busy, workers, state", rows), *others]


async def _live(look: Look, interval: float) -> None:
    try:
        from rich.console import Group
        from rich.live import Live
        from rich.table import Table
    except ImportError as missing:
        raise cannot_import("what `top` needs without --once", missing) from missing

    def drawn(found: list[Titled], error: str) -> Group:
        parts: list[Any] = []
        for title, (first, *rows) in found:
            made = Table(title=title, title_justify="left", box=None, header_style="bold", pad_edge=False)
            for name in first:
                made.add_column(name.upper(), no_wrap=name == "handler")
            for row in rows:
                made.add_row(*(cell.replace("[", r"\[") for cell in row))
            parts += [made, ""]
        return Group(*parts, error or "q: quit")

    rates, found, ended = Rates(), list[Titled](), asyncio.Event()
    with _keys(ended), Live(screen=True, auto_refresh=False) as live:
        while not ended.is_set():
            error = ""
            try:
                found = screen(await look(), rates)
            except IdemConsumerError as away:  # the last screen stays
                error = error_text(away)
            live.update(drawn(found, error), refresh=True)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(interval):
                    await ended.wait()


@contextlib.contextmanager
def _keys(ended: asyncio.Event) -> Iterator[None]:
    """Set `ended` when q is pressed. Keys are read one by one, and not echoed."""
    descriptor, loop = sys.stdin.fileno(), asyncio.get_running_loop()
    before = termios.tcgetattr(descriptor)

    def pressed() -> None:
        if (keys := os.read(descriptor, 1024)) == b"" or b"q" in keys.lower():
            ended.set()

    tty.setcbreak(descriptor)
    loop.add_reader(descriptor, pressed)
    try:
        yield
    finally:
        loop.remove_reader(descriptor)
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
