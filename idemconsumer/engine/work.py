"""A delivery on its way through the engines, and what is said when it cannot go on."""

from __future__ import annotations

import hashlib
import sysconfig
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from idemconsumer.errors import BadMessage, Reject
from idemconsumer.handlers.handler import BoundHandler, Call
from idemconsumer.message import keys
from idemconsumer.message.message import Message
from idemconsumer.ports.leases import Holding
from idemconsumer.ports.store import Claim, DeadLetter

_NOT_THEIRS = tuple({sysconfig.get_path("purelib"), sysconfig.get_path("stdlib"), str(Path(__file__).parent)})


@dataclass(slots=True, eq=False)
class Work:
    """One delivery on its way through the engine: decoded, or refused before it could be.

    `attempts` were counted so far; `counted` says that the coming run is among them already; `collisions` cost none.
    A `suspect` may have killed a worker: `marked` when we have put on record that it is about to run, `begun` when
    somebody had before.
    `abandoned` tells when waiting for a rival has become pointless, because the broker has taken the delivery back.
    `holding` is the saga that this worker holds for it; `resumed`: it came from the store, not from a broker that waits
    for its settlement; `doubt`: a write under the holding's token may still be in flight; `known`: the saga's history
    need not be told of this delivery.
    """

    message: Message
    handler: BoundHandler
    call: Call | None = None
    refusal: BadMessage | None = None
    suspect: bool = False
    marked: bool = False
    begun: bool = False
    attempts: int = 0
    counted: bool = False
    collisions: int = 0
    holding: Holding | None = None
    resumed: bool = False
    doubt: bool = False
    known: bool = False
    abandoned: Callable[[], bool] = bool

    @classmethod
    def of(
        cls, handler: BoundHandler, message: Message, *, suspect: bool = False, holding: Holding | None = None
    ) -> Work:
        suspect = suspect and not handler.leased  # a saga counts its takeovers
        resumed = holding is not None
        try:
            call = handler.call_for(message)
        except BadMessage as refusal:
            return cls(message, handler, refusal=refusal, holding=holding, resumed=resumed)
        if holding is not None:  # under which key it is stored, whatever the key rule makes of the message now
            call.claim = msgspec.structs.replace(call.claim, key=holding.key, scope=holding.scope, fingerprint=None)
        return cls(message, handler, call=call, suspect=suspect, holding=holding, resumed=resumed)

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
    def alone(self) -> bool:
        """Whether nothing else may run beside it."""
        return self.suspect and (self.begun or self.attempts > 0)

    @property
    def attempt(self) -> int:
        return self.attempts if self.counted else self.attempts + 1


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


def rejection_of(error: BaseException) -> tuple[str, object]:
    """Code and body of a final refusal; an exception of `fail_on` gives its name."""
    return (error.code, error.body) if isinstance(error, Reject) else (type(error).__name__, None)


def _identity(work: Work, reason: str) -> bytes:
    """What makes two arrivals one dead letter: the key where there is one; for a conflict the body too."""
    parts = [work.message.source.encode(), reason.encode(), work.key]
    if not work.key or reason == "conflict":
        parts.append(work.message.body)
    return hashlib.sha256(b"".join(len(part).to_bytes(8, "big") + part for part in parts)).digest()


def describe(error: BaseException) -> str:
    """For the database, where the payload lies as well; logs get the type and the place alone."""
    return f"{''.join(traceback.format_exception_only(error)).strip()[:4000]} ({where(error)})"


def where(error: BaseException) -> str:
    """The innermost frame that is neither ours nor a library's: the line that whoever wrote the handler can mend."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return "unknown"
    theirs = [frame for frame in frames if not frame.filename.startswith(_NOT_THEIRS)]
    frame = (theirs or frames)[-1]
    return f"{frame.filename.rpartition('/')[2]}:{frame.lineno} {frame.name}"
