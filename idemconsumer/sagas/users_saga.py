"""A saga as its handler sees it: each method makes a step from its arguments, and the request for it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, TypeVar, TypeVarTuple
from weakref import WeakKeyDictionary

from idemconsumer.errors import ConfigurationError, HandlerError, SagaMisused
from idemconsumer.handlers.arguments import Child, Done, Duration, First, NotDone, OnExisting, Step, Tx, Unknown
from idemconsumer.handlers.durations import MAX_DURATION, parse_duration
from idemconsumer.handlers.options import resolve
from idemconsumer.rules.backoff import Backoff
from idemconsumer.rules.replay import PATCH
from idemconsumer.rules.saga import wrong_name
from idemconsumer.rules.values import StepKind
from idemconsumer.sagas.branches import Branches, Group, group_of
from idemconsumer.sagas.children import Children, result
from idemconsumer.sagas.run import SagaRun
from idemconsumer.sagas.step import NONE, FirstSpec, OwnLimits, StepSpec, WaitSpec, no_patch

R = TypeVar("R")
Ts = TypeVarTuple("Ts")


class UsersSaga:
    """See `handlers.arguments.Saga`."""

    def __init__(self, run: SagaRun, children: Children, timeout: float) -> None:
        """`timeout`: the handler's, in seconds."""
        self._run = run
        self._children = children
        self._timeout = timeout
        self._requests: WeakKeyDictionary[Coroutine[Any, Any, Any], StepSpec] = WeakKeyDictionary()

    def _request(self, spec: StepSpec) -> Coroutine[Any, Any, Any]:
        asking = self._run.request(spec)
        self._requests[asking] = spec
        return asking

    def _mark(self, request: Coroutine[Any, Any, Any], begun: bool) -> None:
        """See `Activity.mark`."""
        if (spec := self._requests.get(request)) is not None:
            self._run.activity.mark(spec.name, begun)

    @property
    def recovery_point(self) -> str | None:
        return self._run.recovery_point

    def patched(self, name: str) -> Coroutine[Any, Any, bool]:
        given: object = name
        recorded = PATCH + name if isinstance(given, str) else name  # any other type is refused as a name
        return self._request(StepSpec(recorded, StepKind.TX, no_patch, (), None))

    def tx(
        self,
        name: str,
        fn: Callable[[Tx, *Ts], Awaitable[R]],
        /,
        *args: *Ts,
        undo: Callable[[Tx, R, *Ts], Awaitable[object]] | None = None,
        timeout: Duration | None = None,
        max_attempts: int | None = None,
        backoff: Backoff | tuple[Duration, Duration] | str | None = None,
        args_may_differ: bool = False,
    ) -> Coroutine[Any, Any, R]:
        self._run.activity.check_loop()
        limits = _own_limits(name, self._timeout, timeout=timeout, max_attempts=max_attempts, backoff=backoff)
        spec = StepSpec(name, StepKind.TX, fn, args, undo, limits=limits, args_may_differ=args_may_differ)
        return self._request(spec)

    def call(
        self,
        name: str,
        fn: Callable[[Step, *Ts], Awaitable[R]],
        /,
        *args: *Ts,
        undo: Callable[[Step, R, *Ts], Awaitable[object]] | None = None,
        reconcile: Callable[[Step, *Ts], Awaitable[Done[R] | NotDone | Unknown]] | None = None,
        reconcile_undo: Callable[[Step, R, *Ts], Awaitable[Done[object] | NotDone | Unknown]] | None = None,
        timeout: Duration | None = None,
        max_attempts: int | None = None,
        backoff: Backoff | tuple[Duration, Duration] | str | None = None,
        args_may_differ: bool = False,
    ) -> Coroutine[Any, Any, R]:
        self._run.activity.check_loop()
        limits = _own_limits(name, None, timeout=timeout, max_attempts=max_attempts, backoff=backoff)
        spec = StepSpec(name, StepKind.CALL, fn, args, undo, reconcile, reconcile_undo, limits, args_may_differ)
        return self._request(spec)

    async def all(self, branches: Iterable[Coroutine[Any, Any, R]], /, *, limit: int = 10) -> list[R]:
        run = self._run
        run.activity.check_loop()
        given: object = limit
        if not isinstance(given, int) or isinstance(given, bool) or limit < 1:
            raise SagaMisused(f"saga.all: `limit` is {limit!r}; write how many may run at a time, 1 at least")
        outer = group_of(run)
        group = Group(run, outer, run.activity.look_again)
        running = Branches(branches, limit, group, lambda: bool(run.compared.unasked), self._mark)
        complete = await running.run()
        if group.rejection is not None:
            await run.await_other_branches(group.rejection)
        if complete:
            return running.outputs()
        if outer is not None:
            raise outer.refuse(group.end or "all", end=group.end is not None)
        return await run.end_replay(group.end)

    def sleep(self, name: str, duration: Duration, /) -> Coroutine[Any, Any, None]:
        self._run.activity.check_loop()
        return self._request(WaitSpec(name, StepKind.SLEEP, _nothing, (), None, seconds=parse_duration(duration)))

    def wait(
        self, name: str, /, *, into: Any = Any, timeout: Duration | None = None, signal: str | None = None
    ) -> Coroutine[Any, Any, Any]:
        self._run.activity.check_loop()

        async def payload() -> Any:
            raise AssertionError("what waits runs nothing")

        payload.__annotations__["return"] = into
        seconds = MAX_DURATION if timeout is None else parse_duration(timeout)
        awaited = name if signal is None else signal
        if (wrong := wrong_name(awaited)) is not None:
            raise ConfigurationError(f"step {name!r} waits for a signal whose name is {wrong}")
        spec = WaitSpec(name, StepKind.WAIT, payload, (), None, seconds=seconds, signal=awaited)
        return self._request(spec)

    def first(self, **waits: Coroutine[Any, Any, Any]) -> Coroutine[Any, Any, First]:
        self._run.activity.check_loop()
        if not waits:
            raise SagaMisused(
                "saga.first was given nothing; write saga.first(approved=saga.wait(…), late=saga.sleep(…))"
            )
        given: dict[str, WaitSpec] = {}
        for which, request in waits.items():
            spec = self._requests.get(request)
            if not isinstance(spec, WaitSpec) or isinstance(spec, FirstSpec):
                raise SagaMisused(
                    f"saga.first({which}=…) was not given a wait of this saga; give it saga.wait(…), saga.sleep(…) "
                    "or saga.result(…), not awaited yet. Run steps that have an effect with saga.all"
                )
            given[which] = spec
        for request in waits.values():
            self._mark(request, False)
            request.close()
        name = next(iter(given.values())).name
        return self._request(FirstSpec(name, StepKind.WAIT, _nothing, (), None, waits=given))

    def start(
        self, name: str, handler: Any, payload: Any, /, *, key: str | None = None, undo: Any = None,
        on_existing: OnExisting = "join",
    ) -> Coroutine[Any, Any, Any]:  # fmt: skip
        self._run.activity.check_loop()
        return self._request(self._children.start(name, handler, payload, key, undo, on_existing))

    def result(self, name: str, child: Child[R], /, *, timeout: Duration | None = None) -> Coroutine[Any, Any, R]:
        self._run.activity.check_loop()
        return self._request(result(name, child, timeout))


def _own_limits(step: object, most: float | None, **given: Any) -> OwnLimits:
    """The limits given for one step, checked like the handler's options. `most`: the handler's `timeout`, if the step
    may not have more. Raises SagaMisused."""
    given = {option: value for option, value in given.items() if value is not None}
    if not given:
        return NONE
    try:
        read = resolve("", given)
    except HandlerError as error:
        raise SagaMisused(f"step {step!r}: {error.problem}; {error.instead}") from None
    own = OwnLimits(**{option: getattr(read, option) for option in given})
    if most is not None and own.timeout is not None and own.timeout > most:
        raise SagaMisused(
            f"step {step!r}: `timeout` is {own.timeout:g} s, but a step in a transaction holds locks and is limited to "
            f"its handler's, {most:g} s; raise the handler's, or do the slow part in a step with saga.call"
        )
    return own


async def _nothing() -> None:
    raise AssertionError("what waits runs nothing")
