"""JoinedStore on Postgres 14 and newer: claims in the transaction of their effects, and the small commits beside."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager

from idemconsumer.errors import Contention
from idemconsumer.message.headers import encode_headers, with_origin
from idemconsumer.message.message import Message, StoredResult
from idemconsumer.ports.store import Claim, DeadLetter
from idemconsumer.rules.values import Mark, Record, State
from idemconsumer.stores.answers import records
from idemconsumer.stores.checks import check_database
from idemconsumer.stores.claims import PostgresClaims, transaction
from idemconsumer.stores.literals import clean
from idemconsumer.stores.pool import Pool


class PostgresStore:
    """See `ports.JoinedStore`. `open` refuses a database that would lose what it acknowledges (R6)."""

    def __init__(self, pool: Pool, most_locks: int) -> None:
        self.pool = pool
        self.most_locks = most_locks

    @classmethod
    async def open(
        cls, dsn: str, schema: str, *, connections: int, longest_run: float, lease: float | None = None
    ) -> PostgresStore:
        """Check and open; see `Pool` for the parameters.

        Raises ConfigurationError (see `check_database`) or StoreUnavailable.
        """
        most_locks = await check_database(dsn, schema)
        pool = Pool(dsn, schema, connections=connections, longest_run=longest_run, lease=lease)
        await pool.open()
        return cls(pool, most_locks)

    async def close(self) -> None:
        await self.pool.close()

    def transaction(self, *, group: int, gate: str | None = None) -> AbstractAsyncContextManager[PostgresClaims]:
        return transaction(self.pool, group=group, gate=gate)

    async def peek(self, keys: Sequence[bytes]) -> list[Record | None]:
        found = records(await self.pool.alone("read", {"keys": list(keys)}), keys)
        return [found.get(key) for key in keys]

    # --------------------------------------------------------------------------------------------------------- attempts
    async def mark_attempts(self, claims: Sequence[Claim]) -> set[bytes]:
        async with self.pool.connection() as connection:
            scopes = await self.pool.scope_ids(connection, claims)
            params = {"keys": [claim.key for claim in claims], "scopes": scopes}
            return {row[0] for row in await self.pool.run(connection, "mark_attempts", params)}

    async def unmark_attempts(self, keys: Sequence[bytes]) -> None:
        # A plan kept from when the table was small would be a scan of all of it (G5), and this is rare.
        await self.pool.alone("unmark_attempts", {"keys": list(keys)}, prepare=False)

    async def count_attempt(self, claim: Claim, error: str | None) -> int:
        async with self.pool.connection() as connection:
            (scope,) = await self.pool.scope_ids(connection, [claim])
            params = {"key": claim.key, "scope": scope, "error": None if error is None else clean(error)}
            return int((await self.pool.run(connection, "count_attempt", params))[0][0])

    async def uncount_attempt(self, claim: Claim) -> None:
        await self.pool.alone("uncount_attempt", {"key": claim.key})

    async def note_error(self, claim: Claim, error: str) -> int:
        rows = await self.pool.alone("note_error", {"key": claim.key, "error": clean(error)})
        return int(rows[0][0]) if rows else await self.count_attempt(claim, error)

    # ---------------------------------------------------------------------------------------------- ends and hand-overs
    async def take_over(self, queue: str, message: Message) -> None:
        headers = encode_headers(with_origin(message).headers).decode()
        await self.pool.alone("enqueue", {"name": queue, "body": message.body, "key": None, "headers": headers})

    async def reject(self, claim: Claim, rejection: StoredResult) -> Record | None:
        return await self._finalise(claim, State.FAILED, rejection, None)

    async def bury(self, letter: DeadLetter, claim: Claim | None) -> Record | None:
        return await self._finalise(claim, State.DEAD, None, letter)

    async def count_dead(self, key: bytes) -> None:
        await self.pool.alone("count_dead", {"key": key})

    async def _finalise(
        self, claim: Claim | None, state: State, result: StoredResult | None, letter: DeadLetter | None
    ) -> Record | None:
        async with self.transaction(group=1) as claims:
            if claim is not None:
                (found,) = await claims.claim([claim], state=state)
                if found is Mark.BUSY:
                    raise Contention("a rival holds the key")
                if isinstance(found, Record):
                    return found
            if letter is not None:
                await claims.write_letter(letter, None if claim is None else claim.key)
            results = [] if claim is None or result is None else [(claim.key, result)]
            await claims.complete(results, [] if claim is None else [claim.key])
            return None
