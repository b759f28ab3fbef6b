"""What is over is free at once: a large body does not stay until a garbage collection (D8)."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from idemconsumer import App, Message, Tx
from tests.support.tuning import tuned
from tests.support.workers import Bench, Item, note

QUEUE = "free_at_once"  # no other test's: those leave messages as well


@pytest.fixture
def uncollected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize(
    ("body", "counts"),
    [
        (b'{"id": "N"}', {"applied": 20}),
        (b'{"id": "a"}', {"applied": 1, "duplicate": 19}),
        (b'{"id": "a", "entity": "N"}', {"applied": 1, "conflict": 19}),
        (b"{N", {"dead": 20, "retrying": 20}),
        (b'{"entity": "N"}', {"dead": 20, "retrying": 20}),
        (b'{"id": "N' + b"x" * 2_000 + b'"}', {"dead": 20}),
    ],
    ids=["applied", "duplicates", "conflicts", "undecodable", "without a key", "oversized"],
)
@pytest.mark.usefixtures("uncollected")
async def test_no_message_stays_until_a_garbage_collection(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, body: bytes, counts: dict[str, int]
) -> None:
    tuned(monkeypatch, failures_in_a_row=1_000)  # else those that cannot be read would wait for one that can (D25)
    app = App("shop")

    @app.idempotent_handler(f"memory:{QUEUE}", key="id")
    async def handle(item: Item, tx: Tx) -> None:
        await note(tx, item)

    await bench.publish(QUEUE, *(body.replace(b"N", b"%d" % n) for n in range(20)))
    worker = await bench.until_empty(app, max_message_bytes=1_000)
    assert worker.counts == counts
    ours = [each for each in gc.get_objects() if type(each) is Message and each.source == f"memory:{QUEUE}"]
    assert [each.position for each in ours] == []
