"""A Redis that Sentinels watch fails over under a server on uvloop, where a reset connection raises RuntimeError
(H28, H29, H52)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest

from idemconsumer.message import keys
from idemconsumer.stores.redis.scripts import name_of
from tests.http.blackbox.client import Service, new, problem, replayed
from tests.http.blackbox.places import OWN, Place
from tests.http.blackbox.served.config import Config, Store
from tests.http.deployed import ON_UVLOOP, Deployed
from tests.support.servers.made import PrivateRedis
from tests.support.servers.redis import RedisSentinels, RedisServer
from tests.support.waiting import until

pytestmark = pytest.mark.skipif(bool(OWN), reason="needs servers that it may start")


@dataclass
class Watched:
    primary: RedisServer
    replica: RedisServer
    sentinels: RedisSentinels

    def stop(self, how: str) -> None:
        match how:
            case "killed":
                self.primary.kill()
            case "frozen":
                self.primary.freeze()
            case _:
                self.sentinels.hand_over()

    def go_on(self, how: str) -> None:
        """As a replica, which the Sentinels would make of it within ten seconds."""
        match how:
            case "killed":
                self.primary.start()
            case "frozen":
                self.primary.thaw()
        self.primary.follow(self.replica)

    async def failed_over(self) -> None:
        await until(lambda: self.sentinels.primary_port() == self.replica.port, "the replica is the primary")


@pytest.fixture
def watched(private_redis: PrivateRedis) -> Iterator[Watched]:
    primary, replica = private_redis(), private_redis()
    replica.follow(primary)
    sentinels = RedisSentinels(primary)
    yield Watched(primary, replica, sentinels)
    sentinels.close()


Serve = Callable[[int], Deployed]


@pytest.fixture
def serve(watched: Watched, configs: Callable[[Store], Config]) -> Iterator[Serve]:
    """With so many replicas that have to confirm."""
    made: list[Deployed] = []

    def served(replicas: int) -> Deployed:
        config = replace(configs("redis"), redis=watched.sentinels.address)
        settings = {"IDEMCONSUMER_REDIS_REPLICAS": str(replicas)}
        made.append(Deployed("asgi", config, way=ON_UVLOOP, settings=settings))
        made[-1].start()
        return made[-1]

    yield served
    for server in made:
        server.kill()


@pytest.mark.parametrize("how", ["killed", "frozen", "handed over"])
async def test_a_failover_lets_no_effect_happen_twice(watched: Watched, serve: Serve, how: str) -> None:
    """Of what runs at that moment, and of what comes until the replica is there: each client repeats until it has its
    response. A primary that is handed over takes writes for another ten seconds, which then are lost."""
    place = Place("redis", "leased", "asgi", serve(1))
    gate, inside, around = place.gate(), [new() for _ in range(8)], [new() for _ in range(40)]
    services = {key: Service(place.server.url, place.mode, key) for key in inside + around}
    answered = 0

    async def client(key: str, **query: str) -> bytes:
        nonlocal answered
        answer = await services[key].answered(key=key, **query)
        assert answer.status_code == 201, answer.text
        answered += 1
        return answer.content

    clients = {key: asyncio.create_task(client(key, gate=gate.name)) for key in inside}
    await until(lambda: gate.arrivals == len(inside), "they all run")
    limit = asyncio.Semaphore(4)

    async def in_turn(key: str) -> bytes:
        async with limit:
            return await client(key)

    clients |= {key: asyncio.create_task(in_turn(key)) for key in around}
    await until(lambda: answered >= 5, "some are answered")
    watched.stop(how)
    gate.open()
    await watched.failed_over()
    watched.go_on(how)
    contents = {key: await clients[key] for key in clients}
    for key, service in services.items():
        query = {"gate": gate.name} if key in inside else {}
        again = await service.answered(key=key, **query)
        assert (again.content, replayed(again), await service.effects()) == (contents[key], True, 1), key
    assert gate.arrivals == len(inside)


@pytest.mark.parametrize("how", ["killed", "handed over"])
async def test_a_failover_to_a_replica_that_evicts_is_noticed_by_its_first_claim(
    watched: Watched, serve: Serve, how: str
) -> None:
    """H28: it began to evict within the minute in which nobody asks. What ran before may end."""
    place = Place("redis", "leased", "asgi", serve(0))
    service, gate, begun, key = place.service(), place.gate(), new(), new()
    running = asyncio.create_task(service.send(key=begun, gate=gate.name))
    await until(lambda: gate.arrivals == 1, "it runs")
    held = name_of(keys.digest("blackbox", "acme", "POST /leased/orders", begun))
    await until(lambda: watched.replica.ask("EXISTS", held) == 1, "the replica has it")
    for name, value in (("maxmemory", "100mb"), ("maxmemory-policy", "allkeys-lru")):
        watched.replica.ask("CONFIG", "SET", name, value)
    watched.primary.kill() if how == "killed" else watched.sentinels.hand_over()
    await watched.failed_over()
    if (
        how == "handed over"
    ):  # as the Sentinels have it do ten seconds later: until then it takes writes, and loses them
        watched.primary.follow(watched.replica)

    other, name = Service(place.server.url, place.mode), "POST /leased/orders"
    for _ in range(3):
        refused = await other.send(key=key)
        assert (refused.status_code, problem(refused)) == (503, "unavailable")
        assert int(refused.headers["Retry-After"]) >= 1
    assert await other.effects() == 0
    claimed = name_of(keys.digest("blackbox", "acme", name, key))
    await until(lambda: watched.replica.ask("EXISTS", claimed) == 0, "what was claimed there is taken back")
    gate.open()
    assert (await running).status_code == 201
    watched.replica.ask("CONFIG", "SET", "maxmemory-policy", "noeviction")
    assert (await other.answered(key=key)).status_code == 201
    assert (await service.answered(key=begun, gate=gate.name)).content == (await running).content
    assert (await other.effects(), await service.effects(), gate.arrivals) == (1, 1, 1)
