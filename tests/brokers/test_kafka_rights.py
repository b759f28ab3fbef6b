"""K22: a topic that may not be read stands still alone."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
from aiokafka import TopicPartition
from aiokafka.protocol.admin import CreateAclsRequest

from idemconsumer.brokers.kafka.kafka_broker import KafkaBroker
from idemconsumer.ports.broker import Finding
from idemconsumer.settings import Settings
from tests.support.inside import commit_now
from tests.support.kafka import BOUNDS, World, killing, take, world_of
from tests.support.logs import LogCapture, entries
from tests.support.servers.kafka import Kafka
from tests.support.servers.made import PrivateKafka
from tests.support.tuning import tuned
from tests.support.waiting import until

FORBIDDEN = "kafka topic not readable, no permission"
TOPIC, GROUP, READ, DESCRIBE = 2, 3, 3, 8


@pytest.fixture(scope="module")
def own(private_kafka: PrivateKafka) -> Iterator[Kafka]:
    """Whoever logs in as `app` may do anything with what nobody has been allowed anything with."""
    login = 'org.apache.kafka.common.security.plain.PlainLoginModule required user_app="secret";'
    properties = {
        "listener.name.sasl.sasl.enabled.mechanisms": "PLAIN",
        "listener.name.sasl.plain.sasl.jaas.config": login,
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super.users": "User:ANONYMOUS",
        "allow.everyone.if.no.acl.found": "true",
    }
    with killing(private_kafka(listeners={"SASL": "SASL_PLAINTEXT"}, properties=properties)) as server:
        yield server


@pytest.fixture
async def world(own: Kafka) -> AsyncIterator[World]:
    async with world_of(own) as world:
        settings = Settings(
            kafka=own.address_of("SASL"),
            kafka_security_protocol="SASL_PLAINTEXT",
            kafka_sasl_mechanism="PLAIN",
            kafka_sasl_username="app",
            kafka_sasl_password="secret",
        )
        world.brokers.append(KafkaBroker(settings))
        yield world


async def allow(world: World, operation: int, name: str, of: int = TOPIC) -> None:
    answer = await world.admin._send_request(CreateAclsRequest(of, name, 3, "User:app", "*", operation, 3))
    assert answer.creation_responses[0][0] == 0, answer


async def errors(world: World, topic: str) -> list[Finding]:
    return [each for each in await world.broker.check(world.subscription(topic)) if each.level == "error"]


@pytest.mark.parametrize("refused", ["fetch", "commit"])
async def test_one_topic_without_read_stands_still_alone_and_goes_on_when_it_may(
    world: World, logged: LogCapture, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    """Whichever of the two it is that Kafka refuses first."""
    tuned(monkeypatch, unreadable_look_pause=0.1, kafka_commit_pause=600 if refused == "fetch" else 0.1)
    closed = f"{world.topic}.closed"
    await world.create()
    await world.create(closed)
    await allow(world, DESCRIBE, closed)
    await until(lambda: errors(world, closed))
    (found,) = await errors(world, closed)
    assert (found.subject, "lacks READ on the topic" in found.text) == (f"kafka:{closed}", True)
    assert await errors(world, world.topic) == []
    await world.produce(3)
    session = await world.open(BOUNDS, world.topic, closed)
    if refused == "commit":
        await until(lambda: bool(entries(logged, FORBIDDEN)))
    taken = await take(session, 3)
    while not entries(logged, FORBIDDEN):
        assert not await session.fetch()
    await session.settle(taken)
    await commit_now(session)
    await world.commits(3)
    await world.produce(3, start=3)
    await session.settle(await take(session, 3))
    await commit_now(session)
    await world.commits(6)
    assert not taken[0].epoch.ended
    (said,) = entries(logged, FORBIDDEN)
    assert (said["log_level"], said["topic"], "READ" in said["instead"]) == ("error", closed, True)
    assert session._failed_commits == 0

    open_topic, world.topic = world.topic, closed
    await world.produce_and_abort(3)
    await world.produce(2)
    await allow(world, READ, closed)
    assert [each.message.body for each in await take(session, 2)] == [b"0", b"1"]
    assert TopicPartition(open_topic, 0) in session._reading.partitions
    assert len(entries(logged, "kafka topic readable again")) == 1


async def test_one_topic_that_it_may_not_even_see_stops_nothing(world: World, logged: LogCapture) -> None:
    hidden = f"{world.topic}.hidden"
    await world.create()
    await world.create(hidden)
    await allow(world, 4, hidden)  # WRITE is no READ; it comes with DESCRIBE
    await until(lambda: errors(world, hidden))
    await world.produce(3)
    session = await world.open(BOUNDS, world.topic, hidden)
    await session.settle(await take(session, 3))
    await world.commits(3)


async def test_check_says_which_right_the_group_lacks(world: World) -> None:
    await world.create()
    await allow(world, DESCRIBE, world.group, GROUP)
    await until(lambda: errors(world, world.topic))
    (found,) = await errors(world, world.topic)
    assert f"lacks READ on the group '{world.group}'" in found.text
