"""COMMITs that the server does not answer because no synchronous standby confirms them (R23)."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

import psycopg

from idemconsumer.duty import Duty
from idemconsumer.errors import ConfigurationError
from idemconsumer.logs import log
from idemconsumer.sql.connecting import connect_async
from idemconsumer.stores.connection import Connection
from idemconsumer.stores.session import PoolSession

_ASK_EVERY: Final = 5.0
_PATIENCE: Final = 5.0
_WAITING: Final = "select pid from pg_stat_activity where pid = any(%s) and wait_event = 'SyncRep'"


class SlowCommits:
    """The slow commits of one pool.

    While the server reports, on another connection, that a COMMIT waits for a standby, its deadline (R20) does not
    count: each COMMIT that is given up would leave a server process behind that keeps waiting, until no connection is
    left for any client. It is logged once, and once more when it is over.
    """

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._slow: set[PoolSession] = set()
        self._hanging = False
        self._asking = Duty(self._ask)

    def add(self, connection: Connection) -> None:
        """The COMMIT on this connection has had no answer for seconds."""
        if isinstance(connection, PoolSession):
            self._slow.add(connection)
        self._asking.start()

    async def close(self) -> None:
        await self._asking.close()

    async def _ask(self) -> float | None:
        if not self._slow:
            return None
        try:
            self._slow = await self._waiting({each for each in self._slow if not each.closed})
        except (psycopg.Error, ConfigurationError) as error:  # nothing is known: the deadlines decide
            log.debug("could not check what commits wait for", error=type(error).__name__)
        else:
            self._tell(len(self._slow))
            for connection in self._slow:
                connection.heard()
        return _ASK_EVERY

    async def _waiting(self, slow: Collection[PoolSession]) -> set[PoolSession]:
        pids = {connection.server_pid: connection for connection in slow}
        async with await connect_async(self._dsn, connect_timeout=5) as other:
            other.patience = _PATIENCE
            rows = await (await other.execute(_WAITING, [list(pids)])).fetchall()
        return {pids[pid] for (pid,) in rows}

    def _tell(self, lanes: int) -> None:
        if lanes and not self._hanging:
            log.error(
                "commits wait for a synchronous standby",
                lanes=lanes,
                to_do="start a standby that synchronous_standby_names names, or change that setting: "
                "waiting transactions then commit without a standby",
            )
        elif self._hanging and not lanes:
            log.info("commits no longer wait for a synchronous standby")
        self._hanging = bool(lanes)
