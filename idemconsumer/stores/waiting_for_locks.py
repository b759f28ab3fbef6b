"""How a migration waits for its locks: for a short time, again and again (R32).

A request that waits for a table's lock makes all later ones queue behind it, also those that the present holder would
not block. So a report that reads for an hour, with an ALTER TABLE waiting for its end, would stop all workers for an
hour.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from itertools import count
from typing import Any, Final, TypeVar

import psycopg

from idemconsumer.errors import ConfigurationError, LockNotGiven, StoreUnavailable
from idemconsumer.rules.backoff import backoff

T = TypeVar("T")

LOCKS: Final = 300.0
"""Seconds within which a run must get all of its locks, unless another limit is given."""

# Longer than deadlock_timeout: only after that does the server end an autovacuum that is in the way.
_SHORTLY: Final = """
select pg_backend_pid(), set_config('statement_timeout', '0', true), set_config('lock_timeout',
    (least(extract(epoch from current_setting('deadlock_timeout')::interval), 5) * 1000 + 500)::int::text, true)
"""
_HOLDERS: Final = """
select case w.locktype when 'relation' then 'the lock on ' || w.relation::regclass
                       when 'advisory' then 'another migration' else 'a lock' end,
    h.pid, a.usename, coalesce(nullif(a.application_name, ''), a.backend_type), a.state,
    to_char(a.xact_start, 'YYYY-MM-DD HH24:MI:SS TZ')
from pg_locks as w
cross join unnest(pg_blocking_pids(w.pid)) as h (pid)
left join pg_stat_activity as a on a.pid = h.pid
where w.pid = %s and not w.granted
order by a.xact_start limit 3
"""
_LOOKS: Final = 0.3  # seconds between two queries for the lock's holder

Connect = Callable[[], AbstractContextManager[psycopg.Connection[Any]]]


class _Kept(Exception):
    """A lock was not granted in the short time; the text says which lock, and which session holds it."""


class LockWaiting:
    """A limit in seconds for all waiting together. `say` is called with a text for each wait."""

    def __init__(self, seconds: float, say: Callable[[str], None]) -> None:
        self._seconds = seconds
        self._left = seconds
        self._say = say
        self._said = ""
        self._tries = 0

    def for_locks(self, attempt: Callable[[], T]) -> T:
        """The attempt's result, once it gets its locks. Raises LockNotGiven when the time is over."""
        for number in count(1):
            began = time.monotonic()
            try:
                return attempt()
            except _Kept as kept:
                self._left -= time.monotonic() - began
                if self._left <= 0:
                    raise LockNotGiven(
                        f"lock not granted within {self._seconds:g} s: {kept}; run this again with a longer --wait, "
                        "or end that session"
                    ) from kept
                pause = self._pause(number, first=1.0, cap=15.0)
                self._say(f"waiting for {kept}; next try in {pause:.1f} s")
                time.sleep(pause)
        raise AssertionError("count() has no end")

    def counted(self, connecting: Callable[[], T]) -> T:
        """The result of `connecting`. The time that it takes counts as waiting for the server."""
        began = time.monotonic()
        try:
            return connecting()
        finally:
            self._left -= time.monotonic() - began

    def for_server(self, error: StoreUnavailable) -> None:
        """Return when the next attempt is due. Raises the error when the time is over."""
        if self._left <= 0:
            raise error
        if (text := str(error)) != self._said:
            self._said = text
            self._say(f"waiting: {text}")
        self._tries += 1
        time.sleep(self._pause(self._tries, first=0.25, cap=5.0))

    def _pause(self, number: int, *, first: float, cap: float) -> float:
        pause = min(self._left, backoff(number, first=first, factor=1.6, cap=cap, jitter=random.random()))
        self._left -= pause
        return pause


@contextmanager
def asking_shortly(connection: psycopg.Connection[Any], connect: Connect) -> Iterator[None]:
    """Limit, inside the open transaction, the wait for each lock to a short time. `connect` opens a second connection,
    which queries who holds the lock."""
    row = connection.execute(_SHORTLY).fetchone()
    assert row is not None
    try:
        with _looking(connect, row[0]) as holders:
            yield
    except (psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected) as error:
        raise _Kept(_in_words(holders) or str(error).partition("\n")[0]) from error


@contextmanager
def _looking(connect: Connect, pid: int) -> Iterator[list[tuple[Any, ...]]]:
    """Yields the sessions that keep this process of the server waiting, as last seen."""
    seen: list[tuple[Any, ...]] = []
    over = threading.Event()

    def look() -> None:
        if over.wait(_LOOKS):
            return
        # The query may fail, come too late, or show nothing to this role: then no holder is named.
        with suppress(psycopg.Error, StoreUnavailable, ConfigurationError), connect() as second:
            while not over.is_set():
                seen[:] = second.execute(_HOLDERS, [pid]).fetchall() or seen
                over.wait(_LOOKS)

    thread = threading.Thread(target=look, name="idemconsumer-locks", daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()


def _in_words(holders: list[tuple[Any, ...]]) -> str:
    said = []
    for _, pid, user, program, state, since in holders:
        known = ", ".join(each for each in (user, program, state) if each)
        said.append(f"pid {pid}{f' ({known})' if known else ''}{f' since {since}' if since else ''}")
    return f"{holders[0][0]}, held by {' and '.join(said)}" if said else ""
