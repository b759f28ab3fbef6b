"""The key and the Tx of the current request, for its endpoint: in the event loop, or in a thread (H9)."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, Final, Generic, LiteralString, TypeVar, overload

from idemconsumer.errors import ConfigurationError, HandlerFault
from idemconsumer.handlers.arguments import Params, Rows, Tx
from idemconsumer.user_code.leftovers import Everybodys

T = TypeVar("T")
R = TypeVar("R")

GIVES_TX: Final[set[Callable[..., Any]]] = set()
"""Functions that a framework calls to fill a parameter. An endpoint with such a parameter requests Tx."""


KEY: Final[ContextVar[str]] = ContextVar("idemconsumer_key", default="")
"""The stored key of the request for which this task runs."""


class Slot(Everybodys):
    """Holds the Tx of one request while it may be used. No other object holds it, so a Tx that is still referenced
    after the endpoint has returned was kept by the endpoint (J19)."""

    __slots__ = ("_tx", "asked", "key", "loop", "refusal")

    def __init__(self, refusal: str, key: str, loop: asyncio.AbstractEventLoop | None) -> None:
        """`loop`: the event loop of its Tx, if it may have a Tx."""
        self.refusal = refusal
        self.key = key
        self.loop = loop
        self.asked = False  # its Tx or key was requested, so an endpoint ran, whatever the router reports
        self._tx: Tx | None = None

    def open(self, tx: Tx) -> None:
        self._tx = tx

    def end(self) -> None:
        self._tx = None

    @property
    def tx(self) -> Tx:
        if self._tx is not None:
            return self._tx
        if self.refusal:
            raise ConfigurationError(self.refusal)
        raise HandlerFault(
            "Tx was requested after the response had been given, so its writes would not be committed with it"
        )


_SLOT: Final[ContextVar[Slot | None]] = ContextVar("idemconsumer_request", default=None)


@contextmanager
def slot_for(route: str, key: str, *, joined: bool = False) -> Iterator[Slot]:
    """The slot of a request of this route, for code that is called inside and for tasks that are created there."""
    refusal = (
        f"route {route!r} requests Tx, but is not declared with it; write Route(tx=True) for it, or "
        "@idempotency.route(tx=True) below the route's decorator"
    )
    slot = Slot("", key, asyncio.get_running_loop()) if joined else Slot(refusal, key, None)
    with within(_SLOT, slot):
        try:
            yield slot
        finally:
            slot.end()


def new_key() -> str:
    """A new key in the form of a stored one, for a request without a key."""
    return secrets.token_hex(32)


def slot_of_task() -> Slot:
    """The slot of the request for which this task runs the application."""
    slot = _SLOT.get()
    assert slot is not None
    return slot


def slot_in_thread(slot: Slot) -> AbstractContextManager[None]:
    """Makes this the current slot in a thread that has no task."""
    return within(_SLOT, slot)


@contextmanager
def within(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Set the variable for code that is called inside and for tasks that are created there."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def _slot() -> Slot:
    if (slot := _SLOT.get()) is None:
        raise ConfigurationError(
            "Tx or the key was requested outside a request that the front door covers; put IdempotencyMiddleware "
            "around the app, and declare the route: routes={'POST /orders': Route(tx=True)}"
        )
    slot.asked = True
    return slot


def current_key() -> str:
    """Return the key of this request as it is stored: 64 hex digits, the same for each repetition, and different for
    every other request. A request without a key gets a new one.

    Pass it to a remote system as its own idempotency key, or as a reference: a LostRequest has it too, so you can ask
    the remote system about that request. It works in endpoints, also in a thread. Raises ConfigurationError elsewhere.
    """
    return _slot().key


def current_tx() -> Tx:
    """Return the transaction of this request: its writes and the stored response are one commit.

    For `async def` endpoints of routes with tx=True; valid until the endpoint has given its response. Raises
    ConfigurationError elsewhere, and HandlerFault after the response.
    """
    return _slot().tx


def current_sync_tx() -> SyncTx:
    """Like `current_tx`, for an endpoint that runs in a thread: `def`, not `async def`. Raises the same errors."""
    slot = _slot()
    _ = slot.tx
    return SyncTx(slot)


GIVES_TX.update((current_tx, current_sync_tx))


class SyncTx:
    """A `Tx` for code that runs in a thread: each method blocks until the event loop of the connection has done the
    work.

    All rules of `Tx` hold. Raises HandlerFault if it is used in that event loop, which would wait for itself for ever.
    """

    __slots__ = ("_slot",)

    def __init__(self, slot: Slot) -> None:
        self._slot = slot

    @overload
    def execute(self, query: LiteralString, params: Params | None = None) -> SyncRows[tuple[Any, ...]]:
        """Run one statement, as `Tx.execute`."""

    @overload
    def execute(self, query: LiteralString, params: Params | None = None, *, into: type[T]) -> SyncRows[T]:
        """As above, with each row as an `into`."""

    def execute(self, query: LiteralString, params: Params | None = None, *, into: Any = None) -> SyncRows[Any]:
        slot = self._slot

        async def run() -> Rows[Any]:
            given: Any = slot.tx
            rows: Rows[Any] = await given.execute(query, params, into=into)
            return rows

        return SyncRows(slot, _wait(slot, run))


class SyncRows(Generic[R]):
    """The rows of one statement of `SyncTx`."""

    __slots__ = ("_rows", "_slot")

    def __init__(self, slot: Slot, rows: Rows[R]) -> None:
        self._slot = slot
        self._rows = rows

    @property
    def rowcount(self) -> int:
        """How many rows the statement returned or changed; -1 if Postgres does not report it."""
        return self._rows.rowcount

    def first(self) -> R | None:
        """Return the next unread row, or None if there is none."""
        return _wait(self._slot, self._rows.first)

    def one(self) -> R:
        """Return the only row. Raises LookupError if there is none, or more than one."""
        return _wait(self._slot, self._rows.one)

    def all(self) -> list[R]:
        """Return all unread rows."""
        return _wait(self._slot, self._rows.all)


def _wait(slot: Slot, call: Callable[[], Coroutine[Any, Any, T] | Any]) -> T:
    try:
        here: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
    except RuntimeError:
        here = None
    assert slot.loop is not None  # without a loop there was no Tx
    if here is slot.loop:
        raise HandlerFault("SyncTx was used in the event loop; use current_tx() in an async endpoint")
    result: T = asyncio.run_coroutine_threadsafe(call(), slot.loop).result()
    return result
