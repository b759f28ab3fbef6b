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
    BEGUN = "begun"  # an earlier run is on record that came to no end, or failed: it runs alone
    COUNTED = "counted"  # as BEGUN, and the coming run is among its attempts already


@dataclass(slots=True, eq=False)
class Work:
    """One delivery on its way through the engine: decoded, or refused before it could be.

    `attempts` were counted so far; `collisions` cost none.
    `abandoned` tells when waiting for a rival has become pointless, because the broker has taken the delivery back.
    `holding` is the saga that this worker holds for it; `resumed`: it came from the store, not from a broker that waits
    for its settlement; `doubt`: a write under the holding's token may still be in flight; `known`: the saga's history
    need not be told of this delivery.
    """

    message: Message
    handler: BoundHandler
    call: Call | None = None
    refusal: BadMessage | None = None
    suspicion: Suspicion = Suspicion.NONE
    attempts: int = 0
    collisions: int = 0
    holding: LeasedSaga | None = None
    resumed: bool = False
    doubt: bool = False
    known: bool = False
    abandoned: Callable[[], bool] = bool

    @classmethod
    def of(
        cls, handler: BoundHandler, message: Message, *, suspect: bool = False, holding: LeasedSaga | None = None
    ) -> Work:
        resumed = holding is not None
        try:
            call = handler.call_for(message)
        except BadMessage as refusal:
            return cls(message, handler, refusal=refusal, holding=holding, resumed=resumed)
        if holding is not None:  # L17: the key it is stored under, whatever the key rule makes of the message now
            call.claim = msgspec.structs.replace(call.claim, key=holding.key, scope=holding.scope, fingerprint=None)
        work = cls(message, handler, call=call, holding=holding, resumed=resumed)
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
        return b"" if self.holding is None else self.holding.key

    @property
    def claim(self) -> Claim:
        """Of what could be decoded."""
        assert self.call is not None
        return self.call.claim

    @property
    def attempt(self) -> int:
        return self.attempts if self.suspicion is Suspicion.COUNTED else self.attempts + 1

    def failed(self, attempts: int) -> None:
        """A run of it failed, and was counted: there are now so many attempts."""
        self.attempts = attempts
        if self.suspected:
            self.suspicion = Suspicion.BEGUN


def dead_letter(work: Work, reason: str, error: str, attempts: int) -> DeadLetter:
    stored = work.holding or (None if work.call is None else work.call.claim)
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
