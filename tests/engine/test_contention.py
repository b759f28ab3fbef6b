"""Contention is free, with pauses that grow, and has an end (B3, B15)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from idemconsumer import Tx, idempotent_handler
from idemconsumer.engine import evidence
from idemconsumer.engine.engine import Engine
from idemconsumer.rules.verdicts import contention_pause
from idemconsumer.stores.joined import PostgresStore
from tests.support.collisions import a_lock_is_taken, collide
from tests.support.ledger import SOURCE, Ledger, kinds, to_the_end, works, write

HOUR = 3_600.0
Clock = SimpleNamespace


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Of the streaks alone, in seconds."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(evidence, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


@idempotent_handler(SOURCE, key="id", group_size=8, max_attempts=2)
async def hit(order: dict[str, Any], tx: Tx) -> None:
    await write(tx, order["id"])
    if order["id"] == "bad":
        await collide(tx)


async def test_what_collides_for_an_hour_ends_and_nothing_else_does(
    ledger: Ledger, engine: Engine, clock: Clock
) -> None:
    good, bad, behind = works(hit, "good", "bad", "behind")
    with a_lock_is_taken(ledger.dsn):
        assert kinds(await engine.run([good, bad, behind])) == ["applied"]
        for clock.now in (0.0, 10.0, HOUR - 1):
            assert [outcome.reason for outcome in await engine.run([bad, behind])] == ["contention"]
        clock.now = HOUR
        outcomes = await to_the_end(engine, [bad, behind])
    assert (kinds(outcomes), outcomes[0].reason) == (["dead", "applied"], "contended")
    assert (ledger.effects, ledger.attempts, ledger.letters) == (["behind", "good"], [], [("contended", 1)])
    ((error, attempts),) = ledger.run("select error, attempts from idemconsumer.dead_letter")
    assert "runs in 60 minutes" in error
    assert "55P03" in error
    assert attempts == 0


async def test_the_hour_of_a_message_goes_on_when_its_broker_delivers_it_again(
    ledger: Ledger, engine: Engine, clock: Clock
) -> None:
    with a_lock_is_taken(ledger.dsn):
        assert (await engine.process(*works(hit, "bad"))).reason == "contention"
        clock.now = HOUR
        assert (await engine.process(*works(hit, "bad"))).reason == "contended"


@pytest.mark.parametrize("between", ["a failure", "a run that is applied"])
async def test_an_hour_is_one_of_nothing_but_collisions(
    ledger: Ledger, engine: Engine, clock: Clock, between: str
) -> None:
    @idempotent_handler(SOURCE, key="id", max_attempts=5)
    async def act(order: dict[str, Any], tx: Tx) -> None:
        match acts.pop(0):
            case "collides":
                await collide(tx)
            case "fails":
                raise ValueError

    acts = ["collides", "fails" if between == "a failure" else "is applied", "collides"]
    with a_lock_is_taken(ledger.dsn):
        reasons = [(await engine.process(*works(act, 1))).reason]
        clock.now = HOUR - 1
        reasons.append((await engine.process(*works(act, 1))).reason)
        clock.now = HOUR + 1
        if between != "a failure":
            ledger.clear()  # its record is pruned, and it comes once more
        reasons.append((await engine.process(*works(act, 1))).reason)
    assert (reasons[0], reasons[2], ledger.letters) == ("contention", "contention", [])


async def test_an_hour_goes_on_while_another_worker_holds_the_key(
    ledger: Ledger, store: PostgresStore, clock: Clock
) -> None:
    """A message that was busy has not run, whatever was committed beside it."""
    engine, (bad,) = Engine(store), works(hit, "bad")
    assert bad.call is not None
    with a_lock_is_taken(ledger.dsn):
        assert (await engine.process(bad)).reason == "contention"
        clock.now = HOUR
        async with store.transaction(group=1) as rival:
            await rival.claim([bad.call.claim])
            assert kinds(await engine.run([*works(hit, "good"), bad], defer=True)) == ["applied", "busy"]
        assert (await engine.process(bad)).reason == "contended"


def test_pauses_are_short_at_first_and_grow_to_half_a_minute() -> None:
    assert [round(contention_pause(n, 0.0), 3) for n in (1, 2, 5, 10)] == [0.024, 0.029, 0.05, 0.124]
    pauses = [contention_pause(n, 0.5) for n in range(1, 60)]
    assert pauses == sorted(pauses)
    assert 60 < sum(pauses[:40]) < 300, "half a minute is reached within minutes"
    assert contention_pause(10_000, 0.999) <= 30 < 2 * contention_pause(10_000, 0.0) + 0.1
