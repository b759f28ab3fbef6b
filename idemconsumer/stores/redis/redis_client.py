"""A client for each kind of address: one server, one behind Sentinels, a cluster."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, Final, Protocol, cast
from urllib.parse import parse_qsl, urlencode, urlunsplit

from idemconsumer.addresses import is_cluster, redis_urls
from idemconsumer.errors import ConfigurationError
from idemconsumer.missing import cannot_import

try:
    from redis.asyncio import Redis
    from redis.asyncio.cluster import ClusterNode, RedisCluster
    from redis.asyncio.connection import Connection, parse_url
    from redis.asyncio.retry import Retry
    from redis.asyncio.sentinel import Sentinel
    from redis.backoff import NoBackoff
except ImportError as missing:
    raise cannot_import("redis: its client library", missing) from missing

_UNKNOWN: Final = "settings: `redis` has an option that the client does not know"
SECONDS: Final = 2.0  # for a connection, and for an answer
_NEAR: Final = 1.0  # seconds, for a replica's: its address may be reachable from its primary only
_SILENT: Final = 60.0  # seconds for which an unreachable replica is not asked again


class RedisClient(Protocol):
    """The part of redis-py's clients that is used."""

    def execute_command(self, *args: Any, **options: Any) -> Awaitable[Any]: ...
    def pipeline(self, *, transaction: bool) -> Any: ...
    def info(self, section: str, **options: Any) -> Awaitable[Any]: ...
    def scan_iter(self, *, match: bytes, count: int) -> AsyncIterator[bytes]: ...


class _Ours:
    """A connection that is counted, and reads its certificate each time it connects; redis-py does so once (R47)."""

    made: Callable[[], None]

    async def _connect(self) -> None:
        self.made()
        await super()._connect()  # type: ignore[misc]

    def _connection_arguments(self) -> Any:
        if (tls := getattr(self, "ssl_context", None)) is not None:
            tls.context = None
        return super()._connection_arguments()  # type: ignore[misc]


class Redises:
    """The client, and what has to be closed with it. Connects at the first use."""

    def __init__(self, address: str, *, seconds: float = SECONDS) -> None:
        """Raises ConfigurationError for an invalid address, without quoting any of it."""
        urls = redis_urls(address)
        self.cluster = is_cluster(address)
        self.made = 0  # connections, also to other servers that have taken over (H28)
        self._silent: dict[tuple[str, int], float] = {}  # unreachable replicas, and until when they are not asked again
        self._others: list[Any] = []
        # No retries by the client: whether a command may be repeated is decided here.
        common: dict[str, Any] = {
            "socket_timeout": seconds, "socket_connect_timeout": seconds, "retry": Retry(NoBackoff(), 0),
            "client_name": "idemconsumer",
        }  # fmt: skip
        scheme = urls[0].scheme
        query = dict(parse_qsl(urls[0].query))
        sentinel = {
            name: query.pop(f"sentinel_{name}") for name in ("username", "password") if f"sentinel_{name}" in query
        }
        path = [part for part in urls[0].path.split("/") if part]
        service = path.pop(0) if scheme.startswith("sentinel") and path else ""
        kind = "rediss" if scheme in ("rediss", "sentinels", "clusters") else "redis"
        try:
            of_one = [parse_url(urlunsplit((kind, url.netloc, "/".join(path), urlencode(query), ""))) for url in urls]
        except ValueError:
            raise ConfigurationError(_UNKNOWN) from None
        tls: dict[str, Any] = {"ssl": True} if kind == "rediss" else {}
        servers = [(str(each.pop("host")), int(each.pop("port", 26379 if service else 6379))) for each in of_one]
        of_one[0].pop("connection_class", None)
        try:
            self._options = {**of_one[0], **tls, **common}
            self.client = self._made(service, servers, sentinel | tls | common, self._options)
        except TypeError:
            raise ConfigurationError(_UNKNOWN) from None
        self._make_ours()

    def _ours(self, kind: type) -> type:
        def made() -> None:
            self.made += 1

        return type(f"Our{kind.__name__}", (_Ours, kind), {"made": staticmethod(made)})

    def _make_ours(self) -> None:
        client: Any = self.client
        if self.cluster:
            kind = self._ours(client.connection_kwargs.get("connection_class", Connection))
            client.connection_kwargs["connection_class"] = kind  # of nodes that are discovered later
            for node in client.nodes_manager.startup_nodes.values():
                node.connection_class = kind
            return
        for pool in (each.connection_pool for each in (client, *self._others)):
            pool.connection_class = self._ours(pool.connection_class)

    def _made(
        self, service: str, servers: Sequence[tuple[str, int]], sentinel: dict[str, Any], options: dict[str, Any]
    ) -> RedisClient:
        if self.cluster:
            return RedisCluster(startup_nodes=[ClusterNode(host, port) for host, port in servers], **options)
        if service:
            watchers = Sentinel(servers, sentinel_kwargs=sentinel)  # type: ignore[no-untyped-call]
            self._others = watchers.sentinels  # before 8.1 they cannot be closed together
            return cast(RedisClient, watchers.master_for(service, **options))
        ((host, port),) = servers
        return Redis(host=host, port=port, **options)

    async def infos(self, section: str) -> Sequence[dict[str, Any]]:
        """INFO of each primary. Raises RedisError."""
        if self.cluster:
            return list((await self.client.info(section, target_nodes=RedisCluster.PRIMARIES)).values())
        return [await self.client.info(section)]

    async def replica_infos(self, section: str) -> Sequence[dict[str, Any]]:
        """INFO of each replica that can be reached from here; the others are left out. Raises RedisError."""
        primaries, clock = await self.infos("replication"), asyncio.get_running_loop().time
        at = {(str(each["ip"]), int(each["port"])) for info in primaries for each in info.values() if _is_replica(each)}
        asked = [address for address in at if self._silent.get(address, 0.0) <= clock()]
        found = await asyncio.gather(*(self._info_at(address, section) for address in asked))
        self._silent |= {address: clock() + _SILENT for address, each in zip(asked, found, strict=True) if each is None}
        return [each for each in found if each is not None]

    async def _info_at(self, address: tuple[str, int], section: str) -> dict[str, Any] | None:
        options = self._options | {"db": 0, "socket_timeout": _NEAR, "socket_connect_timeout": _NEAR}
        replica = Redis(host=address[0], port=address[1], **options)
        try:
            return dict(await replica.info(section))
        except Exception:  # noqa: BLE001 - of whatever type: it is as if it could not be reached
            return None
        finally:
            with suppress(Exception):
                await replica.aclose()

    async def close(self) -> None:
        for each in (self.client, *self._others):
            with suppress(Exception):
                await each.aclose()


def _is_replica(value: object) -> bool:
    """Whether a field of INFO replication is a replica: `slave0` and so on are fields of their own."""
    return isinstance(value, dict) and "ip" in value and "port" in value
