"""Undo a rejected saga: its finished steps from the last to the first, each checkpointed (L7)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from idemconsumer.errors import SagaChanged
from idemconsumer.ports.leases import LeasedSaga, LeaseStore
from idemconsumer.ports.observer import SagaPoint
from idemconsumer.rules.saga import UNDECIDED, to_undo
from idemconsumer.rules.values import StepKind, StepRow, StepState
from idemconsumer.sagas.functions import StepFunctions
from idemconsumer.sagas.run import SagaInterrupted
from idemconsumer.sagas.step import StepCall, StepSpec, step_key
from idemconsumer.user_code.call import call_in_transaction, call_user_code
from idemconsumer.user_code.cancellation import run_isolated


class NotAskedFor(Exception):
    """The handler failed before it asked for step `name`, so that step's undo is not known."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


class NotUndone(Exception):
    """The undo of step `name` failed with `error`. `progressed`: another one was undone before it, in this attempt."""

    def __init__(self, name: str, error: BaseException, *, progressed: bool) -> None:
        super().__init__(name)
        self.name = name
        self.error = error
        self.progressed = progressed


class Undo:
    """Undoes the steps of one held saga, which is UNDOING."""

    def __init__(
        self, store: LeaseStore, saga: LeasedSaga, functions: StepFunctions, at: Callable[[SagaPoint], None]
    ) -> None:
        self._store = store
        self._saga = saga
        self._functions = functions
        self._at = at

    async def run(self, asked: Mapping[str, StepSpec], *, replayed: bool) -> None:
        """Undo every step that has to be undone, with the undos of the steps that this run `asked` for.

        `replayed`: the handler has asked for all the steps that it will. Raises NotUndone, NotAskedFor, SagaChanged
        when the handler no longer has an undo for a step, and the store's errors that leave the outcome undecided.
        """
        todo = _plan(await self._store.steps(self._saga.key), asked, replayed=replayed)
        progressed = False
        for row, spec in todo:
            _, error = await run_isolated(self._undo(row, spec))
            if isinstance(error, UNDECIDED) or not isinstance(error, Exception | SagaInterrupted | None):
                raise error
            if error is not None:
                raise NotUndone(row.name, error, progressed=progressed)
            progressed = True

    async def _undo(self, row: StepRow, spec: StepSpec) -> None:
        output = spec.decode(row.output)
        self._at(SagaPoint.UNDOING)
        if row.kind is StepKind.TX:
            await self._undo_transaction(row, spec, output)
        else:
            await self._undo_call(row, spec, output)
        self._at(SagaPoint.UNDONE)

    async def _undo_transaction(self, row: StepRow, spec: StepSpec, output: object) -> None:
        assert spec.undo is not None
        functions, gets = self._functions, "tx and the step's output"
        async with self._store.step(self._saga, row.name, has_undo=True, undo=True) as opened:
            undoing = functions.begin(spec.undo, opened.tx(), output, *spec.args, gets=gets)
            await call_in_transaction(opened, undoing, functions.limit_in_transaction(), lambda _: opened.check())
            await opened.finish(None, overlapped=False)

    async def _undo_call(self, row: StepRow, spec: StepSpec, output: object) -> None:
        assert spec.undo is not None
        saga, functions, gets = self._saga, self._functions, "step and the step's output"
        attempt = await self._store.intend(saga, row.name, has_undo=True, undo=True)
        call = StepCall(step_key(saga.scope, saga.key, row.name, undo=True), attempt)
        undoing = functions.begin(spec.undo, call, output, *spec.args, gets=gets)
        await call_user_code(undoing, functions.limit())
        self._at(SagaPoint.CALLED)
        await self._store.record(
            saga, row.name, row.kind, StepState.UNDONE, None, has_undo=True, overlapped=row.overlapped
        )


def _plan(rows: Iterable[StepRow], asked: Mapping[str, StepSpec], *, replayed: bool) -> list[tuple[StepRow, StepSpec]]:
    """What to undo, in order, and how. Raises NotAskedFor, and SagaChanged when the handler will not ask for it."""
    todo = to_undo(rows)
    for row in reversed(todo):
        spec = asked.get(row.name)
        if spec is None and not replayed:
            raise NotAskedFor(row.name)
        if spec is None or spec.undo is None:
            raise SagaChanged(f"step {row.name!r} has to be undone, and the handler no longer says how")
    return [(row, asked[row.name]) for row in todo]
