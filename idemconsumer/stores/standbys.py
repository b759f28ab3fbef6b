"""Which standbys have a commit before it is acknowledged (R22).

With asynchronous standbys alone a failover loses what was acknowledged last: record, effects and result, while the
broker has already deleted the message. `check` says so, and `require_synchronous_standby` refuses to run like that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import psycopg

from idemconsumer.errors import ConfigurationError, StoreUnavailable
from idemconsumer.redaction import error_text
from idemconsumer.sql.connecting import connect_async

WAITING: Final = ("on", "remote_apply")  # of synchronous_commit: COMMIT waits until a standby has flushed it
_REMEDY: Final = (
    "ALTER SYSTEM SET synchronous_standby_names = 'ANY 1 (*)'; ALTER SYSTEM SET synchronous_commit = on; "
    "SELECT pg_reload_conf()"
)

SETTINGS: Final = "select current_setting('synchronous_standby_names'), current_setting('synchronous_commit')"
# A standby, also one that is away but has a slot. No consumer of logical replication, and no backup under way. Only
# members of pg_read_all_stats see a standby's state; the others see that it is there.
_STANDBYS: Final = """
select count(*), count(*) filter (where sync_state in ('sync', 'quorum')), count(*) filter (where seen)
from (
    select r.sync_state, r.state is not null as seen from pg_stat_replication r
    where r.state is distinct from 'backup'
      and not exists (select from pg_replication_slots s where s.active_pid = r.pid and s.slot_type = 'logical')
    union all
    select null, true from pg_replication_slots where slot_type = 'physical' and not active
) as standbys
"""


@dataclass(frozen=True)
class Durability:
    """What a commit outlives, and what a person should know about it."""

    commits: str
    warning: str | None = None


async def refuse_unless_synchronous(connection: psycopg.AsyncConnection[Any]) -> None:
    """Raise ConfigurationError where COMMIT does not wait for a synchronous standby."""
    names, level = await _row(connection, SETTINGS)
    if not names or level not in WAITING:
        raise ConfigurationError(
            "database: require_synchronous_standby is set, and COMMIT waits for no synchronous standby "
            f"(synchronous_standby_names = {names!r}, synchronous_commit = {level}); run: {_REMEDY}"
        )


async def durability(dsn: str) -> Durability:
    """Raises StoreUnavailable."""
    try:
        async with await connect_async(dsn, connect_timeout=5) as connection:
            names, level = await _row(connection, SETTINGS)
            return judged(names, level, *await _row(connection, _STANDBYS))
    except psycopg.Error as error:
        raise StoreUnavailable(f"the database does not answer: {error_text(error)}") from error


def judged(names: str, level: str, standbys: int, synchronous: int, seen: int) -> Durability:
    """`standbys`: how many there are; of how many the state can be `seen`, and how many are `synchronous`."""
    if names and level in WAITING:
        waits = "each commit waits for a synchronous standby"
        if synchronous:
            return Durability(waits)
        if standbys > seen:
            return Durability(
                waits,
                "this role cannot see whether a synchronous standby is connected, and without one each COMMIT "
                "hangs; run: GRANT pg_read_all_stats TO this role",
            )
        return Durability(
            waits,
            f"no standby of synchronous_standby_names = {names!r} is connected, so each COMMIT hangs until one is",
        )
    if not standbys:
        return Durability("commits are durable")
    why = f"synchronous_commit is {level}" if names else "its standbys are asynchronous"
    return Durability(
        "commits survive a crash of this server",
        f"{why}: a failover loses the last acknowledged messages for good, since the broker has deleted them; "
        f"run: {_REMEDY}, and set require_synchronous_standby",
    )


async def _row(connection: psycopg.AsyncConnection[Any], query: str) -> tuple[Any, ...]:
    row: tuple[Any, ...] | None = await (await connection.execute(query.encode())).fetchone()
    assert row is not None
    return row
