"""Replays the present handler against recorded histories of sagas, without a database and without any effect.

The library itself runs the attempt (`sagas.attempt`), on a store that returns what is recorded. New steps and writes of
any kind do not begin: the replay ends there.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Never, cast

import msgspec

from idemconsumer.admin.histories import SagaHistory
from idemconsumer.app.app import App
from idemconsumer.app.saga_calls import AppStarter
from idemconsumer.engine.blame import Telling
from idemconsumer.engine.evidence import Contended, LostConnections
from idemconsumer.engine.failing import Failing
from idemconsumer.engine.work import Work
from idemconsumer.errors import ConfigurationError, SagaChanged
from idemconsumer.handlers.handler import BoundHandler
from idemconsumer.message.message import StoredResult
from idemconsumer.rules.replay import PATCH
from idemconsumer.rules.values import OutcomeKind, State, StepRow, StepState
from idemconsumer.sagas.attempt import Attempt
from idemconsumer.sagas.comparison import both_lists
from idemconsumer.sagas.probes import Probes
from idemconsumer.sagas.run import Replayed
from idemconsumer.sagas.saga_endings import SagaEndings, describe_in
from idemconsumer.sagas.steps import StepFunctions
from idemconsumer.sagas.undo import plan
from idemconsumer.stores.columns import NewDeadLetter
from idemconsumer.stores.leased_saga import LeasedSaga
from idemconsumer.stores.leases import PostgresLeases

_LONG: Final = 86_400.0  # seconds; a step that does not begin is awaited, without a timeout
_AGAIN: Final = "another attempt"
_NO_RESOURCES: Final[Mapping[type, object]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Replay:
    """The result of a replay: what the present handler would do with a recorded saga.

    `goes_on`: the handler fits the record. Then `then` is its next action, such as `step 'charged'`, `reconcile
    find_charge`, `undo of 'charged'`, `COMPLETED` or `FAILED`. Otherwise `then` is the reason of the dead letter that
    the saga would become, such as `saga_changed`, or `another attempt` if the handler failed. `why` is the error that
    would be recorded with it.
    """

    goes_on: bool
    then: str
    why: str | None = None


def read_histories(path: str | Path) -> list[SagaHistory]:
    """Return the lines of a file written by `idemconsumer sagas export`. Raises ConfigurationError for other files."""
    try:
        return msgspec.json.Decoder(SagaHistory).decode_lines(Path(path).read_bytes())
    except msgspec.MsgspecError as error:
        raise ConfigurationError(f"{path} is not what `idemconsumer sagas export` writes: {error}") from error


async def replay(
    app: App,
    history: SagaHistory,
    *,
    resources: Mapping[type, object] = _NO_RESOURCES,
    patience: float = 1.0,
) -> Replay:
    """Run the handler of that name against one history, up to the first thing that is not recorded.

    Only the handler's code runs: no function of a step, an undo or a reconcile is called, and no database is needed.
    `resources` are the app's resources that the handler takes, by type. A saga that is a dead letter is replayed as if
    it were resumed. A handler that neither requests a step nor ends within `patience` seconds has failed. Branches get
    the same time to request their recorded steps. A step that a branch requests only after something new counts as
    missing. Not shown: what happens after the first new step. Raises ConfigurationError if the app has no such saga, or
    a resource is missing.
    """
    handler, leased, rows = _bind(app, history, resources, patience), history.leased(), history.rows()
    recorded, work = _Recorded(rows), Work.of(handler, leased.message, leased=leased)
    await work.read()
    leases, probes = cast("PostgresLeases", recorded), Probes(Failing(watched=False))
    attempt = Attempt(
        work,
        SagaEndings(work, leases, lambda _: None, lambda: 0.0, Telling(), probes),
        _Uncalled(_NO_RESOURCES, _LONG, _LONG, beyond=recorded.beyond),
        Contended(),
        LostConnections(_now),
        lambda: None,
    )
    going = asyncio.create_task(attempt.go())
    try:
        either: list[asyncio.Future[Any]] = [going, recorded.then]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if going.done():
            return _ended(recorded, going.result().kind)
        run = attempt.run
        assert run is not None
        # During an undo, the run itself has compared the recorded steps.
        if recorded.backwards or isinstance(run.interruption, Replayed):
            return Replay(True, recorded.then.result())
        try:
            # Recorded steps cannot depend on unrecorded ones, which wait to begin.
            await run.activity.until(lambda: not run.compared.unasked or run.interruption is not None)
            if run.interruption is not None:
                raise run.interruption
            run.compared.check_nothing_passed_over(at_end=True)
            if going.done():  # another branch has ended the attempt meanwhile
                return _ended(recorded, going.result().kind)
            plan(rows, run.compared.asked)
        except SagaChanged as changed:
            return Replay(False, changed.reason, f"{changed}; {both_lists(rows, run.compared.asked)}")
        except Exception as error:  # noqa: BLE001 - an error of the handler, which is the result of the replay
            return Replay(False, _AGAIN, describe_in(run.step_of(error), error))
        return Replay(True, recorded.then.result())
    finally:
        going.cancel()
        await asyncio.wait({going})


def _ended(recorded: _Recorded, kind: OutcomeKind) -> Replay:
    if recorded.why is not None:
        return Replay(False, *recorded.why)
    return Replay(True, (State.FAILED if kind is OutcomeKind.FAILED else State.COMPLETED).name)


def _bind(app: App, history: SagaHistory, resources: Mapping[type, object], patience: float) -> BoundHandler:
    name = history.handler
    plans = [handler.plan for handler in app.handlers.values() if handler.plan.signature.needs_saga]
    its = next((plan for plan in plans if plan.name == name), None)
    if its is None:
        known = ", ".join(plan.name for plan in plans) or "none"
        raise ConfigurationError(f"app {app.name!r} has no saga {name!r}; its sagas: {known}")
    for parameter, wanted in its.signature.resources:
        if wanted not in resources:
            raise ConfigurationError(
                f"handler {name!r} takes `{parameter}`; pass resources={{{wanted.__name__}: …}} to the replay"
            )
    return replace(its, options=replace(its.options, timeout=patience)).bind(
        app.name, resources=resources, starter=AppStarter(app)
    )


class _Recorded:
    """The store of one saga, with its recorded steps. `then` is done once the run requests anything else."""

    def __init__(self, rows: Sequence[StepRow]) -> None:
        self._rows = rows
        self.then: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.backwards = False
        self.why: tuple[str, str] | None = None

    async def beyond(self, what: str) -> Never:
        """Report a new request, which never begins. Other branches of the handler may still request recorded steps."""
        if not self.then.done():
            self.then.set_result(what)
        await asyncio.get_running_loop().create_future()
        raise AssertionError

    async def steps(self, key: bytes, window: int = 0) -> Sequence[StepRow]:
        return self._rows

    async def leave(self, app: str, saga: LeasedSaga, error: str, delay: float) -> None:
        return

    async def superseded(self, app: str, saga: LeasedSaga) -> bool:
        return False

    async def record(self, saga: LeasedSaga, name: str, *_: object, **__: object) -> None:
        if not name.startswith(PATCH):
            await self.beyond(f"step {name!r}")

    async def undo(self, saga: LeasedSaga, rejection: StoredResult, added: Sequence[str] = ()) -> LeasedSaga | None:
        self.backwards = True
        if any(row.state is StepState.INTENT for row in self._rows):
            return None
        return msgspec.structs.replace(saga, state=State.UNDOING, rejection=rejection.body)

    async def complete(self, saga: LeasedSaga, state: State, result: StoredResult | None) -> None:
        return

    async def release(
        self, saga: LeasedSaga, delay: float, error: str | None, *, count: bool, held: bool = False
    ) -> None:
        self.why = _AGAIN, error or ""

    async def park(self, saga: LeasedSaga, letter: NewDeadLetter) -> int:
        self.why = letter.reason, letter.error
        return 0

    @asynccontextmanager
    async def step(self, saga: LeasedSaga, name: str, *, undo: bool, **_: object) -> AsyncIterator[Never]:
        yield await self._begin(name, undo)

    async def intend(self, saga: LeasedSaga, name: str, *, undo: bool, **_: object) -> int:
        await self._begin(name, undo)

    async def wait(self, saga: LeasedSaga, name: str, *_: object, **__: object) -> Never:
        await self._begin(name, False)

    async def stop_child(self, saga: LeasedSaga, child: bytes, scope: str, queued: tuple[str, str]) -> Never:
        self.backwards = True
        await self.beyond("undo of the start of a child")

    async def _begin(self, name: str, undo: bool) -> Never:
        self.backwards = self.backwards or undo
        await self.beyond(f"undo of {name!r}" if undo else f"step {name!r}")

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Never]]:
        """Any other call of the store is something new."""
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *_, **__: self.beyond(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Uncalled(StepFunctions):
    """Only reconciles get here: before any other function is called, the store is written."""

    beyond: Callable[[str], Coroutine[Any, Any, Never]]

    def begin(self, fn: Callable[..., Awaitable[Any]], *args: object, gets: str) -> Awaitable[Any]:
        return self.beyond(f"reconcile {getattr(fn, '__qualname__', type(fn).__name__)}")


async def _now() -> datetime:
    return datetime.now(UTC)
