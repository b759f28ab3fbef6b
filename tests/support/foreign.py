"""Exceptions that no library says it raises, at any call of a driver: what a reset socket is, depends on the loop."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import pytest


class Gone(BaseException):
    """As a library ends what it runs, beside asyncio's own."""


FOREIGN: Final[dict[str, Callable[[], BaseException]]] = {
    "RuntimeError": lambda: RuntimeError("unable to perform operation on <TCPTransport closed=True>"),
    "OSError": lambda: OSError(104, "Connection reset by peer"),
    "ValueError": lambda: ValueError("I/O operation on closed file"),
    "Gone": Gone,
    "CancelledError": asyncio.CancelledError,
}


class Faults:
    """Counts the calls of what it is put around, and raises once: `at` the call of that number, from 0, before it is
    made or behind it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self._error: Callable[[], BaseException] | None = None
        self._at, self._behind = 0, False
        self.calls, self.raised = 0, False

    def around(self, owner: Any, *names: str) -> None:
        """Methods of a class, or functions of a module."""
        for name in names:
            self._monkeypatch.setattr(owner, name, self._watched(getattr(owner, name)))

    def _watched(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @contextmanager
        def faulty() -> Iterator[None]:
            due, self.calls = self.calls == self._at, self.calls + 1
            if due and not self._behind:
                self._raise()
            yield
            if due and self._behind:
                self._raise()

        async def awaited(*given: Any, **more: Any) -> Any:
            with faulty():
                return await call(*given, **more)

        def called(*given: Any, **more: Any) -> Any:
            with faulty():
                return call(*given, **more)

        return awaited if inspect.iscoroutinefunction(call) else called

    def _raise(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            self.raised = True
            raise error()

    @contextmanager
    def one(self, error: Callable[[], BaseException], at: int, *, behind: bool) -> Iterator[None]:
        """In the block; `raised` says whether there were so many calls."""
        self.calls, self._at, self._behind, self._error, self.raised = 0, at, behind, error, False
        try:
            yield
        finally:
            self._error = None
