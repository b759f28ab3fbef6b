"""One call of a batch handler: its items, and the handler's decision about each."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from datetime import timedelta
from types import TracebackType

from idemconsumer.errors import HandlerFault, Reject, Retry
from idemconsumer.message import codecs
from idemconsumer.message.message import Message, StoredResult


class Items:
    """See `arguments.Batch`."""

    __slots__ = ("_closed", "_fates", "_messages", "_payloads")

    def __init__(self, payloads: Sequence[object], messages: Sequence[Message]) -> None:
        self._payloads = payloads
        self._messages = messages
        self._fates: dict[int, StoredResult | Exception | None] = {}
        self._closed = False

    # ------------------------------------------------------------------------------------------------- for the handler
    def __len__(self) -> int:
        return len(self._payloads)

    def __iter__(self) -> Iterator[object]:
        return iter(self._payloads)

    def __getitem__(self, i: int, /) -> object:
        return self._payloads[i]

    def message(self, i: int, /) -> Message:
        return self._messages[i]

    def result(self, i: int, value: object, /) -> None:
        # Encoded now, since the handler may go on changing the value.
        try:
            self._decide(i, codecs.encode_result(value))
        except TypeError as error:
            self._decide(i, _marked_here(error))

    def reject(self, i: int, /, code: str, body: object = None) -> None:
        self._decide(i, _marked_here(Reject(code, body)))

    def retry(self, i: int, /, after: str | float | timedelta | None = None) -> None:
        self._decide(i, _marked_here(Retry("requested by batch.retry", after=after)))

    def _decide(self, i: int, fate: StoredResult | Exception | None) -> None:
        if self._closed:
            raise HandlerFault(
                "batch was used after its handler returned, when its items may already be committed; "
                "await everything that uses batch before the handler returns"
            )
        try:
            self._fates[range(len(self))[i]] = fate
        except IndexError:
            raise IndexError(f"item {i} is not in a batch of {len(self)}") from None

    # -------------------------------------------------------------------------------------------------- for the engine
    def close(self) -> None:
        self._closed = True

    def first_failed(self) -> tuple[int, Exception] | None:
        """The first item that is rejected or retried, and its error."""
        failed = [(i, fate) for i, fate in self._fates.items() if isinstance(fate, Exception)]
        return min(failed, key=lambda each: each[0], default=None)

    def stored(self, i: int) -> StoredResult | None:
        """The result of an item that is applied."""
        fate = self._fates.get(i)
        return fate if isinstance(fate, StoredResult) else None


def _marked_here(error: Exception) -> Exception:
    """The error with a traceback as if the handler had raised it: people look for the line that marked the item."""
    frame = sys._getframe(2)
    return error.with_traceback(TracebackType(None, frame, frame.f_lasti, frame.f_lineno))
