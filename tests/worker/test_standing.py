"""A message in whose handler a worker stands still ends as a dead letter, and takes nobody along (L37, L56)."""

from __future__ import annotations

import asyncio
import os
import sys

import psycopg
import pytest

from tests.support import forked
from tests.support.servers.postgres import migrated
from tests.support.waiting import until

pytestmark = [pytest.mark.kill, pytest.mark.slow]

INNOCENTS = 10


@pytest.mark.parametrize("sagas", [False, pytest.param(True, marks=pytest.mark.long)], ids=["no-sagas", "sagas"])
@pytest.mark.parametrize("killer", ["spins", "holds"])
async def test_a_message_in_which_its_worker_stands_still_is_a_dead_letter(
    database: str, killer: str, sagas: bool
) -> None:
    migrated(database, "idemconsumer")
    ids = [f"calm-{number}" for number in range(INNOCENTS)]
    ids.insert(INNOCENTS // 2, killer)
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute("create table applied (id text)")
        for each in ids:
            connection.execute("select idemconsumer.publish('orders', jsonb_build_object('id', %s::text))", (each,))
        process = await forked.start(
            *(sys.executable, "-m", "idemconsumer", "run", "tests.process.standing:app", "--max-restarts", "10"),
            env={**os.environ, "IDEMCONSUMER_DSN": database} | ({"SAGAS": "1"} if sagas else {}),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )

        def buried() -> bool:
            # What a dead worker held: else it comes again in 10 s.
            connection.execute("update idemconsumer.queue set visible_at = now() where visible_at > now()")
            return bool(connection.execute("select from idemconsumer.dead_letter").rowcount)

        def applied() -> list[str]:
            return sorted(row[0] for row in connection.execute("select id from applied"))

        try:
            await until(buried, "it is a dead letter", 120.0)
            await until(lambda: len(applied()) >= INNOCENTS, "the others are applied")
        finally:
            process.terminate()
            said, _ = await process.communicate()
        letters = connection.execute("select reason, body from idemconsumer.dead_letter").fetchall()
        assert [reason for reason, _ in letters] == ["killed_worker"], said.decode()
        assert killer.encode() in letters[0][1]
        assert applied() == sorted(set(ids) - {killer})
    spun, held = b'"event":"event loop blocked, exiting as if killed', b"no sign of life, killing"
    deaths = said.count(spun if killer == "spins" else held)
    assert deaths == 3, "one that was not known, one that was marked, and the one attempt"
