"""A `Saga` for unit tests of its handler, without a database."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, TypeVarTuple
from uuid import NAMESPACE_OID, UUID, uuid5

import msgspec

from idemconsumer.errors import SagaMisused, SignalTimeout
from idemconsumer.handlers.arguments import Child, First, Step, Tx
from idemconsumer.testing.fakes import FakeTx

S = TypeVar("S")
Ts = TypeVarTuple("Ts")


@dataclass
class FakeStep:
    """See `idemconsumer.Step`."""

    name: str
    attempt: int = 1
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def key(self) -> UUID:
        """The same key for each step of this name."""
        return uuid5(NAMESPACE_OID, self.name)


class FakeSaga:
    """A `Saga` without a database, in which each step runs exactly once and at once, and no time passes.

        saga = FakeSaga(signals={"paid": {"amount": 5}})
        await book_ride({"id": "r-1"}, saga)
        assert saga.steps == ["ride_created", "paid"]

    `signals` has the payloads for waits, by the wait's name or its `signal=`; a wait without a payload raises
    SignalTimeout. `results` has the results of children, or exceptions to raise, by the names of their `result` steps;
    a missing one raises SignalTimeout too. `tx` is passed to the steps that take one. `undo` runs the undos of the
    finished steps, in reverse. Not guaranteed: that its steps can be written as JSON, or continued in another process.
    Use the kit to test that.
    """

    def __init__(
        self,
        *,
        signals: Mapping[str, Any] | None = None,
        results: Mapping[str, Any] | None = None,
        unpatched: Sequence[str] = (),
        tx: FakeTx | None = None,
    ) -> None:
        self.tx_given = tx or FakeTx()
        self.steps: list[str] = []
        self.started: list[Child[Any]] = []
        self._signals, self._results = signals or {}, results or {}
        self._unpatched = unpatched
        self._undos: list[Callable[[], Awaitable[object]]] = []

    @property
    def recovery_point(self) -> str | None:
        """The name of the last step."""
        return self.steps[-1] if self.steps else None

    async def patched(self, name: str) -> bool:
        """Return True, unless the name is in `unpatched`."""
        return name not in self._unpatched

    async def tx(
        self,
        name: str,
        fn: Callable[[Tx, *Ts], Awaitable[S]],
        /,
        *args: *Ts,
        undo: Callable[[Tx, S, *Ts], Awaitable[object]] | None = None,
        **_: Any,
    ) -> S:
        """Run `fn(tx, *args)`."""
        return await self._run(name, fn, self.tx_given, args, undo)

    async def call(
        self,
        name: str,
        fn: Callable[[Step, *Ts], Awaitable[S]],
        /,
        *args: *Ts,
        undo: Callable[[Step, S, *Ts], Awaitable[object]] | None = None,
        **_: Any,
    ) -> S:
        """Run `fn(step, *args)`."""
        return await self._run(name, fn, FakeStep(name), args, undo)

    async def _run(self, name: str, fn: Callable[..., Awaitable[S]], given: Any, args: Any, undo: Any) -> S:
        self._begin(name)
        result = await fn(given, *args)
        if undo is not None:
            self._undos.append(lambda: undo(given, result, *args))
        return result

    def _begin(self, name: str) -> None:
        if name in self.steps:
            raise SagaMisused(f"two steps are named {name!r}; give each a name of its own")
        self.steps.append(name)

    async def sleep(self, name: str, duration: object, /) -> None:
        """Return at once."""
        self._begin(name)

    async def wait(self, name: str, /, *, into: Any = None, timeout: object = None, signal: str | None = None) -> Any:
        """Return the payload that the test has given, as an `into`."""
        self._begin(name)
        its = signal or name
        if its not in self._signals:
            raise SignalTimeout(its)
        payload = self._signals[its]
        return payload if into is None or isinstance(payload, into) else msgspec.convert(payload, into)

    async def first(self, **waits: Coroutine[Any, Any, Any]) -> First:
        """Return the first wait, in the order given, that is over: a wait with a payload or a child with a result,
        otherwise a sleep."""
        timeout: BaseException | None = None
        try:
            for which, wait in sorted(waits.items(), key=lambda each: _sleeps(each[1])):
                try:
                    return First(which, await wait)
                except SignalTimeout as error:
                    timeout = timeout or error
        finally:
            for wait in waits.values():
                wait.close()
        assert timeout is not None, "first() was given nothing"
        raise timeout

    async def start(self, name: str, handler: Any, payload: Any, /, *, key: str | None = None, **_: Any) -> Child[Any]:
        """Run nothing; the child is added to `started`."""
        self._begin(name)
        child: Child[Any] = Child(handler, key or name, None, "")
        self.started.append(child)
        return child

    async def result(self, name: str, child: Child[S], /, *, timeout: object = None) -> S:
        """Return the result that the test has given."""
        self._begin(name)
        if name not in self._results:
            raise SignalTimeout(name)
        result: Any = self._results[name]
        if isinstance(result, BaseException):
            raise result
        return result  # type: ignore[no-any-return]

    async def all(self, branches: Iterable[Coroutine[Any, Any, S]], /, *, limit: int = 10) -> list[S]:
        """Run the coroutines one after the other."""
        return [await each for each in branches]

    async def undo(self) -> None:
        """Undo like a rejected saga: in reverse order, each step once."""
        while self._undos:
            await self._undos.pop()()


def _sleeps(wait: Any) -> bool:
    return wait.cr_code is FakeSaga.sleep.__code__
