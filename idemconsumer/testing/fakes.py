"""A `Tx` for unit tests of handlers and steps, without a database."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import msgspec

from idemconsumer.errors import ConfigurationError

R = TypeVar("R")


class FakeRows(Generic[R]):
    """See `idemconsumer.Rows`."""

    def __init__(self, rows: Iterable[R]) -> None:
        self._rows = list(rows)
        self.rowcount = len(self._rows)

    async def first(self) -> R | None:
        return self._rows.pop(0) if self._rows else None

    async def one(self) -> R:
        if len(self._rows) != 1:
            raise LookupError(f"{len(self._rows)} rows, not one")
        return self._rows.pop()

    async def all(self) -> list[R]:
        rows, self._rows = self._rows, []
        return rows


class FakeTx:
    """A `Tx` without a database: it records the statements, and returns the rows that the test has given.

        tx = FakeTx()
        tx.returns("returning qty", [(8,)])
        await reserve(OrderPlaced("o-1", "pen", 2), tx)
        assert tx.executed[0][1] == (2, "pen", 2)

    Not guaranteed: that the SQL is right. Use the kit for that.
    """

    def __init__(self) -> None:
        self.executed: list[tuple[str, Any]] = []
        self._answers: list[tuple[str, Sequence[Any] | BaseException]] = []

    def returns(self, part: str, rows: Sequence[Any]) -> None:
        """Set the rows of each statement that contains this part: tuples, or mappings by column. The last call wins."""
        self._answers.insert(0, (part, rows))

    def raises(self, part: str, error: BaseException) -> None:
        """Set the error that each statement with this part raises."""
        self._answers.insert(0, (part, error))

    async def execute(self, query: str, params: Any = (), *, into: Any = None) -> FakeRows[Any]:
        """Record the statement. Returns no rows, unless the test has set some."""
        self.executed.append((query, params))
        answer = next((answer for part, answer in self._answers if part in query), ())
        if isinstance(answer, BaseException):
            raise answer
        return FakeRows([_row(each, into) for each in answer])

    async def send(self, query: str, params: Any = ()) -> None:
        """Like `execute`."""
        await self.execute(query, params)

    @property
    def connection(self) -> Any:
        """Raises ConfigurationError."""
        raise ConfigurationError("FakeTx has no connection; test this function with the kit: kit = await idem(app)")


def _row(row: Any, into: Any) -> Any:
    if isinstance(row, Mapping):
        return tuple(row.values()) if into is None else msgspec.convert(row, into)
    return row if into is None or not isinstance(row, tuple) else into(*row)
