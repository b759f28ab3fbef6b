"""DBOS's Kafka consumer: a workflow a message, whose one step is a transaction of the business database.

A synchronous workflow in DBOS's threads, which was faster than its coroutines, and a queue that is polled twenty times
a second instead of once.
"""

from __future__ import annotations

import json
import os
import threading

import sqlalchemy as sa
from dbos import DBOS, KafkaMessage, SQLAlchemyDatasource

from benchmarks.rivals.hand import ADDRESS, DSN, NAME

URL = DSN.replace("postgresql://", "postgresql+psycopg://")
INSERT = sa.text("insert into payment (id, amount) values (:id, :amount)")

DBOS(
    config={
        "name": "bench",
        "system_database_url": URL,
        "log_level": "ERROR",
        "sys_db_pool_size": 32,
        "max_executor_threads": 64,
        "kafka_queue_polling_interval_sec": 0.05,
    }
)
datasource = SQLAlchemyDatasource.create(URL, {"pool_size": 32, "max_overflow": 0})


@DBOS.kafka_consumer({"bootstrap.servers": ADDRESS, "group.id": os.environ["BENCH_GROUP"]}, [NAME])
@DBOS.workflow()
def pay(message: KafkaMessage) -> None:
    apply(message.value)


@datasource.transaction(isolation_level="READ COMMITTED")
def apply(body: bytes) -> None:
    payment = json.loads(body)
    datasource.sql_session().execute(INSERT, {"id": payment["id"], "amount": payment["amount"]})


if __name__ == "__main__":
    DBOS.launch()
    threading.Event().wait()
