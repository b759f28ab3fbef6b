"""The stores behind the front door. Each is opened by the first request that needs it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal

from idemconsumer import forks
from idemconsumer.app.app import App
from idemconsumer.errors import ConfigurationError
from idemconsumer.hashing import HASHING
from idemconsumer.http.joined_request import Joined
from idemconsumer.http.leased_request import Leased
from idemconsumer.http.policy import Policy
from idemconsumer.logs import log
from idemconsumer.ports.observer import Point
from idemconsumer.ports.requests import RequestStore
from idemconsumer.redaction import SHOWN
from idemconsumer.settings import Settings
from idemconsumer.stores.joined import PostgresStore
from idemconsumer.stores.postgres_requests import PostgresRequests
from idemconsumer.stores.sharing import SHORT

if TYPE_CHECKING:  # the Redis driver is optional
    from idemconsumer.stores.redis.copies import Copies

KINDS: Final = ("postgres", "redis", "hybrid")
_GRACE: Final = 4.0  # seconds; shorter than a process waits at its exit for the stores to close
_CLOSING: Final[set[asyncio.Task[None]]] = set()


@dataclass(slots=True)
class _Stores:
    opening: asyncio.Lock = field(default_factory=asyncio.Lock)
    postgres: PostgresStore | None = None
    joined: Joined | None = None
    copies: Copies | None = None
    leased: Leased | None = None


class OpenedStores:
    """Opened stores belong to one process and one event loop; in another one they are opened anew (O26)."""

    def __init__(
        self,
        app: App,
        store: str | RequestStore,
        redis: str | None,
        at: Callable[[Point, str, Sequence[bytes]], None],
    ) -> None:
        if isinstance(store, str) and store not in KINDS:
            raise ConfigurationError(f"Idempotency: store={store!r}; write one of {', '.join(map(repr, KINDS))}")
        self._app = app
        self._store = store
        self._redis = redis
        self._at = at
        self._longest_run = 30.0
        self._stores = forks.PerLoop(_Stores, self._end)

    def expect(self, policy: Policy) -> None:
        """Announce a route that may get requests. Raises ConfigurationError if this store does not support it."""
        if policy.tx and self._store == "redis":
            raise ConfigurationError(
                f'route {policy.name!r}: tx=True needs its key in the transaction, but store="redis" keeps it '
                'elsewhere; write store="postgres" or store="hybrid"'
            )
        if policy.tx and policy.timeout is not None:
            self._longest_run = max(self._longest_run, policy.timeout)

    async def joined(self) -> Joined:
        """The store for routes with `tx`. Raises ConfigurationError or StoreUnavailable, as `leased` does."""
        here = self._stores.here()
        if here.joined is None:
            async with here.opening:
                if here.joined is None:
                    postgres = await self._open_postgres(here)
                    if self._store == "hybrid":
                        here.copies = await self._open_copies(postgres)
                    here.joined = Joined(postgres, self._at, here.copies)
        return here.joined

    async def leased(self) -> Leased:
        here = self._stores.here()
        if here.leased is None:
            async with here.opening:
                if here.leased is None:
                    here.leased = Leased(await self._open_requests(here), self._at)
        return here.leased

    async def requests(self) -> RequestStore:
        """The store in which leased routes keep their keys. Raises as `leased`."""
        return (await self.leased()).store

    async def _open_postgres(self, here: _Stores) -> PostgresStore:
        if here.postgres is None:
            settings = self._app.settings
            SHOWN.text = settings.log_error_text
            if settings.dsn is None:
                raise ConfigurationError("no database is given; set IDEMCONSUMER_DSN")
            here.postgres = await PostgresStore.open(
                settings.dsn,
                settings.schema,
                connections=settings.concurrency + 1,  # one for queries, which wait for no endpoint (H10)
                parties=[SHORT],
                hasty=True,
                kind="front-door",
                longest_run=self._longest_run,
                require_standby=settings.require_synchronous_standby,
            )
        return here.postgres

    async def _open_requests(self, here: _Stores) -> RequestStore:
        settings = self._app.settings
        if HASHING.secrets:  # R39
            if settings.dsn is None:
                raise ConfigurationError(
                    "Idempotency: `key_secrets` need a database: it has the data key with which all keys are hashed, "
                    "wherever they are stored; set IDEMCONSUMER_DSN, or remove them"
                )
            await self._open_postgres(here)
        if not isinstance(self._store, str):
            return self._store
        if self._store == "redis":
            from idemconsumer.stores.redis.redis_requests import RedisRequests  # an optional driver

            outage: Literal["closed", "open"] = "open" if settings.redis_outage == "open" else "closed"
            return RedisRequests(self._redis_address(settings), outage=outage, replicas=settings.redis_replicas)
        postgres = await self._open_postgres(here)
        assert settings.dsn is not None
        requests = PostgresRequests.on(postgres.pool, settings.dsn, settings.schema, longest_run=self._longest_run)
        if self._store == "postgres":
            return requests
        from idemconsumer.stores.hybrid import HybridRequests

        return HybridRequests(requests, await self._open_copies(postgres))

    async def _open_copies(self, postgres: PostgresStore) -> Copies:
        from idemconsumer.stores.redis.copies import Copies

        return Copies(self._redis_address(self._app.settings), await postgres.pool.born())

    def _redis_address(self, settings: Settings) -> str:
        if (address := self._redis or settings.redis) is None:
            raise ConfigurationError(
                f'Idempotency: store={self._store!r} needs an address; set IDEMCONSUMER_REDIS, or write redis="redis://…"'
            )
        return address

    async def close(self) -> None:
        """Close what was opened in this loop. Requests that still run under a key get a few seconds. After that they
        keep their keys, and the stores are closed once they have ended; if the process exits before, their leases
        expire (H14)."""
        here = self._stores.forget() or _Stores()
        async with here.opening:  # a store that is being opened now is closed too
            pass
        leased = here.leased
        if leased is None or await leased.ended(_GRACE):
            await _close(here)
            return
        log.warning("requests still run and keep their keys, closing the store after them")

        async def close_behind() -> None:
            await leased.ended()
            await _close(here)

        closing = asyncio.create_task(close_behind())
        _CLOSING.add(closing)
        closing.add_done_callback(_CLOSING.discard)

    async def _end(self, here: _Stores) -> None:
        """The loop ends, and all its tasks have been cancelled. If a thread still works for a request, its key is
        kept and everything stays open (H14). A store that the user passed in stays open too, since other loops may
        use it."""
        if here.leased is None or await here.leased.ended(0):
            await _close(here, its=isinstance(self._store, str))


async def _close(here: _Stores, *, its: bool = True) -> None:
    """`its`: close the store of leased routes too."""
    requests = here.leased.store if here.leased is not None and its else None
    async with AsyncExitStack() as stack:
        for each in (here.postgres, requests, here.copies):  # closed in reverse order
            if each is not None:
                stack.push_async_callback(each.close)
