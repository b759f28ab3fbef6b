"""What a claim and its end cost in each store of requests: `python -m benchmarks.request_stores`, with a Redis on PATH.

Beside the parts of the suite, since it compares stores with each other and has no goal. One request at a time, and then
sixteen; each store in turn, round after round, on one Postgres and one Redis that write to the disk before they answer.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from hashlib import sha256
from itertools import count
from statistics import median
from typing import Final

from idemconsumer.embedded.postgres import EmbeddedPostgres, free_port
from idemconsumer.message.message import StoredResult
from idemconsumer.ports.requests import Held, RequestStore
from idemconsumer.rules.claim import Claim
from idemconsumer.stores.hybrid import HybridRequests
from idemconsumer.stores.joined import PostgresStore
from idemconsumer.stores.migrations import migrate
from idemconsumer.stores.postgres_requests import PostgresRequests
from idemconsumer.stores.redis.copies import Copies
from idemconsumer.stores.redis.redis_requests import RedisRequests

SCHEMA: Final = "idemconsumer"
RESPONSE: Final = StoredResult(b'{"charge": "c-1"}', "application/json", 201, (("location", "/charges/1"),))
ROUNDS, EACH = 4, 160

_numbers = count()
Act = Callable[[Claim], Awaitable[None]]


def claim() -> Claim:
    return Claim(sha256(str(next(_numbers)).encode()).digest(), "shop/-/pay", b"f" * 32, expires=86_400.0)


def leased(store: RequestStore) -> Act:
    async def act(given: Claim) -> None:
        held = await store.claim(given, lambda: None)
        assert isinstance(held, Held)
        assert await store.complete(held, RESPONSE)

    return act


def replayed(store: RequestStore) -> Act:
    same = claim()

    async def act(_: Claim) -> None:
        if isinstance(held := await store.claim(same, lambda: None), Held):
            await store.complete(held, RESPONSE)

    return act


def joined(store: PostgresStore) -> Act:
    async def act(given: Claim) -> None:
        async with store.transaction(group=1) as claims:
            await claims.claim([given])
            await claims.complete([(given.key, RESPONSE)], [])

    return act


async def times(act: Act, lanes: int) -> list[float]:
    """Milliseconds of each."""
    found: list[float] = []

    async def lane() -> None:
        for _ in range(EACH // lanes):
            given, began = claim(), time.perf_counter()
            await act(given)
            found.append((time.perf_counter() - began) * 1000)

    await asyncio.gather(*(lane() for _ in range(lanes)))
    return found


@asynccontextmanager
async def redis() -> AsyncIterator[str]:
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--dir", folder, "--save", ""]
        command += ["--appendonly", "yes", "--appendfsync", "always", "--loglevel", "warning"]
        process = await asyncio.create_subprocess_exec(*command)
        await asyncio.sleep(1)
        try:
            yield f"redis://127.0.0.1:{port}/0"
        finally:
            process.terminate()
            await process.wait()


async def main() -> None:
    async with AsyncExitStack() as stack:
        address = await stack.enter_async_context(redis())
        server = EmbeddedPostgres()
        server.start()
        stack.callback(server.stop)
        migrate(server.dsn, SCHEMA)
        postgres = await PostgresStore.open(server.dsn, SCHEMA, connections=16, longest_run=30.0)
        stack.push_async_callback(postgres.close)
        requests = PostgresRequests.on(postgres.pool, server.dsn, SCHEMA)
        stack.push_async_callback(requests.close)
        in_redis, copies = RedisRequests(address), Copies(address, await postgres.pool.born())
        stack.push_async_callback(in_redis.close)
        stack.push_async_callback(copies.close)
        hybrid = HybridRequests(requests, copies)
        acts = {
            "postgres, joined": joined(postgres), "postgres, leased": leased(requests), "redis": leased(in_redis),
            "hybrid, leased": leased(hybrid), "repetition, postgres": replayed(requests),
            "repetition, redis": replayed(in_redis), "repetition, hybrid": replayed(hybrid),
        }  # fmt: skip
        for lanes in (1, 16):
            measured: dict[str, list[float]] = {name: [] for name in acts}
            for _ in range(ROUNDS):
                for name, act in acts.items():
                    measured[name] += await times(act, lanes)
            for name, found in measured.items():
                print(f"{lanes:>2} at a time  {name:<22} p50 {median(found):.2f} ms  p99 {sorted(found)[-6]:.2f} ms")


if __name__ == "__main__":
    asyncio.run(main())
