"""Who follows messages through this process and beyond it, as spans of a trace."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Final, Protocol

from idemconsumer.message.message import Message
from idemconsumer.rules.values import Outcome


class Processing(Protocol):
    """A group that is processed, or an attempt of a saga."""

    def decided(self, outcomes: Sequence[Outcome]) -> None:
        """It has ended with these."""
        ...


class Requested(Protocol):
    """A request at the front door."""

    def answered(self, outcome: str, key: str) -> None:
        """It was, in this way. `key`: the stored one, in hex; empty if it has none, or none was found."""
        ...


class Tracing(Protocol):
    """It decides nothing, waits for nobody, and must not raise (O20). What is entered is the current span of its task,
    and of the tasks begun there, until it is left."""

    def processing(
        self, app: str, handler: str, group: str, messages: Iterable[Message], key: bytes
    ) -> AbstractContextManager[Processing]:
        """Around the processing of these messages. `group`: the consumer group of those of Kafka; `key`: the stored key
        of the first message."""
        ...

    def begun(self) -> None:
        """Handlers begin to run for what is processed: once for each transaction."""
        ...

    def failed(self, error: BaseException) -> None:
        """A message of what is processed has failed with it."""
        ...

    def step(self, kind: str, name: str, attempt: int | None) -> AbstractContextManager[object]:
        """Around one step of the saga that is processed, which runs. `attempt`: of a call, the number of this one."""
        ...

    def request(self, app: str, route: str) -> AbstractContextManager[Requested]:
        """Around the answer to a request that was let in."""
        ...

    def carried(self, headers: Mapping[str, str]) -> dict[str, str]:
        """The headers of what is sent now, with those that carry the trace on, unless a trace is among them (O21)."""
        ...


class NullTracing:
    """Follows nothing."""

    def processing(
        self, app: str, handler: str, group: str, messages: Iterable[Message], key: bytes
    ) -> AbstractContextManager[Processing]:
        return _NOTHING

    def begun(self) -> None:
        return

    def failed(self, error: BaseException) -> None:
        return

    def step(self, kind: str, name: str, attempt: int | None) -> AbstractContextManager[object]:
        return _NOTHING

    def request(self, app: str, route: str) -> AbstractContextManager[Requested]:
        return _NOTHING

    def carried(self, headers: Mapping[str, str]) -> dict[str, str]:
        return dict(headers)


class _Unfollowed:
    def decided(self, outcomes: Sequence[Outcome]) -> None:
        return

    def answered(self, outcome: str, key: str) -> None:
        return


_NOTHING: Final = nullcontext(_Unfollowed())
NO_TRACING: Final = NullTracing()
