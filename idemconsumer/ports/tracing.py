"""Tracing: follows messages through this process and beyond it, as spans of a trace."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Final

from idemconsumer.message.message import Message
from idemconsumer.rules.values import Outcome


class Processing:
    """A group in processing, or an attempt of a saga."""

    def decided(self, outcomes: Sequence[Outcome]) -> None:
        """The processing has ended with these outcomes."""


class Requested:
    """A request at the front door."""

    def answered(self, outcome: str, key: str) -> None:
        """The request was answered, with this outcome. `key`: the stored key in hex; empty if the request has none, or
        none was read."""


class Tracing:
    """Tracing decides nothing, blocks nothing, and must not raise (O20). A context manager that is entered makes its
    span the current one of the task, and of tasks begun there, until it is left. This class traces nothing; the one
    that does is in `observe/opentelemetry_spans.py`."""

    def processing(
        self, app: str, handler: str, group: str, messages: Iterable[Message], key: bytes
    ) -> AbstractContextManager[Processing]:
        """Around the processing of these messages. `group`: the consumer group, for messages of Kafka. `key`: the
        stored key of the first message."""
        return nullcontext(Processing())

    def begun(self) -> None:
        """The handlers of the current processing begin to run: called once for each transaction."""

    def failed(self, error: BaseException) -> None:
        """A message of the current processing has failed with this error."""

    def step(self, kind: str, name: str, attempt: int | None) -> AbstractContextManager[object]:
        """Around one step that the current saga runs. `attempt`: for a call, the number of this attempt."""
        return nullcontext()

    def request(self, app: str, route: str) -> AbstractContextManager[Requested]:
        """Around the answer to a request that was admitted."""
        return nullcontext(Requested())

    def carried(self, headers: Mapping[str, str]) -> dict[str, str]:
        """The headers of a message that is sent now, with those that propagate the trace, unless they have a trace
        already (O21)."""
        return dict(headers)


NO_TRACING: Final = Tracing()
