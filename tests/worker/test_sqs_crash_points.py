"""As `test_worker_crash_points`, with SQS: the points between the broker and the database."""

from __future__ import annotations

import signal
from uuid import uuid4

import psycopg
import pytest
from aiobotocore.session import get_session

from idemconsumer.brokers.sqs.sqs_broker import SqsBroker
from idemconsumer.ports.broker import Outgoing
from idemconsumer.ports.observer import Point
from idemconsumer.settings import Settings
from tests.support.servers.made import Server
from tests.support.servers.postgres import migrated
from tests.worker.crashes import payment, work

LONG_POINTS = [(Point.FETCHED, 9), (Point.DISPATCHED, 9), (Point.SETTLED, 3)]
POINTS = [
    f"{Point.COMMITTED}:2",
    f"{Point.SETTLING}:3",
    *(pytest.param(f"{point}:{nth}", marks=pytest.mark.long) for point, nth in LONG_POINTS),
]
NAMES = [f"plain-{n}" for n in range(20)]


@pytest.mark.kill
@pytest.mark.slow
@pytest.mark.parametrize("point", POINTS)
async def test_a_crash_at(point: str, sqs: Server, database: str) -> None:
    """The worker after it waits until what the dead one held is visible again: its queue is not empty before."""
    migrated(database, "idemconsumer")
    with psycopg.connect(database, autocommit=True) as db:
        db.execute("create table effect (id text, amount int)")
        name = f"crash-{uuid4().hex}"
        async with get_session().create_client("sqs", endpoint_url=sqs.address) as client:
            await client.create_queue(QueueName=name, Attributes={"VisibilityTimeout": "3"})
        broker = SqsBroker(Settings(sqs=sqs.address))
        await broker.publish(name, [Outgoing(payment(each)) for each in [*NAMES, *NAMES[::3], "flaky-1"]])
        await broker.close()
        source = {"CRASH_SOURCE": f"sqs:{name}", "IDEMCONSUMER_SQS": sqs.address, "IDEMCONSUMER_HANDLERS": "pay"}
        assert work(database, point, **source) == -signal.SIGKILL, "it never came to this point"
        assert work(database, **source) == 0
        effects = sorted(each for (each,) in db.execute("select id from effect").fetchall())
        assert effects == sorted([*NAMES, "flaky-1"])
