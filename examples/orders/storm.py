"""`python -m examples.orders.storm [ORDERS]`: post orders, kill every process in turn, and count what came of it.

Exit code 0: each order, and all that follows from it, happened once. 1: something was lost or happened twice, or the
storm itself failed. 2: a server cannot be had. Postgres and Kafka are throwaway servers of the tests, or Kafka is that
of IDEMCONSUMER_KAFKA, whose topics of these names are made anew.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from contextlib import ExitStack, closing
from functools import partial

import psycopg

from examples.orders.app import TABLES
from examples.orders.company import Company
from examples.orders.counting import Count, all_read, counted, make_topics
from examples.orders.customers import POSTS, Customers
from idemconsumer.embedded.binaries import EmbeddedUnavailable
from idemconsumer.embedded.postgres import EmbeddedPostgres
from idemconsumer.stores.migrations import migrate
from tests.support.away import away
from tests.support.servers.kafka import Kafka
from tests.support.servers.processes import ServerMissing
from tests.support.waiting import until

ORDERS = 1_000
CUSTOMERS = 8  # each waits for one order before the next, so that there is work left at each kill
PATIENCE = 120.0  # seconds; and one more for each order

CONFIRMATIONS = "select count(distinct order_id) from confirmation"


async def storm(company: Company, orders: int) -> list[Count]:
    patience = PATIENCE + orders
    customers = Customers(company.doors.values())
    await make_topics(company.kafka)
    for name in company.names:
        company.start(name)
    await until(customers.welcome, "both doors are open", PATIENCE)
    say(f"{orders:,} orders, each posted {POSTS} times at once.")
    refs = [f"o-{number}" for number in range(orders)]
    begun = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for number in range(CUSTOMERS):
            group.create_task(customers.order(refs[number::CUSTOMERS]))
        for place, name in enumerate(company.names, 1):
            share = orders * place // (len(company.names) + 1)
            await until(partial(customers.served, share), f"{share} orders are answered", patience)
            company.kill(name)
            say(f"{time.monotonic() - begun:5.1f} s: {name} is killed, after {len(customers.answered)} orders")
            company.start(name)

    async def confirmed() -> bool:
        return await company.count(CONFIRMATIONS) >= orders

    try:
        await until(confirmed, "all orders are confirmed", patience)
        await until(lambda: all_read(company.kafka), "all messages are answered", patience)
    except AssertionError as error:
        say(str(error))  # the counts say what is missing
    say(f"{time.monotonic() - begun:5.1f} s: all is done; {customers.repeated} posts had no answer and were sent again")
    counts = await counted(company, customers, orders)
    await customers.close()
    return counts


def run(orders: int) -> list[Count]:
    with ExitStack() as stack:
        postgres = stack.enter_context(EmbeddedPostgres())
        migrate(postgres.dsn, "idemconsumer")
        with psycopg.connect(postgres.dsn, autocommit=True) as connection:
            connection.execute(TABLES)
        if (kafka := os.environ.get("IDEMCONSUMER_KAFKA")) is None:
            server = Kafka()
            stack.callback(server.close)
            server.start()
            kafka = server.address
        say(f"Postgres is on port {postgres.port}, Kafka on {kafka}, until the storm ends.")
        return asyncio.run(far_from(postgres.dsn, kafka, orders))


async def far_from(dsn: str, kafka: str, orders: int) -> list[Count]:
    async with away(dsn) as far:
        with closing(Company(dsn, far, kafka)) as company:
            return await storm(company, orders)


def say(text: str) -> None:
    print(text, flush=True)


def main() -> int:
    try:
        counts = run(int(sys.argv[1]) if len(sys.argv) > 1 else ORDERS)
    except (EmbeddedUnavailable, ServerMissing) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    say(f"\n{'':<10} {'wanted':>7} {'seen':>7} {'lost':>7} {'twice':>7}")
    for each in counts:
        say(f"{each.what:<10} {each.wanted:>7} {len(each.seen):>7} {each.lost:>7} {each.twice:>7}")
    passed = not any(each.lost or each.twice for each in counts)
    say("PASSED" if passed else "FAILED")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
