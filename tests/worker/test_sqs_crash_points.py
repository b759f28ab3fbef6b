"""As `test_worker_crash_points`, with SQS: the points between the broker and the database."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from uuid import uuid4

import psycopg
import pytest
from aiobotocore.session import get_session

from idemconsumer.brokers.sqs.broker import SqsBroker
from idemconsumer.ports.broker import Outgoing
from idemconsumer.ports.observer import Point
from idemconsumer.settings import Settings
from idemconsumer.stores.migrations import migrate
from tests.conftest import Server
from tests.worker.test_worker_crash_points import payment

POINTS = [
    f"{Point.FETCHED}:9",
    f"{Point.DISPATCHED}:9",
    f"{Point.COMMITTED}:2",
    f"{Point.SETTLING}:3",
    f"{Point.SETTLED}:3",
]
NAMES = [f"plain-{n}" for n in range(20)]


def work(dsn: str, source: str, address: str, crash: Sequence[str] = ()) -> int:
    """A worker until it has emptied the queue, or died; its exit status."""
    worker = subprocess.run(
        [sys.executable, "-m", "tests.worker.crashing_worker", *crash],
        env=os.environ
        | {"IDEMCONSUMER_DSN": dsn, "CRASH_SOURCE": source, "IDEMCONSUMER_SQS": address}
        | {"IDEMCONSUMER_HANDLERS": "pay"},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert worker.returncode in (0, -signal.SIGKILL), worker.stdout + worker.stderr
    return worker.returncode


@pytest.mark.kill
@pytest.mark.slow
@pytest.mark.parametrize("point", POINTS)
async def test_a_crash_at(point: str, sqs: Server, database: str) -> None:
    """The worker after it waits until what the dead one held is visible again: its queue is not empty before."""
    migrate(database, "idemconsumer")
    with psycopg.connect(database, autocommit=True) as db:
        db.execute("create table effect (id text, amount int)")
        name = f"crash-{uuid4().hex}"
        async with get_session().create_client("sqs", endpoint_url=sqs.address) as client:
            await client.create_queue(QueueName=name, Attributes={"VisibilityTimeout": "10"})
        broker = SqsBroker(Settings(sqs=sqs.address))
        await broker.publish(name, [Outgoing(payment(each)) for each in [*NAMES, *NAMES[::3], "flaky-1"]])
        await broker.close()
        assert work(database, f"sqs:{name}", sqs.address, [point]) == -signal.SIGKILL, "it never came to this point"
        assert work(database, f"sqs:{name}", sqs.address) == 0
        effects = sorted(each for (each,) in db.execute("select id from effect").fetchall())
        assert effects == sorted([*NAMES, "flaky-1"])
