"""The sessions that handlers run in: the settings requested for them, and the check that they are in force (R17).

A direct session gets them as startup options, which a handler's RESET ALL does not undo. A pooler such as PgBouncer
does not pass them on: there the role must carry the same settings (R18), and nothing is prepared, since the next
transaction may run in another session of the server.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.pq.abc import PGresult

from idemconsumer.errors import ConfigurationError
from idemconsumer.sql.connecting import (
    ADAPTERS,
    EXACT,
    HELD,
    NAME,
    RESTING,
    OwnCursor,
    asked_for,
    is_pooled,
    lost,
    parameters,
    refusal,
    takes_no_settings,
    with_settings,
    without_settings,
)
from idemconsumer.stores.connection import Connection
from idemconsumer.stores.literals import written

LOCK_TIMEOUT: Final = "10s"  # backstop only: because of the advisory lock a claim never waits
_LOST_CLIENT: Final = "5s"
_MOST: Final = 3_600.0  # seconds; a longer time until a key is free counts as no limit
_SLACK: Final = 5.0
OLDEST: Final = 140_000  # the oldest Postgres that has all requested settings
_PREPARE_THRESHOLD: Final = 2  # lower than psycopg's: a rollback drops all prepared statements

_IDLE: Final = "idle_in_transaction_session_timeout"
_WHOLE: Final = "transaction_timeout"  # since Postgres 17; older ones refuse it

_REPORTED: Final = (
    *(b"client_encoding", b"DateStyle", b"default_transaction_read_only", b"IntervalStyle"),
    *(b"standard_conforming_strings", b"TimeZone"),
)
_TOLD: Final = ("application_name", "client_encoding", "DateStyle", "TimeZone")

_SETTINGS: Final = """
select name, pg_catalog.concat(setting, unit) from pg_catalog.pg_settings
where name operator(pg_catalog.=) any (pg_catalog.string_to_array(%(names)s, ','))
union all select ' role', session_user::text
union all select ' database', pg_catalog.current_database()::text
union all select ' path', pg_catalog.array_to_string(pg_catalog.current_schemas(false), ',')
union all select ' standby', pg_catalog.pg_is_in_recovery()::text
"""


@dataclass(frozen=True, slots=True)
class _Bound:
    """The value that is requested, and the range in seconds in which another value will do."""

    asked: str
    least: float = 0.0
    most: float = _MOST

    def holds(self, value: str) -> bool:
        seconds = int(value.removesuffix("ms")) / 1000
        return seconds > 0 and self.least <= seconds <= self.most


class PoolSession(Connection):
    """A connection of the pool. `pooled`: a pooler may use another session of the server for each transaction."""

    pooled = False
    again = b""  # sent after RESET ALL, which in a pooler's session undoes what the pooler has set for us (R18)
    taken_at, taken_by = 0.0, ""  # when it was checked out, and by which party (`sharing.PARTY`)
    state = ""  # the state in which transactions must begin (J25), as last reported; empty before the first one
    _reported: Sequence[bytes | None] = ()  # and the parameters that the server reports by itself
    _told = 0  # the pid of the server's process, as reported to the open transaction

    @property
    def server_pid(self) -> int:
        """The process that runs the transaction which the engine opened last. A pooler reports pids of its own."""
        return self._told if self.pooled else self.info.backend_pid

    def opened(self, answer: PGresult) -> bool:
        """The engine's transaction was opened; the last columns of the answer are the session's state and the pid.
        Returns whether the session is unchanged."""
        if self.pooled:
            self._told = int(answer.get_value(0, answer.nfields - 1) or 0)
        state = (answer.get_value(0, answer.nfields - 2) or b"").decode()
        reports = self._reports()
        same = not self.state or (self.state == state and self._reported == reports)
        self.state, self._reported = state, reports
        return same

    @property
    def as_reported(self) -> bool:
        """Whether the parameters that the server reports with its answers are unchanged."""
        return not self.state or self._reports() == self._reported

    def _reports(self) -> Sequence[bytes | None]:
        return [self.pgconn.parameter_status(name) for name in _REPORTED]

    @classmethod
    async def connect(cls, conninfo: str = "", **more: Any) -> PoolSession:
        """See `psycopg.AsyncConnection.connect`; without settings if a pooler refuses them. `failed`, if given, is
        called with the error of a failed attempt, which a pool does not report."""
        failed: Callable[[psycopg.OperationalError], None] | None = more.pop("failed", None)
        try:
            return await super().connect(conninfo, **more)
        except psycopg.OperationalError as error:
            if not takes_no_settings(error):
                if failed is not None:
                    failed(error)
                raise
        return await super().connect(without_settings(conninfo), **more)


class SessionRules:
    """The settings that a session of the pool must have.

    `longest_run` is the longest handler timeout, in seconds; with a `lease` no transaction may be idle for longer than
    that (L5). `beside`: the lease of sagas that run in other sessions of the same role; behind a pooler all of them
    have to share one value (R18).
    """

    def __init__(self, dsn: str, longest_run: float, lease: float | None, beside: float | None = None) -> None:
        run = longest_run + _SLACK
        self._idle = idle = run if lease is None else min(run, lease)
        most = max(run, _MOST)
        self._bounds = {  # J6: the server limits every transaction in time
            _IDLE: _Bound(_ms(idle), min(longest_run, idle), lease or most),
            "statement_timeout": _Bound(_ms(run), longest_run, most),
            "lock_timeout": _Bound(LOCK_TIMEOUT),
            "client_connection_check_interval": _Bound(_LOST_CLIENT),
        }
        self._longest_run, self._beside = longest_run, beside
        self._exact = EXACT | {"default_transaction_read_only": "on"}  # J7: only our BEGIN may write
        self._asked = asked_for(dsn, [*self._bounds, *self._exact, *RESTING])
        bounds = {name: bound.asked for name, bound in self._bounds.items()}
        self.conninfo = _conninfo(dsn, bounds | self._exact | RESTING)

    async def connect(self) -> PoolSession:
        """Connect as the pool does, for statements of ours only. Raises psycopg.OperationalError, or as `prepare`."""
        connection = await PoolSession.connect(self.conninfo, context=ADAPTERS)
        try:
            await self.prepare(connection)
        except BaseException:
            await connection.close()
            raise
        return connection

    async def prepare(self, connection: PoolSession) -> None:
        """Make a new connection ready. Raises ConfigurationError if one of our rules would not hold on it."""
        # J7: only the engine sends BEGIN. A handler's statements after a ROLLBACK of its own are each on their own, and
        # read-only.
        await connection.set_autocommit(True)
        connection.prepare_threshold = None
        found = await self._read(connection)
        if connection.info.server_version < OLDEST or found[" standby"] == "true":
            return  # `check_database` reports it at the start; a server that becomes a standby later is an outage
        try:
            connection.pooled = await is_pooled(connection)
        except psycopg.errors.ProtocolViolation as error:
            raise ConfigurationError(
                f"database: a pooler refuses transactions ({error.diag.message_primary}); "
                "set pool_mode = transaction or session"
            ) from error
        lacking = self._lacking(found)
        if connection.pooled and self._beside is not None and self._beside < self._longest_run:
            raise ConfigurationError(
                f"database: the shortest lease of sagas, {self._beside:g} s, is below the longest timeout of a "
                f"handler, {self._longest_run:g} s, and behind a pooler, one {_IDLE} of the role applies to both; "
                "raise that lease, lower that timeout, or write the server's own address"
            )
        gone = await self._lost(connection)
        if lacking := {name: self._asked[name] for name in gone} | lacking:
            shown = found | {"search_path": found[" path"]} | gone
            raise refusal(found[" role"], found[" database"], lacking, shown, pooled=connection.pooled)
        if connection.pooled:
            connection.again = _again(connection)
        else:
            connection.prepare_threshold = _PREPARE_THRESHOLD

    async def _read(self, connection: PoolSession) -> dict[str, str]:
        others = ("session_replication_role", "client_encoding", _WHOLE)
        names = ",".join([*self._bounds, *self._exact, *others])
        cursor = await OwnCursor(connection).execute(_SETTINGS, {"names": names})
        return dict(await cursor.fetchall())

    async def _lost(self, connection: PoolSession) -> dict[str, str]:
        """The settings that the address requests and a pooler dropped (R18), with the values in force instead."""
        if not self._asked or not connection.pooled:  # on a direct session, startup options override the role's
            return {}
        return lost(await (await OwnCursor(connection).execute(HELD, parameters(self._asked))).fetchall())

    def _lacking(self, found: Mapping[str, str]) -> dict[str, str]:
        """The settings that are not in force, with the values that they should have."""
        wrong = {name: bound.asked for name, bound in self._bounds.items() if not bound.holds(found[name])}
        if _IDLE in wrong and self._beside is not None:
            wrong[_IDLE] = _ms(min(self._idle, self._beside))
        wrong |= {name: value for name, value in self._exact.items() if found[name] != value}
        if found["client_encoding"] != "UTF8":
            wrong["client_encoding"] = "UTF8"
        if found["session_replication_role"] == "replica":  # the guard's trigger would not fire (J3)
            wrong["session_replication_role"] = "origin"
        if 0 < int(found.get(_WHOLE, "0ms").removesuffix("ms")) < self._longest_run * 1000:
            wrong[_WHOLE] = "0"
        path = found[" path"].split(",")
        if "pg_catalog" in path[1:]:  # other schemas' functions and operators would take precedence (J17)
            wrong["search_path"] = ", ".join(f'"{name}"' for name in path if name != "pg_catalog")
        return wrong


def _again(connection: PoolSession) -> bytes:
    """A statement that sets again what libpq requested at connect and a pooler passes on: PGTZ, PGDATESTYLE, and the
    address's own settings."""
    values = {name: connection.pgconn.parameter_status(name.encode()) for name in _TOLD}
    settings = [
        written(
            b"pg_catalog.set_config(%(name)s, %(value)s, false)", {"name": name, "value": value.decode()}, connection
        )
        for name, value in values.items()
        if value
    ]
    return b"; select " + b", ".join(settings) if settings else b""


def _conninfo(dsn: str, settings: Mapping[str, str]) -> str:
    """The DSN with these settings, and with those by which a peer that is gone is noticed (R21)."""
    defaults: dict[str, str | int] = {
        "connect_timeout": 5,
        "tcp_user_timeout": 30_000,
        "keepalives_idle": 10,
        "keepalives_interval": 5,
        "keepalives_count": 3,
        "fallback_application_name": NAME,
    }
    given = conninfo_to_dict(dsn)
    missing = {name: value for name, value in defaults.items() if name not in given}
    return make_conninfo(with_settings(dsn, settings), client_encoding="UTF8", **missing)


def _ms(seconds: float) -> str:
    return f"{int(seconds * 1000)}ms"
