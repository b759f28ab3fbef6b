"""Undo a rejected saga: its finished steps from the last to the first, each checkpointed (L7)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any
from uuid import UUID

from idemconsumer.errors import SagaChanged, UnknownEffect
from idemconsumer.ports.handler import Child, Done, NotDone
from idemconsumer.ports.leases import LeasedSaga
from idemconsumer.ports.observer import SagaPoint
from idemconsumer.rules.saga import parked, to_undo, undecided
from idemconsumer.rules.values import State, StepKind, StepRow, StepState
from idemconsumer.sagas.children import ChildRuns, StartSpec, check_circle
from idemconsumer.sagas.functions import StepFunctions
from idemconsumer.sagas.probes import Probes
from idemconsumer.sagas.reconcile import ask_remote_of_undo
from idemconsumer.sagas.recorded import Outputs
from idemconsumer.sagas.run import SagaInterrupted
from idemconsumer.sagas.step import StepSpec, step_key
from idemconsumer.stores.leases import PostgresLeases
from idemconsumer.user_code.call import call_in_transaction, call_user_code
from idemconsumer.user_code.cancellation import run_isolated


class NotAskedFor(Exception):
    """The handler failed before it asked for step `name`, so that step's undo is not known."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


class NotUndone(Exception):
    """The undo of step `spec` failed with `error`. `progressed`: another one was undone before it, in this attempt."""

    def __init__(self, spec: StepSpec, error: BaseException, *, progressed: bool) -> None:
        super().__init__(spec.name)
        self.spec = spec
        self.error = error
        self.progressed = progressed


class Undo:
    """Undoes the steps of one held saga, which is UNDOING."""

    def __init__(
        self,
        store: PostgresLeases,
        saga: LeasedSaga,
        functions: StepFunctions,
        probes: Probes,
        at: Callable[[SagaPoint], None],
    ) -> None:
        self._store = store
        self._saga = saga
        self._functions = functions
        self._probes = probes
        self._at = at

    async def run(self, asked: Mapping[str, StepSpec], *, replayed: bool) -> None:
        """Undo every step that has to be undone, with the undos of the steps that this run `asked` for.

        `replayed`: the handler has asked for all the steps that it will. Raises NotUndone, NotAskedFor, Held,
        SagaChanged when the handler no longer has an undo for a step, and the store's errors that leave the outcome
        undecided.
        """
        todo = plan(await self._store.steps(self._saga.key), asked, replayed=replayed)
        recorded = Outputs(self._store, self._saga.key, [row for row, _ in todo])
        progressed = False
        for row, spec in todo:
            _, error = await run_isolated(self._undo(row, spec, recorded))
            if error is not None:
                if undecided(error) or parked(error) or not isinstance(error, Exception | SagaInterrupted):
                    raise error
                raise NotUndone(spec, error, progressed=progressed)
            progressed = True

    async def _undo(self, row: StepRow, spec: StepSpec, recorded: Outputs) -> None:
        output = spec.decode(await recorded.of(row))
        self._at(SagaPoint.UNDOING)
        if isinstance(spec, StartSpec):
            spec = await self._stop_child(spec, output)
        assert spec.undo is not None
        attempt = None if row.kind is StepKind.TX else row.attempt + 1
        async with self._probes.trying(spec.undo, self._saga):
            with self._functions.tracing.step("undo", row.name, attempt):
                if row.kind is StepKind.TX:
                    await self._undo_transaction(row, spec, output)
                else:
                    await self._undo_call(row, spec, output)
        self._at(SagaPoint.UNDONE)

    async def _stop_child(self, spec: StartSpec, child: Child[Any]) -> StartSpec:
        """What is left to undo of it, once it has ended (L49), if this saga has begun it (L80). Raises ChildRuns."""
        key = bytes.fromhex(child.id)
        ended = await spec.stop(self._store, self._saga, child)
        if ended is State.PROCESSING:
            check_circle(spec.name, child.id, await self._store.kinship(self._saga.key, key))
            await spec.cancel(child)
            ended = await spec.stop(self._store, self._saga, child)
        if ended is State.PROCESSING:
            raise ChildRuns(key)
        return spec if ended is State.COMPLETED else spec.without_undo()

    async def _undo_transaction(self, row: StepRow, spec: StepSpec, output: object) -> None:
        assert spec.undo is not None
        functions, gets = self._functions, "tx and the step's output"
        seconds = functions.seconds(spec.limits.timeout)
        async with self._store.step(self._saga, row.name, has_undo=True, undo=True, timeout=seconds) as opened:
            undoing = functions.begin(spec.undo, opened.tx(functions.habits), output, *spec.args, gets=gets)
            limit = functions.limit_in_transaction(spec.limits.timeout)
            await call_in_transaction(opened.claims, undoing, limit, lambda _: opened.check())
            await opened.finish(None, overlapped=False)

    async def _undo_call(self, row: StepRow, spec: StepSpec, output: object) -> None:
        assert spec.undo is not None
        saga, functions, gets = self._saga, self._functions, "step and the step's output"
        key = step_key(saga.scope, saga.key, row.name, undo=True)
        if not await self._was_undone(row, spec, output, key):
            seconds = functions.seconds(spec.limits.timeout)
            attempt = await self._store.intend(saga, row.name, has_undo=True, undo=True, timeout=seconds)
            undoing = functions.begin(spec.undo, functions.call(key, attempt), output, *spec.args, gets=gets)
            await call_user_code(undoing, functions.limit(spec.limits.timeout))
            self._at(SagaPoint.CALLED)
        await self._store.record(
            saga, row.name, row.kind, StepState.UNDONE, None, has_undo=True, overlapped=row.overlapped
        )

    async def _was_undone(self, row: StepRow, spec: StepSpec, output: object, key: UUID) -> bool:
        """Of an undo that was begun and whose outcome is unknown. Raises UnknownEffect where the remote cannot tell."""
        if row.state is not StepState.UNDO_INTENT or spec.reconcile_undo is None:
            return False
        found = await ask_remote_of_undo(self._functions, spec, self._functions.call(key, row.attempt), output)
        if not isinstance(found, Done | NotDone):
            raise UnknownEffect(f"undo of step {row.name!r}: the remote cannot say whether it was done")
        return isinstance(found, Done)


def plan(rows: Iterable[StepRow], asked: Mapping[str, StepSpec], *, replayed: bool) -> list[tuple[StepRow, StepSpec]]:
    """What to undo, in order, and how. Raises NotAskedFor, and SagaChanged when the handler will not ask for it."""
    todo = to_undo(rows, {spec.name for spec in asked.values() if spec.has_undo})
    for row in reversed(todo):
        spec = asked.get(row.name)
        if spec is None and not replayed:
            raise NotAskedFor(row.name)
        if spec is None or spec.undo is None:
            raise SagaChanged(f"step {row.name!r} has to be undone, and the handler no longer says how")
    return [(row, asked[row.name]) for row in todo]
