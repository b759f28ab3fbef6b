"""R3: what a claim does not insert is read in a second statement, which sees what was committed meanwhile."""

from __future__ import annotations

import asyncio
from typing import Final

import psycopg
from msgspec.structs import replace

from idemconsumer.rules.claim import Claim
from idemconsumer.rules.values import Mark, Record, State
from idemconsumer.stores.joined import PostgresStore
from tests.support.ledger import Ledger, OpenStore

FIRST = Claim(b"a" * 32, "shop/test", b"f" * 32, 3600.0)
SECOND = Claim(b"b" * 32, "shop/test", b"f" * 32, 3600.0)
BLOCKED: Final = "select 1 from pg_stat_activity where wait_event = 'transactionid' and query ~ 'claim'"


async def test_a_record_that_is_committed_while_the_claim_is_under_way_is_found(
    ledger: Ledger, store: PostgresStore, open_store: OpenStore
) -> None:
    # Only a writer that takes no advisory lock makes the claim wait, so that something can happen in the middle of it.
    stranger = await psycopg.AsyncConnection.connect(ledger.dsn)
    await stranger.execute("insert into idemconsumer.record values (%s, 1, 3, null, clock_timestamp())", [FIRST.key])
    async with store.transaction(group=1) as claims:
        claiming = asyncio.create_task(claims.claim([FIRST, SECOND]))
        async with asyncio.timeout(30):
            while not ledger.run(BLOCKED):
                await asyncio.sleep(0.01)

        rival = await open_store(ledger.dsn)
        async with rival.transaction(group=1) as theirs:
            assert await theirs.claim([SECOND]) == [Mark.CLAIMED]
            await theirs.complete([], [])
        await stranger.rollback()

        assert await claiming == [Mark.CLAIMED, Record(State.COMPLETED, SECOND.fingerprint)]
    await stranger.close()


async def test_what_waits_for_this_very_message_is_busy_while_somebody_has_its_key(
    ledger: Ledger, store: PostgresStore
) -> None:
    """Its message would be taken for a duplicate, and be lost (H46)."""
    async with store.transaction(group=1) as claims:
        await claims.claim([FIRST], state=State.PENDING)
        await claims.complete([], [])
    token = b"t" * 16
    ledger.run(
        "insert into idemconsumer.accepted (key, app, handler, token) values (%s, 'a', 'h', %s)", [FIRST.key, token]
    )
    lock = int.from_bytes(FIRST.key[:8], signed=True)
    async with await psycopg.AsyncConnection.connect(ledger.dsn) as somebody:
        await somebody.execute("select pg_advisory_xact_lock(%s)", [lock])
        async with store.transaction(group=2) as claims:
            assert await claims.claim([replace(FIRST, token=token), SECOND]) == [Mark.BUSY, Mark.CLAIMED]
        async with store.transaction(group=1) as claims:
            assert await claims.claim([FIRST]) == [Record(State.PENDING, FIRST.fingerprint)]
    for other in (replace(FIRST, token=b"u" * 16), replace(FIRST, token=token, fingerprint=b"g" * 32)):
        async with store.transaction(group=1) as claims:
            assert await claims.claim([other]) == [Record(State.PENDING, FIRST.fingerprint)]
    async with store.transaction(group=1) as claims:
        assert await claims.claim([replace(FIRST, token=token)]) == [Mark.CLAIMED]
        await claims.complete([], [])
    assert ledger.run("select token from idemconsumer.accepted") == [(None,)]
