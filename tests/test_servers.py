"""The servers and the proxy do what the other tests rely on."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

import aio_pika
import psycopg
import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from pamqp.common import FieldTable
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from idemconsumer.stores.session import SessionRules
from tests.support.pids import alive
from tests.support.servers.made import PostgresServer, PrivateKafka, PrivateRabbitMQ, Server
from tests.support.servers.postgres import fresh_database, migrated
from tests.support.servers.proxy import PLAIN_COMMIT, Proxy
from tests.support.servers.tls import self_signed
from tests.support.waiting import eventually


async def test_a_fresh_database_is_empty_in_every_version(any_database: str) -> None:
    async with await psycopg.AsyncConnection.connect(any_database) as connection:
        rows = await connection.execute("select count(*) from pg_tables where schemaname = 'public'")
        assert await rows.fetchone() == (0,)


def test_a_database_that_somebody_has_entered_is_given_to_nobody_else(postgres18: PostgresServer) -> None:
    numbers = list[int]()
    for enter in (False, True, False):
        with fresh_database(postgres18.dsn) as dsn:
            with psycopg.connect(postgres18.dsn) as admin:
                number = "select oid from pg_database where datname = %s"
                numbers += admin.execute(number, [conninfo_to_dict(dsn)["dbname"]]).fetchall()[0]
            if enter:
                with psycopg.connect(dsn) as connection:
                    connection.execute("create function mine() returns int language sql return 1")
            migrated(dsn, "idemconsumer")
            with psycopg.connect(dsn) as connection:
                rows = connection.execute("select to_regproc('mine') is not null, to_regclass('idemconsumer.record')")
                assert rows.fetchall() == [(False, "idemconsumer.record")]
    assert numbers[2] not in numbers[:2]


async def make_topic(address: str, name: str) -> None:
    admin = AIOKafkaAdminClient(bootstrap_servers=address)
    await admin.start()
    try:
        await admin.create_topics([NewTopic(name, num_partitions=1, replication_factor=1)])
    finally:
        await admin.close()


async def send(address: str, topic: str, value: bytes, **security: object) -> None:
    async with AIOKafkaProducer(bootstrap_servers=address, **security) as producer:
        await producer.send_and_wait(topic, value)


async def read_one(address: str, topic: str) -> bytes:
    async with AIOKafkaConsumer(bootstrap_servers=address, auto_offset_reset="earliest") as consumer:
        consumer.assign([TopicPartition(topic, 0)])
        await consumer.seek_to_beginning()
        async with asyncio.timeout(20):
            record = await consumer.getone()
    return bytes(record.value)


async def test_kafka_carries_a_message(kafka: Server) -> None:
    await make_topic(kafka.address, "smoke")
    await send(kafka.address, "smoke", b"hello")
    assert await read_one(kafka.address, "smoke") == b"hello"


@pytest.mark.long
@pytest.mark.kill
async def test_kafka_keeps_a_message_over_a_kill_and_speaks_tls_and_sasl(
    private_kafka: PrivateKafka, tmp_path: Path
) -> None:
    certificate = self_signed(tmp_path)
    login = "org.apache.kafka.common.security.plain.PlainLoginModule required"
    server = private_kafka(
        listeners={"TLS": "SSL", "SASL": "SASL_PLAINTEXT"},
        properties={
            "listener.name.tls.ssl.keystore.type": "PEM",
            "listener.name.tls.ssl.keystore.location": str(certificate.both),
            "listener.name.sasl.sasl.enabled.mechanisms": "PLAIN",
            "listener.name.sasl.plain.sasl.jaas.config": f'{login} user_alice="secret";',
        },
    )
    address = server.address
    await make_topic(address, "kept")
    await send(
        server.address_of("TLS"), "kept", b"1",
        security_protocol="SSL", ssl_context=certificate.client_context(),
    )  # fmt: skip
    await send(
        server.address_of("SASL"), "kept", b"2",
        security_protocol="SASL_PLAINTEXT", sasl_mechanism="PLAIN",
        sasl_plain_username="alice", sasl_plain_password="secret",
    )  # fmt: skip
    server.kill()
    server.start()
    assert server.address == address
    assert await read_one(address, "kept") == b"1"


async def test_rabbitmq_carries_a_message(rabbitmq: Server) -> None:
    async with await aio_pika.connect(rabbitmq.address) as connection:
        channel = await connection.channel()
        queue = await channel.declare_queue("smoke", exclusive=True)
        await channel.default_exchange.publish(aio_pika.Message(b"hello"), "smoke")
        message = await queue.get(timeout=10)
        assert message is not None
        assert message.body == b"hello"


@pytest.mark.long
@pytest.mark.kill
async def test_rabbitmq_keeps_a_quorum_queue_over_a_kill_and_takes_more_configuration(
    private_rabbitmq: PrivateRabbitMQ,
) -> None:
    server = private_rabbitmq(config={"consumer_timeout": "1234567"})
    assert "1234567" in server.ctl("environment")
    arguments: FieldTable = {"x-queue-type": "quorum"}
    async with await aio_pika.connect(server.address) as connection:
        channel = await connection.channel()
        await channel.declare_queue("kept", durable=True, arguments=arguments)
        await channel.default_exchange.publish(aio_pika.Message(b"1"), "kept")
        server.wait_until_saved()
        server.kill()
    server.start()
    async with await aio_pika.connect(server.address) as connection:
        queue = await (await connection.channel()).declare_queue("kept", durable=True, arguments=arguments)
        message = await queue.get(timeout=20)
        assert message is not None
        assert message.body == b"1"


@pytest.mark.kill
def test_a_server_and_its_folder_go_when_the_tests_are_killed() -> None:
    program = (
        "from tests.support.servers.processes import Processes\n"
        "server = Processes('sleep'); server.spawn(['sleep', '600'])\n"
        "print(server._running[0].pid, server.folder, flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        pid, folder = owner.stdout.readline().split()
        assert alive(int(pid))
        owner.send_signal(signal.SIGKILL)
    eventually(lambda: not alive(int(pid)) and not os.path.exists(folder))


class TestProxy:
    @staticmethod
    @asynccontextmanager
    async def through(proxy: Proxy, dsn: str) -> AsyncIterator[psycopg.AsyncConnection[Any]]:
        connection = await psycopg.AsyncConnection.connect(dsn, host="127.0.0.1", port=proxy.port)
        try:
            await connection.set_isolation_level(psycopg.IsolationLevel.READ_COMMITTED)
            yield connection
        finally:
            await connection.close()

    @staticmethod
    async def rows(dsn: str) -> int:
        async with await psycopg.AsyncConnection.connect(dsn) as connection:
            found = await (await connection.execute("select count(*)::int from effect")).fetchone()
            assert found is not None
            return int(found[0])

    @staticmethod
    async def insert_and_commit(connection: psycopg.AsyncConnection[Any], pipeline: bool) -> None:
        async with connection.pipeline() if pipeline else nullcontext():
            await connection.execute("insert into effect values (1)")
            await connection.commit()

    @pytest.fixture
    async def effects(self, database: str) -> str:
        async with await psycopg.AsyncConnection.connect(database) as connection:
            await connection.execute("create table effect (n int)")
        return database

    @pytest.mark.parametrize("pipeline", [False, True])
    @pytest.mark.parametrize(("mode", "committed"), [("before", 0), ("after", 1)])
    async def test_a_cut_at_commit_leaves_the_client_without_an_answer(
        self, effects: str, mode: str, committed: int, pipeline: bool
    ) -> None:
        port = psycopg.conninfo.conninfo_to_dict(effects)["port"]
        async with (
            Proxy(int(str(port))) as proxy,
            self.through(proxy, effects) as connection,
            self.through(proxy, effects) as bystander,
        ):
            trap = proxy.cut_at(PLAIN_COMMIT, mode="before" if mode == "before" else "after")
            with pytest.raises(psycopg.OperationalError):
                await self.insert_and_commit(connection, pipeline)
            async with asyncio.timeout(30):
                await trap.sprung.wait()
            assert await self.rows(effects) == committed
            # It is armed for one cut: the other connection commits.
            await bystander.execute("insert into effect values (2)")
            await bystander.commit()
            assert await self.rows(effects) == committed + 1

    async def test_the_first_transactions_of_a_new_connection_spring_no_trap_for_a_commit(self, effects: str) -> None:
        """A pool makes one whenever another was lost: also between the arming of a trap and the COMMIT it is for."""
        port = psycopg.conninfo.conninfo_to_dict(effects)["port"]
        async with Proxy(int(str(port))) as proxy:
            trap = proxy.cut_at(mode="before")
            through = make_conninfo(effects, host="127.0.0.1", port=proxy.port)
            connection = await SessionRules(through, longest_run=30.0, lease=None).connect()
            with pytest.raises(psycopg.OperationalError):
                await connection.simple(b"begin; COMMIT")
            await trap.sprung.wait()
            await connection.close()

    async def test_a_cut_resets_everybody_and_refuses_until_restored(self, effects: str) -> None:
        port = psycopg.conninfo.conninfo_to_dict(effects)["port"]
        async with Proxy(int(str(port))) as proxy, self.through(proxy, effects) as connection:
            proxy.cut()
            with pytest.raises(psycopg.OperationalError):
                await connection.execute("select 1")
            with pytest.raises(psycopg.OperationalError, match="refused"):
                await psycopg.AsyncConnection.connect(effects, host="127.0.0.1", port=proxy.port)
            await proxy.restore()
            async with self.through(proxy, effects) as again:
                await again.execute("select 1")
