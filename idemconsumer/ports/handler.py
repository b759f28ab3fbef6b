"""What handlers and steps are given: the types that users annotate with."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import (
    Any,
    Concatenate,
    Generic,
    Literal,
    LiteralString,
    NamedTuple,
    Protocol,
    TypeAlias,
    TypeVar,
    TypeVarTuple,
    overload,
)
from uuid import UUID

from idemconsumer.message.message import Message
from idemconsumer.rules.backoff import Backoff

T = TypeVar("T")
R = TypeVar("R")
T_co = TypeVar("T_co", covariant=True)
Params = Sequence[object] | Mapping[str, object]
Duration: TypeAlias = str | float | timedelta


class Rows(Protocol[R]):
    """The rows of one statement. Reading them waits for the server only the first time after it was sent ahead."""

    @property
    def rowcount(self) -> int:
        """How many rows the statement returned or changed; -1 where Postgres does not report it. If it was sent ahead
        and is not answered yet, this cannot wait: the run ends here, and begins anew with a statement that waits."""
        ...

    async def first(self) -> R | None:
        """The next unread row; None when there is none."""
        ...

    async def one(self) -> R:
        """The only row. Raises LookupError when there is none, or more than one."""
        ...

    async def all(self) -> list[R]:
        """All unread rows."""
        ...


class Tx(Protocol):
    """The claim's transaction, as a handler sees it: no commit and no rollback, since the engine owns both.

    What is executed here is committed together with the message's record, or not at all. It is valid until the
    handler returns. `into=` turns each row into a dataclass, msgspec Struct (by column name) or one column's type.
    """

    @overload
    async def execute(self, query: LiteralString, params: Params = ...) -> Rows[tuple[Any, ...]]:
        """Run one statement with psycopg's placeholders (`%s`, `%(name)s`).

        Raises the psycopg.Error of the database; swallowing one fails the transaction. Raises HandlerFault for
        COMMIT, ROLLBACK and the like, for what outlives the transaction (SET without LOCAL), in another event loop,
        and after the handler has ended.

        A statement at whose rows the handler never looked is sent without waiting for its answer, in the same order as
        ever. If one fails, the message is run once more with statements that wait, so its error is raised here all the
        same; what the handler does outside of the database is done again then. Who looks at its `rowcount` waits.
        """
        ...

    @overload
    async def execute(self, query: LiteralString, params: Params = ..., *, into: type[T]) -> Rows[T]:
        """As above, with each row as an `into`."""
        ...

    async def send(self, query: LiteralString, params: Params = ...) -> None:
        """As `execute`, of a statement whose rows are never looked at: the answer is not waited for from the first time
        on."""
        ...

    @property
    def connection(self) -> Any:
        """A psycopg.AsyncConnection on this transaction, for COPY, pipelines and adapters.

        It, and all that is made from it, raises HandlerFault once the handler has ended. What is done to its session is
        reset before the next message. Ending its transaction undoes the whole group.
        """
        ...


class Batch(Protocol[T_co]):
    """The new messages of one group, for a handler that takes them all at once: `orders: Batch[OrderPlaced]`.

    They are in the order of their lane, each key once. What was handled before is not among them, and if nothing is new
    the function is not called. Its effects through Tx and the records of all items are one commit. An item that no
    method is called for is applied, with no result; of several calls for one item the last counts. A call after the
    function has returned raises HandlerFault, and one for an item that does not exist raises IndexError.

    If an item is rejected or retried, all effects of this function call are rolled back: the items before the first
    such one are handled once more, without it, and those after it in a later call. So nothing remains of what was done
    for it, or was decided because of that. Not guaranteed: that the function sees an item only once, so its effects
    belong in Tx.
    """

    def __len__(self) -> int:
        """How many items there are; at least one."""
        ...

    def __iter__(self) -> Iterator[T_co]:
        """The payloads."""
        ...

    def __getitem__(self, i: int, /) -> T_co:
        """The payload of item `i`, from 0."""
        ...

    def message(self, i: int, /) -> Message:
        """The message of item `i`, with its key, headers and attempt."""
        ...

    def result(self, i: int, value: object, /) -> None:
        """Store `value` for item `i` and its duplicates, as if a handler of one message returned it."""
        ...

    def reject(self, i: int, /, code: str, body: object = None) -> None:
        """Refuse item `i` for good, as `raise Reject(code, body)` does in a handler of one message."""
        ...

    def retry(self, i: int, /, after: str | float | timedelta | None = None) -> None:
        """Run item `i` again after seconds, a duration or the backoff, as `raise Retry(after=after)` does."""
        ...


S = TypeVar("S")
A = TypeVar("A")
Ts = TypeVarTuple("Ts")


class Step(Protocol):
    """What a `call` step's function is given."""

    @property
    def key(self) -> UUID:
        """The key that its remote must remember: the same for every attempt, another for the step's undo."""
        ...

    @property
    def attempt(self) -> int:
        """How many times the remote was called for this step, this call included. An undo continues the count."""
        ...

    @property
    def headers(self) -> Mapping[str, str]:
        """What carries the trace of this call on, to be sent with it: `traceparent` and what else the program's
        propagators say. Empty unless `tracing` is on."""
        ...


@dataclass(frozen=True, slots=True)
class Done(Generic[T]):
    """A reconcile's answer: the remote has done it, with this `result`; it is stored and not called again."""

    result: T


@dataclass(frozen=True, slots=True)
class NotDone:
    """A reconcile's answer: the remote has not done it; it is called again."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """A reconcile's answer: it cannot be determined; the saga is put aside for a person."""


@dataclass(frozen=True, slots=True)
class Child(Generic[T]):
    """A saga that another one has started: its `handler`, its `key` and its `tenant`, None without one. `id` is the key
    under which it is stored, which `idemconsumer sagas show` takes."""

    handler: Callable[..., Awaitable[T]]
    key: str
    tenant: str | None
    id: str


OnExisting: TypeAlias = Literal["join", "reject"]


class First(NamedTuple):
    """Which of several waits was over first, and what it waited for."""

    which: str
    value: Any


class Saga(Protocol):
    """A saga's run, as its handler sees it. A handler that asks for it runs in leased mode.

    A finished step is never run again: it returns its stored output. Only Reject reaches the handler; any other
    failure of a step ends the run, which this worker or another resumes at the last recovery point.
    """

    @property
    def recovery_point(self) -> str | None:
        """The name of the step that finished last; None before the first."""
        ...

    async def patched(self, name: str) -> bool:
        """Whether this saga takes the changed flow: True unless it has already been beyond this place, without the
        change. Recorded once for each saga, so that the answer stays the same."""
        ...

    async def tx(
        self,
        name: str,
        fn: Callable[[Tx, *Ts], Awaitable[S]],
        /,
        *args: *Ts,
        undo: Callable[[Tx, S, *Ts], Awaitable[object]] | None = None,
        timeout: Duration | None = None,
        max_attempts: int | None = None,
        backoff: Backoff | tuple[Duration, Duration] | str | None = None,
        args_may_differ: bool = False,
    ) -> S:
        """Run `fn(tx, *args)`: its effect, its output and the checkpoint are one commit.

        `timeout`, at most the handler's, `max_attempts`, `backoff` and `args_may_differ` are as for `call`."""
        ...

    async def call(
        self,
        name: str,
        fn: Callable[[Step, *Ts], Awaitable[S]],
        /,
        *args: *Ts,
        undo: Callable[[Step, S, *Ts], Awaitable[object]] | None = None,
        reconcile: Callable[[Step, *Ts], Awaitable[Done[S] | NotDone | Unknown]] | None = None,
        reconcile_undo: Callable[[Step, S, *Ts], Awaitable[Done[object] | NotDone | Unknown]] | None = None,
        timeout: Duration | None = None,
        max_attempts: int | None = None,
        backoff: Backoff | tuple[Duration, Duration] | str | None = None,
        args_may_differ: bool = False,
    ) -> S:
        """Run `fn(step, *args)` outside any transaction. It may run more than once, always with the same `step.key`,
        under which the remote must remember what it did, failures too. `reconcile` asks the remote first whether an
        earlier call of unknown outcome was done, and `reconcile_undo` whether such an undo was.

        The step's own limits; without them the handler's hold. `timeout`: of each of its functions, also longer than
        the handler's. `max_attempts`: when an attempt fails in this step, how many may have been made since the last
        step was finished; its undo has the handler's, or this if it is more. `backoff`: the pauses after such an
        attempt. A value that an option of handlers could not have raises SagaMisused.

        A resumed saga has to request the step with equal `args`, as far as they can be written as JSON; else it is put
        aside as `saga_changed` before anything new happens. `args_may_differ`: they are not compared."""
        ...

    async def sleep(self, name: str, duration: Duration, /) -> None:
        """Go on after `duration`: seconds, or a text such as "3d". Its end is computed once, by the database's clock.
        Meanwhile the saga is in no worker; any worker resumes it, at no cost of an attempt."""
        ...

    @overload
    async def wait(self, name: str, /, *, timeout: Duration | None = ..., signal: str | None = ...) -> Any:
        """As below, with the payload as plain JSON."""
        ...

    @overload
    async def wait(
        self,
        name: str,
        /,
        *,
        into: type[S],
        timeout: Duration | None = ...,
        signal: str | None = ...,
    ) -> S:
        """The payload of the oldest signal of this name that no other wait has taken, as an `into`. As with `sleep` the
        saga is in no worker meanwhile.

        Raises SignalTimeout if none has come by the end of `timeout` and until a worker looked; once recorded, that
        stays so. Without a `timeout` it waits for a hundred years. `signal` is the signal's name where it differs from
        the step's: several waits for one signal need a name each.
        """
        ...

    async def first(self, **waits: Coroutine[Any, Any, Any]) -> First:
        """Until the first of several waits is over: `saga.wait(…)`, `saga.sleep(…)` and `saga.result(…)`, not awaited
        yet, each under a keyword of yours, which says in the answer which one it was. It raises what that one raises.

        Which one it was is recorded, and the others are closed in that commit: a signal that comes for them later stays
        for another wait. Raises SagaMisused for anything else: a step with an effect cannot be closed.
        """
        ...

    async def start(
        self,
        name: str,
        handler: Callable[Concatenate[A, ...], Awaitable[S]],
        payload: A,
        /,
        *,
        key: str | None = None,
        undo: Callable[[Tx, Child[S], A], Awaitable[object]] | None = None,
        on_existing: OnExisting = "join",
    ) -> Child[S]:
        """Start another saga of this app, with this one's tenant, in the commit of this step: once, as `app.start` with
        `tx` does. Without a `key` it has one made of this saga's and the step's name.

        What is there under the key already, with the same payload, is the child; with `on_existing="reject"` this step
        raises Reject with the code `already_exists` then. Not guaranteed: that a message of a broker is seen before a
        worker has taken it. With another payload the step raises Reject with the code `conflict`, or the `result` does,
        if nothing was known of it yet. With an `undo`, when this saga is undone, and this step has begun the child: one
        that has not ended is cancelled and undone, and its end waited for; if it has ended COMPLETED,
        `undo(tx, child, payload)` runs in a transaction, to compensate for it. Without, it is left alone.
        """
        ...

    async def result(self, name: str, child: Child[S], /, *, timeout: Duration | None = None) -> S:
        """What a saga that this one has started returned, by its annotation. Until it has ended, this saga is in no
        worker, as with `sleep`; also while the child is put aside for a person.

        Raises Reject, with the code and the body of the child, if it was rejected or cancelled; and SignalTimeout if it
        has not ended by the end of `timeout` and until a worker looked. Once recorded, either stays so.
        """
        ...

    async def all(self, branches: Iterable[Coroutine[Any, Any, S]], /, *, limit: int = 10) -> list[S]:
        """Run coroutines side by side, such as `saga.call(…)` not awaited yet, at most `limit` at a time; returns their
        outputs in the order given. Each may take several steps. A generator is asked for the next when it may begin.

        If one raises an Exception, such as Reject, no other and no new step begins, the steps in flight are finished,
        and the first in the order given is raised. Any other end of a step cancels the rest and ends the run."""
        ...
