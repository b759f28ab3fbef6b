"""The same handler bare and through the engine, in one run: what deduplication costs, or saves.

    python -m benchmarks.store_path [--messages N] [--lanes N] [--rounds N] [--json]

Bare is the consumer that people write by hand without deduplication: psycopg, prepared statements, a transaction a
message, as many connections as the engine has lanes. Both insert one row of business data a message. Rounds alternate,
and the ratio of a round compares neighbours, since machines are noisy; the median is printed. No broker takes part.
Without IDEMCONSUMER_DSN it starts a throwaway Postgres with fsync and synchronous_commit on.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import time
from collections.abc import Sequence
from typing import Any

import click
import psycopg

from idemconsumer import App, Message, Tx
from idemconsumer._engine import Engine
from idemconsumer._work import Work
from idemconsumer.embedded import EmbeddedPostgres
from idemconsumer.stores.migrations import migrate
from idemconsumer.stores.postgres import PostgresStore

app = App("bench")
INSERT = "insert into payment (id, amount) values (%s, %s)"


async def record_payment(payment: dict[str, Any], tx: Tx) -> None:
    await tx.execute(INSERT, (payment["id"], payment["amount"]))


GROUPED = {
    size: app.idempotent_handler(f"memory:g{size}", key="id", group_size=size, name=f"g{size}")(record_payment)
    for size in (1, 32)
}


def bodies(prefix: str, count: int) -> list[bytes]:
    return [json.dumps({"id": f"{prefix}-{n}", "amount": n % 1000}).encode() for n in range(count)]


async def bare(dsn: str, messages: Sequence[bytes], lanes: int) -> float:
    async def lane(index: int) -> None:
        async with await psycopg.AsyncConnection.connect(dsn) as connection:
            for body in messages[index::lanes]:
                payment = json.loads(body)
                await connection.execute(INSERT, (payment["id"], payment["amount"]))
                await connection.commit()

    started = time.perf_counter()
    await asyncio.gather(*(lane(index) for index in range(lanes)))
    return len(messages) / (time.perf_counter() - started)


async def through_engine(dsn: str, size: int, messages: Sequence[bytes], lanes: int) -> float:
    store = await PostgresStore.open(dsn, "idemconsumer", connections=lanes, longest_run=30)
    engine = Engine(store, lanes=lanes)
    handler = GROUPED[size].plan.bind(app.name)

    async def lane(index: int) -> None:
        mine = messages[index::lanes]
        for start in range(0, len(mine), size):
            works = [Work.of(handler, Message(f"memory:g{size}", body)) for body in mine[start : start + size]]
            outcomes = await engine.run(works)
            assert len(outcomes) == len(works)

    started = time.perf_counter()
    await asyncio.gather(*(lane(index) for index in range(lanes)))
    rate = len(messages) / (time.perf_counter() - started)
    await store.close()
    return rate


async def run(dsn: str, messages: int, lanes: int, rounds: int) -> dict[str, Any]:
    migrate(dsn, "idemconsumer")
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        await connection.execute("create table payment (id text not null, amount int not null)")
    rates: dict[str, list[float]] = {"bare": [], "group 1": [], "group 32": []}
    for number in range(rounds):
        rates["bare"].append(await bare(dsn, bodies(f"b{number}", messages), lanes))
        for size in GROUPED:
            rates[f"group {size}"].append(await through_engine(dsn, size, bodies(f"{size}-{number}", messages), lanes))
    ratios = {
        name: statistics.median(ours / other for ours, other in zip(values, rates["bare"], strict=True))
        for name, values in rates.items()
    }
    return {
        "messages": messages,
        "lanes": lanes,
        "rounds": rounds,
        "per_second": {name: round(statistics.median(values)) for name, values in rates.items()},
        "ratio_to_bare": {name: round(ratio, 2) for name, ratio in ratios.items()},
    }


@click.command(help=__doc__)
@click.option("--messages", default=4_000, help="messages a round")
@click.option("--lanes", default=4, help="connections, of both")
@click.option("--rounds", default=5)
@click.option("--json", "as_json", is_flag=True)
def main(messages: int, lanes: int, rounds: int, as_json: bool) -> None:
    if dsn := os.environ.get("IDEMCONSUMER_DSN"):
        result = asyncio.run(run(dsn, messages, lanes, rounds))
    else:
        with EmbeddedPostgres() as postgres:
            result = asyncio.run(run(postgres.dsn, messages, lanes, rounds))
    if as_json:
        click.echo(json.dumps(result))
        return
    click.echo(f"{messages} messages, {lanes} lanes, median of {rounds} rounds")
    for name, rate in result["per_second"].items():
        click.echo(f"{name:>9}: {rate:>7,}/s   {result['ratio_to_bare'][name]:.2f} x bare")


if __name__ == "__main__":
    main()
