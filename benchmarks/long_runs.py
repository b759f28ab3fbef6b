"""What grows with time: memory over a million messages, and the claim's cost with the number of records."""

from __future__ import annotations

import asyncio
import secrets
import shutil
from contextlib import ExitStack

import psycopg

from benchmarks._crew import LANES, crew
from benchmarks._loads import Load
from benchmarks._measure import Figure, Result, Spread, Subject, Table, Target, side_by_side
from benchmarks._sizes import OURS
from benchmarks._stage import Meter, Stage

_BYTES_PER_RECORD = 480  # of row, index, WAL and what the sort of the index needs, for a moment


async def million(stage: Stage) -> Result:
    """One process, one million messages; its memory after the first hundredth and at the end."""
    count = 20_000 if stage.quick else 1_000_000
    async with crew(stage) as team:
        with stage.database() as dsn:
            (first,) = await team.ask(OURS, Load(prefix="first", count=count // 100), dsn)
            stage.say(f"A million messages: begun with {first['resident'] / 1e6:.0f} MB")
            (rest,) = await team.ask(OURS, Load(prefix="rest", count=count), dsn)
            await team.close()
    figures = [
        Figure("at the start", "MB resident", Spread.of([first["resident"] / 1e6])),
        Figure("at the end", "MB resident", Spread.of([rest["resident"] / 1e6]), goal=150.0),
        Figure("rate", "messages/s", Spread.of([count / rest["seconds"]])),
    ]
    return Result("million", [Table("A million messages", figures, facts={"messages": count})])


async def records(stage: Stage) -> Result:
    """The same load with so many records of other keys in the table, side by side in one run."""
    wanted = [0, 200_000] if stage.quick else [0, 5_000_000, 50_000_000]
    sizes, skipped = fitting(wanted, shutil.disk_usage("/tmp").free)
    async with crew(stage) as team:
        with ExitStack() as stack:
            databases = {f"{size:,} records": (size, stack.enter_context(stage.database())) for size in sizes}
            for size, dsn in databases.values():
                if size:
                    stage.say(f"Records: making {size:,}")
                    await make_records(dsn, size)

            wal: dict[str, list[int]] = {name: [] for name in databases}

            def subject(name: str, dsn: str) -> Subject:
                async def measured(number: int) -> float:
                    await team.ask(OURS, Load(prefix=secrets.token_hex(3), count=2_000), dsn)
                    load = Load(prefix=secrets.token_hex(3), count=4_000 if stage.quick else 20_000)
                    meter = Meter(dsn)
                    await meter.begin()
                    (answer,) = await team.ask(OURS, load, dsn)
                    wal[name].append(round((await meter.end())["wal"] / load.count))
                    await team.close()
                    return float(answer["seconds"]) / load.count * 1e6

                return measured

            names = list(databases)
            table = await side_by_side(
                "A message's cost by the number of records",
                {name: subject(name, dsn) for name, (_, dsn) in databases.items()},
                [Target(name, names[0], 1.2, "at most") for name in names[1:]],
                rounds=2 if stage.quick else 5,
                say=stage.say,
                unit="µs a message",
                facts={"lanes": LANES, **skipped},
            )
    table.facts["bytes of WAL a message, round by round"] = wal
    return Result("records", [table])


def fitting(sizes: list[int], free: int) -> tuple[list[int], dict[str, str]]:
    """Those for which the disk has the room, and what is to be said of the others."""
    needed = {size: size * _BYTES_PER_RECORD for size in sizes}
    skipped = {
        f"{size:,} records": f"skipped, {most / 1e9:.0f} GB needed and {free / 1e9:.0f} GB free"
        for size, most in needed.items()
        if most > 0.7 * free
    }
    return [size for size, most in needed.items() if most <= 0.7 * free], skipped


async def make_records(dsn: str, count: int) -> None:
    """Random keys, as hashes are, in records of the usual width. The index is built at the end, in one sort, which
    saves most of the time; its pages are as full as those that keys were put into one by one."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("insert into idemconsumer.scope (name) values ('others')")
        connection.execute("alter table idemconsumer.record drop constraint record_pkey")
    middle = count // 2
    await asyncio.gather(*(asyncio.to_thread(_fill, dsn, *part) for part in ((1, middle), (middle + 1, count))))
    await asyncio.to_thread(_finish, dsn)


def _fill(dsn: str, first: int, last: int) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("set session_replication_role = replica")  # the guard would note each row until the commit
        connection.execute(
            "insert into idemconsumer.record (key, scope_id, state, fingerprint, canonical, changed_at)"
            " select sha256(int8send(n)), s.id, 3, sha256('x'), substring(sha256('x') for 16), clock_timestamp()"
            " from generate_series(%s::bigint, %s::bigint) n, idemconsumer.scope s where s.name = 'others'",
            (first, last),
        )


def _finish(dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("set maintenance_work_mem = '1GB'")
        connection.execute("alter table idemconsumer.record add primary key (key) with (fillfactor = 70)")
        connection.execute("vacuum analyze idemconsumer.record")
        connection.execute("checkpoint")
