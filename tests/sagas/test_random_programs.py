"""Random programs, each straight and disturbed: both come to the same end, and no run sees another order (L72 to L75).

`SEED=… pytest -m long -s` begins with another program. One that fails is shrunk, and printed with what is wrong.
"""

from __future__ import annotations

import json
import logging
import os
import random
import time
from collections.abc import AsyncIterator, Iterator
from typing import Final

import pytest

from tests.sagas.programs.disturbed import Theatre
from tests.sagas.programs.judged import consistent, wrong
from tests.sagas.programs.source import Program, make, smaller
from tests.support.sagas import Bench, Station

SEED: Final = int(os.environ.get("SEED", "0"))
SHORT: Final = 3.0  # seconds
SHRINKING: Final = 60.0

# What went wrong once, shrunk.
FOUND: Final = {
    "a tx beside a refusal": """[["group", [[["tx", "t1", true]], [["refuse", "r2", "call", false]]], true, 3],
        ["loop", "l3", "tx", true]]""",
    "a call in a group within the group": """[["group", [[["group", [[["call", "c1", true]]], true, 4]],
        [["refuse", "r2", "call", false]]], true, 3]]""",
    "two steps in groups within the group": """[["group", [[["group", [[["tx", "t1", true], ["call", "c2", false]],
        [["wait", "w3", false], ["first", "f4", ""]]], true, 4]], [["refuse", "r5", "call", false]]], true, 3],
        ["loop", "l6", "tx", true]]""",
    "a group in a stopped all": """[["all", [[["refuse", "r1", "call", false]],
        [["group", [[["flaky", "f2", "tx", "retry"]]], false, 4]]], true, 2], ["loop", "l3", "tx", false]]""",
    "a wait in a stopped all": """[["all", [[["refuse", "r1", "call", false]], [["wait", "w2", false]]], true, 4],
        ["loop", "l3", "call", true], ["flaky", "f4", "call", "error"], ["tx", "t5", true]]""",
    "a first that is recorded while a refusal cuts it off": """
        [["sleep", "s1"], ["patched", "p2"], ["as_completed", [[["call", "c3", false]], [["gather", [[["turns", 3],
        ["refuse", "r5", "tx", true], ["call", "c6", true]], [["first", "f7", ""], ["flaky", "f8", "call",
        "retry"]], [["refuse", "r9", "call", true], ["call", "c10", true], ["refuse", "r11", "tx", true]], [["tx",
        "t12", true], ["turns", 3]]], true, 2]], [["refuse", "r14", "call", true]], []], true, 1], ["loop", "l15",
        "call", true]]""",
    "waits in a gather within a gather that is refused": """
        [["wait", "w1", false], ["gather", [[["gather", [[["sleep", "s2"]], [["wait", "w3", false]], [["call",
        "c4", true], ["tx", "t5", false]], [["first", "f6", ""]]], false, 4], ["call", "c7", true]], [["refuse",
        "r8", "tx", true]]], true, 1], ["group", [[["tx", "t9", true]], [["turns", 1], ["turns", 2]]], true, 1],
        ["group", [[["call", "c12", false]], [["tx", "t13", false], ["tx", "t14", true]], [], []], true, 2],
        ["loop", "l15", "tx", true], ["reject"]]""",
    "a refusal in one of four branches of an all": """
        [["flaky", "f1", "call", "error"], ["all", [[["refuse", "r2", "call", false]], [["wait", "w3", false],
        ["turns", 2]], [["refuse", "r5", "call", true]], [["wait", "w6", false], ["as_completed", [[["items", "i7",
        ["h", "b", "c"]], ["tx", "t8", true]], [["first", "f9", ""]]], true, 4], ["child", "c10", true, true]]],
        true, 4], ["loop", "l11", "call", true], ["gather", [[["first_completed", [[["tx", "t12", true], ["refuse",
        "r13", "tx", false], ["call", "c14", false]], [["flaky", "f15", "tx", "error"]]], true, 1]], [], []], true,
        3], ["loop", "l16", "call", false], ["reject"]]""",
}


@pytest.fixture
async def theatre(bench: Bench, one: Station, two: Station, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Theatre]:
    monkeypatch.setenv("IDEMCONSUMER_DSN", bench.dsn)
    theatre = Theatre(bench, [one, two])
    yield theatre
    await theatre.app.close()


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Each disturbance would be logged with a traceback."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


async def differences(theatre: Theatre, program: Program, seed: int) -> list[str]:
    theatre.chosen.seed(seed)
    try:
        straight = await theatre.play(program, 0)
        if found := consistent(straight):
            return [f"straight: {each}" for each in found]
        return wrong(program, straight, await theatre.play(program, random.Random(seed).randint(1, 4)))
    except TimeoutError:
        return ["it did not end"]


async def check(theatre: Theatre, program: Program, seed: int) -> None:
    if not (found := await differences(theatre, program, seed)):
        return
    end, least, again = time.monotonic() + SHRINKING, program, True
    while again:
        again = False
        for less in smaller(least):
            if time.monotonic() < end and less and (its := await differences(theatre, less, seed)):
                least, found, again = less, its, True
                break
    pytest.fail(f"seed {seed}, {json.dumps(least)}, {theatre.disturbance.done}: {found}")


@pytest.mark.parametrize("program", FOUND.values(), ids=FOUND)
async def test_what_went_wrong_once(theatre: Theatre, program: str) -> None:
    for seed in range(3):
        await check(theatre, json.loads(program), seed)


async def test_a_disturbed_run_comes_to_the_end_of_a_straight_one(theatre: Theatre) -> None:
    end, seed = time.monotonic() + SHORT, SEED
    while time.monotonic() < end:
        await check(theatre, make(seed), seed)
        seed += 1


@pytest.mark.long
async def test_two_thousand_sagas(theatre: Theatre) -> None:
    for seed in range(SEED, SEED + 1000):  # twice each
        await check(theatre, make(seed), seed)
