"""What several ask for at the same moment: the recorded steps of sagas that resume (L63), and records."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from idemconsumer.errors import StoreUnavailable
from idemconsumer.message.message import StoredResult
from idemconsumer.rules.values import State
from idemconsumer.stores.shared_reads import Looks, SharedReads

MEGABYTE = 1 << 20


class Table:
    """A pool with one recorded step for each key."""

    def __init__(self, *, down: bool = False) -> None:
        self.asked: list[tuple[list[bytes], int]] = []
        self.down = down

    async def read(self, name: str, params: dict[str, Any]) -> list[tuple[Any, ...]]:
        assert name == "steps"
        self.asked.append((params["keys"], params["window"]))
        await asyncio.sleep(0.001)
        if self.down:
            raise StoreUnavailable("it is down")
        return [(key, key.decode(), 1, 2, False, False, 1, 1, b"out", "text", 0) for key in params["keys"]]


def reads_of(table: Table) -> SharedReads:
    return SharedReads(table)  # type: ignore[arg-type]


async def test_what_sagas_ask_for_at_once_is_one_statement() -> None:
    """They share the window, so that together they have no more in memory than one has."""
    table = Table()
    reads = reads_of(table)
    found = await asyncio.gather(*(reads.steps(f"{n}".encode(), 4 * MEGABYTE) for n in range(4)))
    assert table.asked == [([b"0", b"1", b"2", b"3"], MEGABYTE)]
    assert [(row.name, row.output) for (row,) in found] == [(f"{n}", StoredResult(b"out", "text")) for n in range(4)]


async def test_who_asks_while_others_are_answered_is_next_and_who_is_alone_waits_for_nobody() -> None:
    table = Table()
    reads = reads_of(table)
    first = asyncio.create_task(reads.steps(b"first", MEGABYTE))
    while not table.asked:
        await asyncio.sleep(0)
    late = [asyncio.create_task(reads.steps(key, MEGABYTE)) for key in (b"a", b"b")]
    other = asyncio.create_task(reads.steps(b"other", 0))
    await asyncio.gather(first, *late, other)
    assert table.asked == [([b"first"], MEGABYTE), ([b"a", b"b"], MEGABYTE // 2), ([b"other"], 0)]


async def test_an_outage_is_told_to_each_and_a_saga_that_is_cancelled_costs_the_others_nothing() -> None:
    down = reads_of(Table(down=True))
    told = await asyncio.gather(*(down.steps(key, 0) for key in (b"a", b"b")), return_exceptions=True)
    assert [type(each) for each in told] == [StoreUnavailable] * 2
    assert told[0] is not told[1]
    reads = reads_of(Table())
    cancelled, kept = (asyncio.create_task(reads.steps(key, 0)) for key in (b"a", b"b"))
    await asyncio.sleep(0)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    assert [row.name for row in await kept] == ["b"]


class Records:
    """A pool with a record that has ended for each key but one."""

    def __init__(self) -> None:
        self.asked: list[list[bytes]] = []

    async def look(self, name: str, params: dict[str, Any]) -> list[tuple[Any, ...]]:
        assert name == "read"
        self.asked.append(params["keys"])
        await asyncio.sleep(0.001)
        there = [key for key in params["keys"] if key != b"none"]
        return [(key, State.COMPLETED, key, None, None, None, None, None) for key in there]


async def test_records_that_are_asked_for_at_once_are_one_statement() -> None:
    pool = Records()
    looks = Looks(pool)  # type: ignore[arg-type]
    keys = [b"a", b"none", b"b", b"a"]
    found = await asyncio.gather(*map(looks.record, keys))
    assert pool.asked == [keys]
    assert [each and each.fingerprint for each in found] == [b"a", None, b"b", b"a"]
