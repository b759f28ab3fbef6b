"""Two live programs with one `kafka_group_instance_id`, as a Deployment with a fixed variable has (K16)."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from uuid import uuid4

import psycopg
import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient

from idemconsumer.stores.migrations import migrate
from tests.support import ROOT, forked
from tests.support.kafka import create_topic
from tests.support.servers.made import Server
from tests.support.waiting import until

pytestmark = [pytest.mark.kill, pytest.mark.slow]


async def test_the_program_that_was_replaced_exits_with_2_and_says_why(
    kafka: Server, database: str, tmp_path: Path
) -> None:
    topic = f"payments-{uuid4().hex}"
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka.address)
    await admin.start()
    await create_topic(admin, topic, partitions=2)
    await admin.close()
    await asyncio.to_thread(migrate, database, "idemconsumer")
    environment = {
        **os.environ,
        "KILL_SOURCE": f"kafka:{topic}",
        "IDEMCONSUMER_KAFKA": kafka.address,
        "IDEMCONSUMER_DSN": database,
        "IDEMCONSUMER_KAFKA_GROUP_INSTANCE_ID": "fixed",
        "IDEMCONSUMER_LOG_FORMAT": "json",
    }
    command = [sys.executable, "-m", "idemconsumer", "run", "tests.kill.app:app"]
    logs = [tmp_path / "first", tmp_path / "second"]
    programs: list[subprocess.Popen[bytes]] = []
    async with await psycopg.AsyncConnection.connect(database, autocommit=True) as db:
        await db.execute("create table witness (id text not null)")

        async def applied() -> int:
            row = await (await db.execute("select count(*) from witness")).fetchone()
            return 0 if row is None else int(row[0])

        async def works(payment: int) -> None:
            async with AIOKafkaProducer(bootstrap_servers=kafka.address) as producer:
                await producer.send_and_wait(topic, b'{"id": "%d"}' % payment)

            async def done() -> bool:
                return await applied() == payment

            await until(done, f"{payment} applied", within=60)

        try:
            for log in logs:
                with log.open("wb") as out:
                    programs.append(forked.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=out))
                if len(programs) == 1:
                    await works(1)
            assert await asyncio.to_thread(programs[0].wait, 60) == 2
            (why,) = [line for line in logs[0].read_text().splitlines() if "cannot run" in line]
            assert "another process has joined" in why
            assert "unset IDEMCONSUMER_KAFKA_GROUP_INSTANCE_ID" in why
            await works(2)
            assert programs[1].poll() is None
            programs[1].send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(programs[1].wait, 60) == 0
        finally:
            for program in programs:
                program.kill()
                program.wait()
