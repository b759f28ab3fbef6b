"""Of the model in `waiting`: the rows of one saga, their locks, and what a COMMIT does to them."""

from __future__ import annotations

from collections.abc import Iterator

from idemconsumer.rules.values import StepKind
from tests.model.scripts import NEVER, WAITING
from tests.model.waiting_world import (
    COMPLETED,
    DONE,
    FAILED,
    NOBODY,
    NONE,
    REJECTED,
    ROW_AFTER,
    STEP_WRITES,
    UNDOING,
    Rules,
    Scenario,
    Tx,
    World,
    more_at,
    set_at,
)


class Rows:
    """The saga's rows, and what locks them."""

    def __init__(self, rules: Rules, scenario: Scenario) -> None:
        self.rules = rules
        self.its = scenario
        self.call = next((i for i, ask in enumerate(scenario.asks) if ask.kind is StepKind.CALL), -1)

    def start(self) -> World:
        nothing = (0,) * len(self.its.asks)
        return World(nothing, nothing, nothing, nothing)

    # ----------------------------------------------------------------------------------------------------------- locks
    def _open(self, world: World) -> Iterator[Tx]:
        yield from (worker.tx for worker in world.workers if worker.tx is not None)
        yield from world.limbo

    def _blocked(self, world: World, lock: str) -> bool:
        """Whether the saga's row cannot be locked now."""
        if world.canceller == "locked" or world.person[0] == "locked" or world.sender.hit:
            return True
        return any("X" in (lock, tx.lock) for tx in self._open(world) if tx.lock)

    def _pausing(self, world: World) -> bool:
        return any(tx.kind == "pause" for tx in self._open(world))

    # ---------------------------------------------------------------------------------------------------------- writes
    def _apply(self, world: World, tx: Tx) -> World:
        """What COMMIT makes true."""
        kind, step = tx.kind, tx.step
        if kind == "look":
            return self._looked(world, tx)
        if kind in STEP_WRITES:
            world = world._replace(rows=set_at(world.rows, step, ROW_AFTER[kind]))
            if kind == "do":
                return world._replace(done=more_at(world.done, step))
            return world._replace(undone=more_at(world.undone, step)) if kind == "undo" else world
        usurped = world.usurped or (kind in ("park", "undoing") and world.cancel not in (0, tx.knows))
        if kind == "undoing":
            return world._replace(state=UNDOING, cancel=0, usurped=usurped)
        world = world._replace(owner=NOBODY, usurped=usurped)
        if kind == "park":
            return world._replace(parked=True)
        if kind == "release":
            return world._replace(due=world.clock, stale=False)
        if kind == "pause":
            waits = self.its.asks[step].kind is StepKind.WAIT
            return world._replace(due=tx.seen, stale=False, waits=waits)
        return world._replace(state=COMPLETED if kind == "complete" else FAILED, cancel=0)

    def _looked(self, world: World, tx: Tx) -> World:
        """`seen`: how the wait ended, or WAITING."""
        step, ask = tx.step, self.its.asks[tx.step]
        if world.rows[step] == NONE or not self.rules.end_once:
            until = ask.seconds if ask.seconds == NEVER else world.clock + ask.seconds
            world = world._replace(until=set_at(world.until, step, until))
            if world.began < 0:
                world = world._replace(began=world.clock)
        if tx.seen == WAITING or not self.rules.ending_once:
            return world._replace(rows=set_at(world.rows, step, WAITING))
        world = world._replace(rows=set_at(world.rows, step, tx.seen))
        if ask.kind is StepKind.WAIT and tx.seen == DONE:
            world = world._replace(answered=world.answered + 1)
            if self.rules.taken_with_end:
                return self._take_signal(world)
        return world

    def _take_signal(self, world: World) -> World:
        return world._replace(signals=max(0, world.signals - 1), inherited=max(0, world.inherited - 1))

    def _wait(self, world: World, step: int) -> int:
        """What a look finds now."""
        ask = self.its.asks[step]
        begun = world.rows[step] == WAITING and self.rules.end_once
        until = world.until[step] if begun else min(NEVER, world.clock + ask.seconds)
        if ask.kind is StepKind.WAIT and world.signals:
            return DONE
        if until <= world.clock:
            return DONE if ask.kind is StepKind.SLEEP else REJECTED
        return WAITING

    def _due(self, world: World, step: int) -> int:
        """When a saga that is given up now is due again."""
        if world.cancel and self.rules.request_due:
            return world.clock
        if self.its.asks[step].kind is StepKind.WAIT and world.signals:
            return world.clock
        return world.until[step] if self.rules.due_at_end else NEVER

    def _holds(self, world: World, me: int) -> bool:
        return world.owner == me and not world.expired[me]

    def _held(self, world: World) -> bool:
        return self._holds(world, 0) or self._holds(world, 1)

    def _freed(self, world: World) -> World:
        token = world.token + 1
        return world._replace(token=token, owner=NOBODY, parked=False, stale=False, due=world.clock, waits=False)
