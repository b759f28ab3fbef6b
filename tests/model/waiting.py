"""A model of sagas that wait, are signalled, cancelled and decided about, and that workers of two builds share.

As in `leased`, an action is what is atomic in Postgres or outside of it, and a paused worker is one whose lease runs
out and who goes on late. What a worker does next is decided by the engine's own rules (`scripts`); what its statements
do to the rows is modelled. A saga has begun already; how it is claimed is in `leased`. There are two workers, and,
where a scenario has them, a sender of signals, somebody who cancels, somebody who says how a call ended, and a clock.

An error of a step may be the last one that is allowed, so attempts are not counted. Left out: branches, in which
several waits are open at once, and the delay before the next attempt.
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.model.explorer import Explored, walk
from tests.model.scripts import NEVER, WAITING
from tests.model.waiting_others import Others
from tests.model.waiting_promises import broken
from tests.model.waiting_workers import Workers
from tests.model.waiting_world import COMPLETED, FAILED, INTENT, PARKED, UNDO_INTENT, Move, Rules, Scenario, World


class Model(Workers, Others):
    def successors(self, world: World) -> Iterator[Move]:
        for place, tx in enumerate(world.limbo):
            rest = world._replace(limbo=world.limbo[:place] + world.limbo[place + 1 :])
            yield f"server applies the lost {tx.kind}", self._apply(rest, tx)
            yield f"server drops the lost {tx.kind}", rest
        ends = [end for row, end in zip(world.rows, world.until, strict=True) if row == WAITING and end != NEVER]
        if any(end > world.clock for end in ends) and world.clock < self.its.clock:
            yield "time passes", world._replace(clock=world.clock + 1)
        yield from self._sends(world)
        yield from self._cancels(world)
        yield from self._decides(world)
        yield from self._begins_anew(world)
        faults = world.faults < self.its.faults
        worse = world._replace(faults=world.faults + 1)
        for me in (0, 1):
            if world.left[me]:
                continue
            for label, after in self._works(world, me):
                yield f"{'AB'[me]} {label}", after
            if faults:
                for label, after in self._fails(worse, me):
                    yield f"{'AB'[me]} {label}", after


def _same(world: World) -> World:
    """The same state with small numbers, as in `leased`."""
    first, second = (
        worker if worker.token == 0 else worker._replace(token=int(worker.token == world.token))
        for worker in world.workers
    )
    return world._replace(token=min(world.token, 1), workers=(first, second))


def explore(rules: Rules, scenario: Scenario) -> Explored:
    model = Model(rules, scenario)

    def end(world: World) -> int | None:
        if world.parked and not (scenario.decides and {INTENT, UNDO_INTENT} & set(world.rows)):
            return PARKED
        if world.reborn:
            return COMPLETED
        return world.state if world.state in (COMPLETED, FAILED) else None

    return walk(
        model.start(),
        model.successors,
        broken=lambda before, after: broken(scenario, before, after),
        same=_same,
        end=end,
    )
