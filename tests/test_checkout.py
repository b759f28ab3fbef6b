"""The checkout example: its gateway, its demonstration, and that the verdict would see what it is there for."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.checkout.demo import ACTS, Act, verdict
from examples.checkout.gateway import Declined, Gateway
from tests.support import ROOT


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Gateway]:
    gateway = Gateway(tmp_path / "gateway.sqlite")
    yield gateway
    gateway.close()


async def test_the_gateway_charges_a_key_once_and_answers_it_again(gateway: Gateway) -> None:
    first = await gateway.charge("k-1", "visa", 30)
    assert await gateway.charge("k-1", "visa", 30) == first == await gateway.find("k-1")
    assert await gateway.charge("k-2", "visa", 30) != first
    assert gateway.effects() == [("charge", "visa", 30)] * 2


async def test_the_gateway_remembers_a_failure(gateway: Gateway) -> None:
    with pytest.raises(Declined):
        await gateway.charge("k-1", "declined", 30)
    with pytest.raises(Declined):
        await gateway.charge("k-1", "visa", 30)  # the key was declined, whatever the card says now
    assert gateway.effects() == []


async def test_a_timeout_of_the_gateway_leaves_a_charge_behind(gateway: Gateway) -> None:
    with pytest.raises(TimeoutError):
        await gateway.charge("k-1", "timeout", 30)
    assert await gateway.find("k-1") == await gateway.charge("k-1", "timeout", 30)
    assert gateway.effects() == [("charge", "timeout", 30)]
    assert await gateway.find("k-2") is None


@pytest.mark.slow
@pytest.mark.kill
@pytest.mark.parametrize("acts", [ACTS[:4], pytest.param(ACTS, marks=pytest.mark.long)], ids=["one kill", "five kills"])
def test_every_order_happens_once_though_its_worker_is_killed_after_a_step(
    acts: list[Act],
    postgres18: object,  # skips, or fails under CI, where there is no embedded server
) -> None:
    play = f"from examples.checkout import demo; del demo.ACTS[{len(acts)}:]; sys.exit(asyncio.run(demo.main()))"
    played = subprocess.run(
        [sys.executable, "-c", f"import asyncio, sys; {play}"],
        cwd=ROOT, capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    assert played.returncode == 0, played.stdout + played.stderr
    kills = sum(act.kill is not None for act in acts)
    assert f"{kills} workers killed: everything happened exactly once" in played.stdout
    for act in acts:
        (told,) = [line for line in played.stdout.splitlines() if line.startswith(f"{act.order.id} ")]
        assert (f"killed at {act.kill!r}" in told) == (act.kill is not None)


# ---------------------------------------------------------------------------------------------------------- the verdict
ENDS = {act.order.id: act.ends for act in ACTS}
CHARGES = [("charge", act.order.card, 30) for act in ACTS if act.ends != "declined"] + [("refund", "visa", 30)]
MOVED = [(act.order.id, -1) for act in ACTS] + [(act.order.id, 1) for act in ACTS if act.ends != "dispatched"]
PARCELS = [act.order.id for act in ACTS if act.ends == "dispatched"]


def test_the_verdict_is_good_when_everything_happened_once() -> None:
    assert verdict(ACTS, ENDS, CHARGES, MOVED, PARCELS) == []


def test_the_verdict_sees_what_happened_twice_or_not_at_all() -> None:
    def wrong(*, ends: object = None, charges: object = None, moved: object = None, parcels: object = None) -> str:
        given = (ends or ENDS, charges or CHARGES, moved or MOVED, parcels or PARCELS)
        (said,) = verdict(ACTS, *given)  # type: ignore[arg-type]
        return said

    assert wrong(ends=ENDS | {"plain": "declined"}) == "plain ended declined, not dispatched"
    assert wrong(charges=[*CHARGES, ("charge", "slow", 30)]) == "2 charges of card slow, not 1"
    assert wrong(charges=CHARGES[:-1]) == "0 refunds of card visa, not 1"
    assert wrong(charges=[*CHARGES, ("charge", "declined", 30)]) == "1 charges of card declined, not 0"
    assert wrong(moved=[*MOVED, ("plain", -1)]) == "plain: stock was moved 2 times, by -2 in all"
    assert wrong(moved=MOVED[:-1]) == "killed-5: stock was moved 1 times, by -1 in all"
    assert wrong(parcels=[*PARCELS, "plain"]) == "plain was dispatched 2 times"
    assert wrong(parcels=PARCELS[1:]) == "plain was dispatched 0 times"
