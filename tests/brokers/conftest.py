"""Fixtures of the brokers' tests."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.support.kafka import MortalWorld, World, killing, world_of
from tests.support.positions import Database, opened
from tests.support.servers.made import PrivateKafka, Server
from tests.support.servers.postgres import migrated


@pytest.fixture
async def world(kafka: Server) -> AsyncIterator[World]:
    async with world_of(kafka) as world:
        yield world


@pytest.fixture
async def mortal(private_kafka: PrivateKafka) -> AsyncIterator[MortalWorld]:
    with killing(private_kafka()) as server:
        async with world_of(server) as world:
            mortal = MortalWorld(server, world.admin, world.topic, world.brokers, world.sessions, own=server)
            yield mortal


@pytest.fixture
async def kept(world: World, database: str) -> AsyncIterator[Database]:
    """Where the sessions of `world` keep their positions."""
    migrated(database, "idemconsumer")
    async with opened(database) as kept:
        world.broker.keep_positions_in(kept)
        yield kept
        await world.close()
