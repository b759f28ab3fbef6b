"""A delivery on its way through the engines."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import msgspec

from idemconsumer.errors import BadMessage
from idemconsumer.handlers.handler import BoundHandler, Call
from idemconsumer.message import keys
from idemconsumer.message.message import Message
from idemconsumer.ports.leases import LeasedSaga
from idemconsumer.ports.store import Claim, DeadLetter


class Suspicion(Enum):
    """Whether a delivery may have killed a worker, and what is on record of that. See `suspects`."""

    NONE = "none"
    SUSPECT = "suspect"  # delivered before; nothing is on record of it
    MARKED = "marked"  # this process has put on record that it is about to run
    BEGUN = "begun"  # an earlier run is on record that failed or did not end: it runs alone
    COUNTED = "counted"  # as BEGUN, and the coming run is among its attempts already


@dataclass(slots=True, eq=False)
class SagaWork:
    """What is known of a delivery that is a saga's.

    `leased` is the saga, while this worker holds it. `resumed`: it came from the store, and no broker waits for its
    settlement. `in_doubt`: a write under the saga's token may still be in flight. `noted`: the saga's history has this
    delivery already.
    """

    leased: LeasedSaga | None = None
    resumed: bool = False
    in_doubt: bool = False
    noted: bool = False


@dataclass(slots=True, eq=False)
class Work:
    """One delivery on its way through the engine: decoded, or refused because it could not be.

    `attempts` were counted so far; `collisions` cost none. `saga` is there if the handler is a saga's.
    `abandoned` tells when waiting for a rival has become pointless, because the broker has taken the delivery back.
    """

    message: Message
    handler: BoundHandler
    call: Call | None = None
    refusal: BadMessage | None = None
    suspicion: Suspicion = Suspicion.NONE
    attempts: int = 0
    collisions: int = 0
    saga: SagaWork | None = None
    abandoned: Callable[[], bool] = bool

    @classmethod
    def of(
        cls, handler: BoundHandler, message: Message, *, suspect: bool = False, leased: LeasedSaga | None = None
    ) -> Work:
        """`leased`: the saga that this message began, taken from the store."""
        saga = SagaWork(leased, resumed=leased is not None) if handler.leased else None
        try:
            call = handler.call_for(message)
        except BadMessage as refusal:
            return cls(message, handler, refusal=refusal, saga=saga)
        if leased is not None:  # L17: the key it is stored under, whatever the key rule makes of the message now
            call.claim = msgspec.structs.replace(call.claim, key=leased.key, scope=leased.scope, fingerprint=None)
        work = cls(message, handler, call=call, saga=saga)
        if suspect:
            work.suspect()
        return work

    def suspect(self) -> None:
        """It may have killed a worker. Not for sagas, which count their takeovers."""
        if self.suspicion is Suspicion.NONE and not self.handler.leased:
            self.suspicion = Suspicion.BEGUN if self.attempts else Suspicion.SUSPECT

    @property
    def suspected(self) -> bool:
        return self.suspicion is not Suspicion.NONE

    @property
    def alone(self) -> bool:
        """Whether nothing else may run beside it."""
        return self.suspicion in (Suspicion.BEGUN, Suspicion.COUNTED)

    @property
    def key(self) -> bytes:
        if self.call is not None:
            return self.call.claim.key
        return b"" if self.leased is None else self.leased.key

    @property
    def of_saga(self) -> SagaWork:
        """What is known of a delivery of a saga's handler."""
        assert self.saga is not None
        return self.saga

    @property
    def leased(self) -> LeasedSaga | None:
        """The saga that this worker holds for it."""
        return None if self.saga is None else self.saga.leased

    @property
    def claim(self) -> Claim:
        """Only for a message that could be decoded."""
        assert self.call is not None
        return self.call.claim

    @property
    def attempt(self) -> int:
        return self.attempts if self.suspicion is Suspicion.COUNTED else self.attempts + 1

    def failed(self, attempts: int) -> None:
        """A run of it failed and was counted: `attempts` is the new number."""
        self.attempts = attempts
        if self.suspected:
            self.suspicion = Suspicion.BEGUN


def dead_letter(work: Work, reason: str, error: str, attempts: int) -> DeadLetter:
    stored = work.leased or (None if work.call is None else work.call.claim)
    return DeadLetter(
        identity=_identity(work, reason),
        handler=work.handler.name,
        scope=keys.scope_name(work.handler.app, None, work.handler.name) if stored is None else stored.scope,
        source=work.message.source,
        position=work.message.position,
        reason=reason,
        error=error,
        body=work.message.body,
        headers=work.message.headers,
        attempts=attempts,
    )


def _identity(work: Work, reason: str) -> bytes:
    """What makes two arrivals one dead letter: the key where there is one; for a conflict the body too."""
    parts = [work.message.source.encode(), reason.encode(), work.key]
    if not work.key or reason == "conflict":
        parts.append(work.message.body)
    return hashlib.sha256(b"".join(len(part).to_bytes(8, "big") + part for part in parts)).digest()
