"""What handlers and steps are given: the types that users annotate with."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Generic, LiteralString, Protocol, TypeVar, TypeVarTuple, overload
from uuid import UUID

from idemconsumer.message.message import Message

T = TypeVar("T")
R = TypeVar("R")
T_co = TypeVar("T_co", covariant=True)
Params = Sequence[object] | Mapping[str, object]


class Rows(Protocol[R]):
    """The rows of one statement, all received already: reading them never waits for the server."""

    @property
    def rowcount(self) -> int:
        """How many rows the statement returned or changed; -1 where Postgres does not report it."""
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
        """Run one statement with psycopg's placeholders (`%s`, `%(name)s`); all its rows are received on return.

        Raises the psycopg.Error of the database; swallowing one fails the transaction. Raises HandlerFault for
        COMMIT, ROLLBACK and the like, and after the handler has returned.
        """
        ...

    @overload
    async def execute(self, query: LiteralString, params: Params = ..., *, into: type[T]) -> Rows[T]:
        """As above, with each row as an `into`."""
        ...

    @property
    def connection(self) -> Any:
        """The psycopg.AsyncConnection, for COPY or SQLAlchemy. Ending its transaction undoes the whole group."""
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


class Saga(Protocol):
    """A saga's run, as its handler sees it. A handler that asks for it runs in leased mode.

    A finished step is never run again: it returns its stored output. Only Reject reaches the handler; any other
    failure of a step ends the run, which this worker or another resumes at the last recovery point.
    """

    @property
    def recovery_point(self) -> str | None:
        """The name of the step that finished last; None before the first."""
        ...

    async def tx(
        self,
        name: str,
        fn: Callable[[Tx, *Ts], Awaitable[S]],
        /,
        *args: *Ts,
        undo: Callable[[Tx, S, *Ts], Awaitable[object]] | None = None,
    ) -> S:
        """Run `fn(tx, *args)`: its effect, its output and the checkpoint are one commit."""
        ...

    async def call(
        self,
        name: str,
        fn: Callable[[Step, *Ts], Awaitable[S]],
        /,
        *args: *Ts,
        undo: Callable[[Step, S, *Ts], Awaitable[object]] | None = None,
        reconcile: Callable[[Step, *Ts], Awaitable[Done[S] | NotDone | Unknown]] | None = None,
    ) -> S:
        """Run `fn(step, *args)` outside any transaction. It may run more than once, always with the same `step.key`,
        under which the remote must remember what it did, failures too. `reconcile` asks the remote first."""
        ...
