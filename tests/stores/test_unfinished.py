"""What is still to be done for requests is tried until it is done, or the process ends (H23)."""

from __future__ import annotations

import asyncio

import pytest

from idemconsumer.errors import StoreUnavailable
from idemconsumer.stores.unfinished import Unfinished
from tests.support.tuning import tuned
from tests.support.waiting import PATIENCE


async def test_an_act_that_swallows_the_cancellation_does_not_keep_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    tuned(monkeypatch, unfinished_pause=0.0)
    trying, left = asyncio.Event(), Unfinished()

    async def act() -> None:
        trying.set()
        try:
            await asyncio.sleep(PATIENCE)
        except asyncio.CancelledError:
            raise StoreUnavailable("as asyncio.wait_for of Python 3.11 may do") from None

    left.add(b"k", act)
    await trying.wait()
    tuned(monkeypatch, unfinished_patience=0.01)
    async with asyncio.timeout(PATIENCE):
        await left.close()
    assert not left.idle
