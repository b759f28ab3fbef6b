"""Records which process is reading a delivery that may have killed a worker, while it does so (B17).

The row of such a delivery names its reader, by a number on which the reader holds an advisory lock in an open
transaction. The lock ends with the reader, however that ends, so a row whose number is not locked was left by a dead
one.

The row must be committed before the reading begins, and the lock be held from before that commit until the row is gone.
One message to the server does both: it takes the lock for the session, commits, opens the next transaction, and moves
the lock to that. A pooler hands a session to another client only between two messages, so this holds behind PgBouncer
too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import psycopg
from psycopg.pq.abc import PGresult

from idemconsumer.rules.claim import Claim
from idemconsumer.stores.answers import loaded
from idemconsumer.stores.pool import Pool, cause_of
from idemconsumer.stores.session import PoolSession


class PostgresReading:
    """Deliveries that are recorded as being read by this process. Until this is left, the lock shows others that it is
    alive (B17).

    `ours`: those that this process reads now. `begun`: those that a reader began which is gone; all others are being
    read by a rival (another worker). `attempts`: for a delivery that is read alone, how many times its reading was
    begun, including this one, without those that a process takes over from itself.
    """

    def __init__(self, pool: Pool, connection: PoolSession, reader: int) -> None:
        self._pool = pool
        self._connection = connection
        self._reader = reader
        self.ours: set[bytes] = set()
        self.begun: set[bytes] = set()
        self.attempts = 0

    async def begin(self, claims: Sequence[Claim]) -> None:
        scopes = await self._pool.scope_ids(self._connection, claims)
        params = {"keys": [claim.key for claim in claims], "scopes": scopes, "reader": self._reader}
        rows = await self._commit_and_hold(["begin_reading", "readers"], params)
        self.ours = {key for key, ours, _ in rows if ours}
        self.begun = {key for key, ours, gone in rows if gone and not ours}

    async def take_over(self, claim: Claim) -> None:
        params = {"key": claim.key, "reader": self._reader, "own": list(self._pool.readers)}
        for (count,) in await self._commit_and_hold(["take_over_reading"], params):
            self.ours, self.attempts = {claim.key}, count
        if not self.ours:
            self._pool.readers.discard(self._reader)

    async def end(self) -> None:
        """Delete the records of `ours`. After an error `PostgresStore.end_reading` does so."""
        if self.ours:
            params = {"keys": list(self.ours), "reader": self._reader}
            await self._send([self._written("end_reading", params), *self._pool.standby, b"COMMIT"])
        self._pool.readers.discard(self._reader)

    async def _commit_and_hold(self, names: Sequence[str], params: dict[str, object]) -> list[tuple[Any, ...]]:
        """Return the rows of the last of these statements, once they are committed and the lock is held."""
        self._pool.readers.add(self._reader)
        begin = self._pool.queries["begin"]
        first = [begin, *(self._written(name, params) for name in names)]
        lock, hold = (self._written(name, {"reader": self._reader}) for name in ("lock_reader", "hold_reader"))
        self._connection.changed = True  # a message that fails halfway may leave the session with the lock
        answers = await self._send([*first, *self._pool.standby, lock, b"COMMIT", begin, hold])
        self._connection.changed = False
        return loaded(self._connection, answers[len(first) - 1])

    async def _send(self, statements: Sequence[bytes]) -> list[PGresult]:
        try:
            return await self._connection.simple(b"; ".join(statements))
        except psycopg.Error as error:
            raise cause_of(self._connection, error) from error

    def _written(self, name: str, params: dict[str, object]) -> bytes:
        return self._pool.written(self._connection, name, params)
