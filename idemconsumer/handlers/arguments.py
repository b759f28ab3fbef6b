"""The arguments of handlers and steps: the types that users write in annotations."""

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
    """The rows of one statement. If the statement was pipelined (sent without waiting for its result), the first read
    waits for the server."""

    @property
    def rowcount(self) -> int:
        """How many rows the statement returned or changed; -1 if Postgres does not report it. This property cannot
        wait: if the statement was pipelined and has no result yet, this run ends here, and a new run waits for that
        statement."""

    async def first(self) -> R | None:
        """Return the next unread row, or None if there is none."""

    async def one(self) -> R:
        """Return the only row. Raises LookupError if there is none, or more than one."""

    async def all(self) -> list[R]:
        """Return all unread rows."""


class Tx(Protocol):
    """The transaction of the claim, for a handler. It has no commit and no rollback, since the engine owns both.

    Everything executed here is committed together with the message's record, or not at all. It is valid until the
    handler returns. `into=` turns each row into a dataclass, msgspec Struct (by column name) or one column's type.
    """

    @overload
    async def execute(self, query: LiteralString, params: Params = ...) -> Rows[tuple[Any, ...]]:
        """Run one statement with psycopg's placeholders (`%s`, `%(name)s`).

        Raises the database's psycopg.Error; swallowing one fails the transaction. Raises HandlerFault for COMMIT,
        ROLLBACK and the like, for anything that outlives the transaction (SET without LOCAL), in another event loop,
        and after the handler has ended.

        If a handler has not read the rows of a statement in its last runs, the engine pipelines it: it sends the
        statement without waiting for its result. The order of statements never changes. If such a statement fails, the
        message runs once more without pipelining, so the error is raised here all the same; whatever the handler does
        outside the database then happens again. Once the `rowcount` of a statement has been read, that statement is not
        pipelined any more.
        """

    @overload
    async def execute(self, query: LiteralString, params: Params = ..., *, into: type[T]) -> Rows[T]:
        """As above, with each row as an `into`."""

    async def send(self, query: LiteralString, params: Params = ...) -> None:
        """Like `execute`, for a statement whose rows are never read: it is pipelined even in its first run."""

    @property
    def connection(self) -> Any:
        """A psycopg.AsyncConnection on this transaction, for COPY, pipelines and adapters.

        The connection, and everything made from it, raises HandlerFault once the handler has ended. Changes to its
        session are reset before the next message. Ending its transaction undoes the whole group.
        """


class Batch(Protocol[T_co]):
    """The new messages of one group, for a handler that takes them all at once: `orders: Batch[OrderPlaced]`.

    They are in the order of their lane, each key once. Messages that were handled before are left out; if none is new,
    the function is not called. Its effects through Tx and the records of all items are one commit. An item for which no
    method is called is applied, with no result; of several calls for one item the last counts. A call after the
    function has returned raises HandlerFault, and a call for an item that does not exist raises IndexError.

    If an item is rejected or retried, all effects of this function call are rolled back. The items before the first
    such item are handled once more, without it; the items after it are handled in a later call. So nothing remains of
    the work done for that item, or of decisions that depended on it. Not guaranteed: that the function sees an item
    only once, so its effects belong in Tx.
    """

    def __len__(self) -> int:
        """How many items there are; at least one."""

    def __iter__(self) -> Iterator[T_co]:
        """The payloads."""

    def __getitem__(self, i: int, /) -> T_co:
        """The payload of item `i`, from 0."""

    def message(self, i: int, /) -> Message:
        """Return the message of item `i`, with its key, headers and attempt."""

    def result(self, i: int, value: object, /) -> None:
        """Store `value` for item `i` and its duplicates, as the return value of a single-message handler is stored."""

    def reject(self, i: int, /, code: str, body: object = None) -> None:
        """Refuse item `i` for good, as `raise Reject(code, body)` does in a handler of one message."""

    def retry(self, i: int, /, after: str | float | timedelta | None = None) -> None:
        """Run item `i` again after seconds, a duration or the backoff, as `raise Retry(after=after)` does."""


S = TypeVar("S")
A = TypeVar("A")
Ts = TypeVarTuple("Ts")


class Step(Protocol):
    """The first argument of a `call` step's function."""

    @property
    def key(self) -> UUID:
        """The key under which the remote system must remember the call: the same for every attempt, another one for the
        step's undo."""

    @property
    def attempt(self) -> int:
        """How many times this step has called the remote system, this call included. An undo continues the count."""

    @property
    def headers(self) -> Mapping[str, str]:
        """The headers that carry the trace of this call; send them along. They are `traceparent` and those that the
        program's propagators add. Empty unless `tracing` is on."""


@dataclass(frozen=True, slots=True)
class Done(Generic[T]):
    """A reconcile returns this if the remote system has done the call. Its `result` is stored, and no further call is
    made."""

    result: T


@dataclass(frozen=True, slots=True)
class NotDone:
    """A reconcile returns this if the remote system has not done the call, which is then made again."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """A reconcile returns this if it cannot find out. The saga becomes a dead letter, and waits for a person."""


@dataclass(frozen=True, slots=True)
class Child(Generic[T]):
    """A saga that another saga has started: its `handler`, its `key`, and its `tenant` or None. `id` is the key under
    which it is stored; `idemconsumer sagas show` takes it."""

    handler: Callable[..., Awaitable[T]]
    key: str
    tenant: str | None
    id: str


OnExisting: TypeAlias = Literal["join", "reject"]


class First(NamedTuple):
    """The wait that was over first, as `which`, and its `value`."""

    which: str
    value: Any


class Saga(Protocol):
    """The run of a saga, for its handler. A handler with this parameter runs in leased mode.

    A finished step never runs again: it returns its stored output. Only Reject reaches the handler. Any other failure
    of a step ends the run, and this worker or another resumes the saga at the last recovery point.
    """

    @property
    def recovery_point(self) -> str | None:
        """The name of the step that finished last; None before the first."""

    async def patched(self, name: str) -> bool:
        """Return whether this saga takes the changed flow: True, unless it has already passed this place without the
        change. The answer is recorded once per saga, so it stays the same."""

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

        `timeout` (at most the handler's), `max_attempts`, `backoff` and `args_may_differ` are as for `call`.
        """

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
        """Run `fn(step, *args)` outside any transaction. It may run more than once, always with the same `step.key`.
        Under that key the remote system must remember what it did, failures too. Before another call, `reconcile` asks
        the remote system whether an earlier call of unknown outcome was done; `reconcile_undo` asks the same about an
        undo.

        Limits given here replace the handler's for this step. `timeout` applies to each of its functions, and may
        exceed the handler's. `max_attempts` applies when an attempt fails in this step, and counts the attempts since
        the last finished step. The step's undo has the handler's limit, or this one if it is higher. `backoff` gives
        the pauses after such an attempt. A value that is not allowed as a handler's option raises SagaMisused.

        A resumed saga must request the step with equal `args`, as far as they can be written as JSON. Otherwise it
        becomes a dead letter with the reason `saga_changed` before anything new happens. `args_may_differ` turns this
        comparison off.
        """

    async def sleep(self, name: str, duration: Duration, /) -> None:
        """Go on after `duration`: seconds, or a text such as "3d". The end is computed once, by the database's clock.
        Meanwhile no worker runs the saga. Afterwards any worker resumes it; this costs no attempt."""

    @overload
    async def wait(self, name: str, /, *, timeout: Duration | None = ..., signal: str | None = ...) -> Any:
        """Return the payload of the oldest signal of this name that no other wait has taken: as an `into`, or as plain
        JSON without one. As with `sleep`, no worker runs the saga meanwhile.

        Raises SignalTimeout if no signal has come by the end of `timeout` and none when a worker then checks. Once
        recorded, the timeout stays. Without a `timeout` the saga waits for a hundred years. `signal` is the signal's
        name if it differs from the step's name: several waits for one signal need different step names.
        """

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
        """As above, with the payload as an `into`."""

    async def first(self, **waits: Coroutine[Any, Any, Any]) -> First:
        """Wait until the first of several waits is over. The waits are `saga.wait(…)`, `saga.sleep(…)` and
        `saga.result(…)`, not awaited yet, each under a keyword of yours. The answer names that keyword. If the wait
        that is over first raises, this raises the same.

        The commit that records this wait also closes the others: a signal that comes for them later stays for another
        wait. Raises SagaMisused for any other coroutine, since a step with an effect cannot be closed.
        """

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
        """Start another saga of this app, with this saga's tenant, in the commit of this step: once, as `app.start`
        with `tx` does. Without a `key`, the child's key is made from this saga's key and the step's name.

        If a saga with the same key and payload exists already, it becomes the child; with `on_existing="reject"` the
        step raises Reject with the code `already_exists` instead. Not guaranteed: that a message still at its broker,
        which no worker has taken yet, is noticed. If the payload differs, the step raises Reject with the code
        `conflict`; if the difference is found later, `result` raises it.

        An `undo` applies when this saga is undone and this step began the child. A child that has not ended is
        cancelled and undone, and this saga waits for its end. If the child has ended COMPLETED,
        `undo(tx, child, payload)` runs in a transaction, to compensate for it. Without an `undo`, the child is left
        alone.
        """

    async def result(self, name: str, child: Child[S], /, *, timeout: Duration | None = None) -> S:
        """Return the result of a saga that this one has started, decoded by its annotation. Until the child has ended,
        no worker runs this saga, as with `sleep`; the same holds while the child is a dead letter.

        Raises Reject, with the child's code and body, if the child was rejected or cancelled. Raises SignalTimeout if
        it has not ended by the end of `timeout` nor when a worker then checks. Once recorded, either stays.
        """

    async def all(self, branches: Iterable[Coroutine[Any, Any, S]], /, *, limit: int = 10) -> list[S]:
        """Run coroutines side by side, such as `saga.call(…)` not awaited yet, at most `limit` at a time. Returns their
        outputs in the order given. Each may take several steps. If `branches` is a generator, the next coroutine is
        drawn from it when that coroutine may begin.

        If one raises an Exception, such as Reject, no other coroutine and no new step begins. The steps in flight
        finish, and the first exception in the order given is raised. Any other end of a step cancels the rest and ends
        the run.
        """
