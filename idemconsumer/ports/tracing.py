"""Who follows messages through this process and beyond it, as spans of a trace."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Final

from idemconsumer.message.message import Message
from idemconsumer.rules.values import Outcome


class Processing:
    """A group that is processed, or an attempt of a saga."""

    def decided(self, outcomes: Sequence[Outcome]) -> None:
        """It has ended with these."""


class Requested:
    """A request at the front door."""

    def answered(self, outcome: str, key: str) -> None:
        """It was, in this way. `key`: the stored one, in hex; empty if it has none, or none was found."""


class Tracing:
    """It decides nothing, waits for nobody, and must not raise (O20). What is entered is the current span of its task,
    and of the tasks begun there, until it is left. This one follows nothing; the other is in
    `observe/opentelemetry_spans.py`."""

    def processing(
        self, app: str, handler: str, group: str, messages: Iterable[Message], key: bytes
    ) -> AbstractContextManager[Processing]:
        """Around the processing of these messages. `group`: the consumer group of those of Kafka; `key`: the stored key
        of the first message."""
        return nullcontext(Processing())

    def begun(self) -> None:
        """Handlers begin to run for what is processed: once for each transaction."""

    def failed(self, error: BaseException) -> None:
        """A message of what is processed has failed with it."""

    def step(self, kind: str, name: str, attempt: int | None) -> AbstractContextManager[object]:
        """Around one step of the saga that is processed, which runs. `attempt`: of a call, the number of this one."""
        return nullcontext()

    def request(self, app: str, route: str) -> AbstractContextManager[Requested]:
        """Around the answer to a request that was let in."""
        return nullcontext(Requested())

    def carried(self, headers: Mapping[str, str]) -> dict[str, str]:
        """The headers of what is sent now, with those that carry the trace on, unless a trace is among them (O21)."""
        return dict(headers)


NO_TRACING: Final = Tracing()
