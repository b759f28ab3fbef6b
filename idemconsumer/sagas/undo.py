"""Undo a rejected saga: its finished steps from the last to the first, each with a checkpoint (L7)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from idemconsumer.errors import SagaChanged
from idemconsumer.rules.saga import parked, to_undo, undecided
from idemconsumer.rules.values import StepRow
from idemconsumer.sagas.outputs import Outputs
from idemconsumer.sagas.run import SagaInterrupted
from idemconsumer.sagas.step import StepSpec
from idemconsumer.sagas.steps import Steps
from idemconsumer.user_code.cancellation import run_isolated


class NotUndone(Exception):
    """`error` prevents the undo: an error of the undo of step `spec`, or of the handler before it has requested all
    steps. `place` tells which. `progressed`: another step was undone before, in this attempt."""

    def __init__(
        self, place: str, error: BaseException, spec: StepSpec | None = None, *, progressed: bool = False
    ) -> None:
        super().__init__(place)
        self.place = place
        self.error = error
        self.spec = spec
        self.progressed = progressed


async def undo_all(steps: Steps, asked: Mapping[str, StepSpec], cause: BaseException | None) -> None:
    """Undo every step that must be undone, with the undos of the steps that this run requested (`asked`).

    `cause` ended the handler before it had requested all its steps; None: it has requested all. Raises NotUndone,
    NotCalled, ChildRuns, SagaChanged if the handler no longer has an undo for a step, and errors of the store that
    leave the outcome undecided.
    """
    todo = plan(await steps.rows(), asked, cause)
    recorded = Outputs(steps.store, steps.saga.key, [row for row, _ in todo])
    progressed = False
    for row, spec in todo:
        _, error = await run_isolated(steps.undo(spec, row, recorded))
        if error is not None:
            if undecided(error) or parked(error) or not isinstance(error, Exception | SagaInterrupted):
                raise error
            raise NotUndone(f"undo of {spec.name!r}", error, spec, progressed=progressed)
        progressed = True


def plan(
    rows: Iterable[StepRow], asked: Mapping[str, StepSpec], cause: BaseException | None = None
) -> list[tuple[StepRow, StepSpec]]:
    """The steps to undo, in order, and how. Raises NotUndone, and SagaChanged if the handler will not request a step.
    `cause` as in `undo_all`."""
    todo = to_undo(rows, {spec.name for spec in asked.values() if spec.has_undo})
    for row in reversed(todo):
        spec = asked.get(row.name)
        if spec is None and cause is not None:
            raise NotUndone(f"the handler, before step {row.name!r}", cause)
        if spec is None or spec.undo is None:
            raise SagaChanged(f"step {row.name!r} has to be undone, and the handler no longer has its `undo=`")
    return [(row, asked[row.name]) for row in todo]
