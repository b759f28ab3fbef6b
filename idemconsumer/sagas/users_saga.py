"""A saga as its handler has it: each method makes a step, and the request for it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, TypeVar, TypeVarTuple

from idemconsumer.errors import SagaMisused
from idemconsumer.ports.handler import Child, Done, Duration, First, NotDone, OnExisting, Step, Tx, Unknown
from idemconsumer.rules.backoff import Backoff
from idemconsumer.rules.values import StepKind
from idemconsumer.sagas.children import Children, result
from idemconsumer.sagas.limits import own_limits
from idemconsumer.sagas.run import SagaRun
from idemconsumer.sagas.step import StepSpec, patch
from idemconsumer.sagas.waits import first, sleep, wait

R = TypeVar("R")
Ts = TypeVarTuple("Ts")


class UsersSaga:
    """See `ports.handler.Saga`."""

    def __init__(self, run: SagaRun, children: Children, timeout: float) -> None:
        """`timeout`: the handler's, in seconds."""
        self._run = run
        self._children = children
        self._timeout = timeout

    @property
    def recovery_point(self) -> str | None:
        return self._run.recovery_point

    def patched(self, name: str) -> Coroutine[Any, Any, bool]:
        return self._run.request(patch(name))

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
        self._run.body.check_loop()
        limits = own_limits(name, timeout=timeout, max_attempts=max_attempts, backoff=backoff, most=self._timeout)
        spec = StepSpec(name, StepKind.TX, fn, args, undo, limits=limits, args_may_differ=args_may_differ)
        return self._run.request(spec)

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
        self._run.body.check_loop()
        limits = own_limits(name, timeout=timeout, max_attempts=max_attempts, backoff=backoff)
        spec = StepSpec(name, StepKind.CALL, fn, args, undo, reconcile, reconcile_undo, limits, args_may_differ)
        return self._run.request(spec)

    async def all(self, branches: Iterable[Coroutine[Any, Any, R]], /, *, limit: int = 10) -> list[R]:
        self._run.body.check_loop()
        given: object = limit
        if not isinstance(given, int) or isinstance(given, bool) or limit < 1:
            raise SagaMisused(f"saga.all: `limit` is {limit!r}; write how many may run at a time, 1 at least")
        return await self._run.all(branches, limit)

    def sleep(self, name: str, duration: Duration, /) -> Coroutine[Any, Any, None]:
        self._run.body.check_loop()
        return self._run.request(sleep(name, duration))

    def wait(
        self, name: str, /, *, into: Any = Any, timeout: Duration | None = None, signal: str | None = None
    ) -> Coroutine[Any, Any, Any]:
        self._run.body.check_loop()
        return self._run.request(wait(name, into, timeout, signal))

    def first(self, **waits: Coroutine[Any, Any, Any]) -> Coroutine[Any, Any, First]:
        self._run.body.check_loop()
        spec = first({which: self._run.spec_of_request(request) for which, request in waits.items()})
        for request in waits.values():
            self._run.withdraw(request)
        return self._run.request(spec)

    def start(
        self, name: str, handler: Any, payload: Any, /, *, key: str | None = None, undo: Any = None,
        on_existing: OnExisting = "join",
    ) -> Coroutine[Any, Any, Any]:  # fmt: skip
        self._run.body.check_loop()
        return self._run.request(self._children.start(name, handler, payload, key, undo, on_existing))

    def result(self, name: str, child: Child[R], /, *, timeout: Duration | None = None) -> Coroutine[Any, Any, R]:
        self._run.body.check_loop()
        return self._run.request(result(name, child, timeout))
