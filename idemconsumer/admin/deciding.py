"""The transactions in which a person decides: those of the store, with its guard, its seal and its checked COMMIT."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from idemconsumer.brokers.publishers import Publishers
from idemconsumer.errors import Contention, StoreUnavailable
from idemconsumer.sql.queries import in_words
from idemconsumer.stores.claims import PostgresClaims, transaction
from idemconsumer.stores.hashing import settle_hashing
from idemconsumer.stores.pool import Pool

_LONGEST: Final = 30.0  # seconds; it runs no handler, and waits for a lock no longer than any claim does


class Deciding:
    """Of one schema. Calls at the same time share a few connections, and none is kept (L57)."""

    def __init__(self, dsn: str, schema: str) -> None:
        self._dsn = dsn
        self._schema = schema
        self._pools = Publishers(self._pool)

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[PostgresClaims]:
        """One that has begun, and that the caller completes. Raises StoreUnavailable, also while others hold a lock,
        and ConfigurationError when the schema is not migrated."""
        async with self._pools.one() as pool:
            try:
                with in_words(self._schema):
                    async with transaction(pool, group=1) as claims:
                        await claims.begin()
                        yield claims
            except Contention as error:  # a rival holds a lock: nothing was written, so it can be done again
                raise StoreUnavailable(str(error)) from error

    async def _pool(self) -> Pool:
        """Of one connection, for one caller at a time."""
        pool = Pool(self._dsn, self._schema, connections=1, longest_run=_LONGEST)
        await pool.open()
        try:
            await settle_hashing(pool, self._schema)
        except BaseException:
            await pool.close()
            raise
        return pool
