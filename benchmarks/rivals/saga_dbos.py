"""The saga of `saga_ours`, written for DBOS, in a process of its own.

The ways of running it: `direct` awaits the workflow function, `start` awaits the handle of one that was started,
`queue` enqueues and awaits, `threads` calls the synchronous function in as many threads.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import sqlalchemy as sa
from dbos import DBOS, AsyncSQLAlchemyDatasource, SetWorkflowID, SQLAlchemyDatasource
from dbos._datasource import DatasourceOptions

from benchmarks._child import serve
from benchmarks._loop import run

CONNECTIONS = 32
URL = os.environ["BENCH_DSN"].replace("postgresql://", "postgresql+psycopg://")
INSERT = sa.text("insert into payment (id, amount) values (:id, :amount)")
READ_COMMITTED: DatasourceOptions = {"isolation_level": "READ COMMITTED"}  # as our own; SERIALIZABLE is DBOS's default

DBOS(
    config={
        "name": "bench",
        "system_database_url": URL,
        "log_level": "ERROR",
        "sys_db_pool_size": CONNECTIONS,
        "max_executor_threads": 64,
    }
)


class Datasources:
    """Made once the loop runs."""

    coroutines: AsyncSQLAlchemyDatasource
    threads: SQLAlchemyDatasource


@DBOS.workflow()
async def ride(order: str) -> str:
    number = await Datasources.coroutines.run_tx_step_async(READ_COMMITTED, create, order)
    charge: str = await charge_card(order)
    await Datasources.coroutines.run_tx_step_async(READ_COMMITTED, book, order, number)
    return charge


async def create(order: str) -> int:
    await Datasources.coroutines.sql_session().execute(INSERT, {"id": order, "amount": 1})
    return 1


@DBOS.step()
async def charge_card(order: str) -> str:
    return f"charge-{order}"


async def book(order: str, number: int) -> None:
    await Datasources.coroutines.sql_session().execute(INSERT, {"id": order, "amount": number + 1})


@DBOS.workflow()
def ride_in_thread(order: str) -> str:
    number = Datasources.threads.run_tx_step(READ_COMMITTED, create_in_thread, order)
    charge: str = charge_card_in_thread(order)
    Datasources.threads.run_tx_step(READ_COMMITTED, book_in_thread, order, number)
    return charge


def create_in_thread(order: str) -> int:
    Datasources.threads.sql_session().execute(INSERT, {"id": order, "amount": 1})
    return 1


@DBOS.step()
def charge_card_in_thread(order: str) -> str:
    return f"charge-{order}"


def book_in_thread(order: str, number: int) -> None:
    Datasources.threads.sql_session().execute(INSERT, {"id": order, "amount": number + 1})


async def direct(order: str) -> None:
    with SetWorkflowID(order):
        await ride(order)


async def start(order: str) -> None:
    with SetWorkflowID(order):
        handle = await DBOS.start_workflow_async(ride, order)
    await handle.get_result()


async def queue(order: str) -> None:
    with SetWorkflowID(order):
        handle = await DBOS.enqueue_workflow_async("rides", ride, order)
    await handle.get_result(polling_interval_sec=0.05)


def in_thread(order: str) -> None:
    with SetWorkflowID(order):
        ride_in_thread(order)


WAYS: dict[str, Callable[[str], Any]] = {"direct": direct, "start": start, "queue": queue}


async def answer(question: dict[str, Any]) -> float:
    """Seconds for `count` sagas, `at_once` of them running at any time."""
    prefix, at_once, way = question["prefix"], question["at_once"], question["way"]
    waiting = iter([f"{prefix}-{number}" for number in range(question["count"])])

    async def one_after_another() -> None:
        for order in waiting:
            await WAYS[way](order)

    started = time.perf_counter()
    if way == "threads":
        with ThreadPoolExecutor(at_once) as pool:
            await asyncio.to_thread(lambda: list(pool.map(in_thread, waiting)))
    else:
        await asyncio.gather(*(one_after_another() for _ in range(at_once)))
    return time.perf_counter() - started


async def main() -> None:
    pool = {"pool_size": CONNECTIONS, "max_overflow": 0}
    Datasources.coroutines = await AsyncSQLAlchemyDatasource.create(URL, pool)
    Datasources.threads = SQLAlchemyDatasource.create(URL, pool)
    DBOS.launch()
    await DBOS.register_queue_async("rides", polling_interval_sec=0.05)
    await serve(answer)
    DBOS.destroy()


if __name__ == "__main__":
    run(main())
