"""Fixtures of the brokers' tests."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.support.kafka import MortalWorld, World, killing, world_of
from tests.support.servers.made import PrivateKafka, Server


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
