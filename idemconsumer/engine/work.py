"""A delivery while it is processed by the engines."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import Enum

import msgspec

from idemconsumer.engine import decoding as reading
from idemconsumer.errors import BadMessage, NotReadNow
from idemconsumer.handlers.handler import BoundHandler, Call
from idemconsumer.message.message import Message
from idemconsumer.message.origin import Pending
from idemconsumer.ports.tracing import Processing, Tracing
from idemconsumer.rules.claim import Claim
from idemconsumer.rules.values import Found, Record, State
from idemconsumer.rules.verdicts import Verdict
from idemconsumer.stores.leased_saga import LeasedSaga


class Suspicion(Enum):
    """Whether a delivery may have killed a worker, and what is recorded about that. See `Suspects`."""

    NONE = "none"
    SUSPECT = "suspect"  # delivered before; it has no row in `attempt`
    MARKED = "marked"  # this process has recorded that it is about to run, or that it ran and failed
    BEGUN = "begun"  # another process has left a row, and may have been killed by it: it runs alone
    COUNTED = "counted"  # as BEGUN, and its attempts include the coming run already


@dataclass(slots=True, eq=False)
class SagaWork:
    """What is known of a delivery to a saga's handler.

    `leased` is the saga, while this worker holds it. `resumed`: it came from the store, and there is nothing to settle
    at a broker. `in_doubt`: a write with the saga's token may still be in flight. `noted`: the saga's history has this
    delivery already.
    """

    leased: LeasedSaga | None = None
    resumed: bool = False
    in_doubt: bool = False
    noted: bool = False


@dataclass(slots=True, eq=False)
class Work:
    """One delivery while the engine processes it: decoded, or refused because it could not be decoded.

    `attempts`: how many were counted so far. `spared`: how many runs failed without costing one (D17). `saga`: only for
    a saga's handler. `own_id`: its position at its broker or its message id, the same for each delivery of this message
    and for no other message; None if there is neither. `first`: it was never delivered before. `pending`: its record
    waits for it. `row`: its row in our own queue (D19). `letter`: the dead letter that it was redriven from.
    `stray`: its header says that it was accepted, but in the store no record waits for it (H46).
    `misread`: `refusal` comes from reading it, and the fault may be the reader's (D25). `put_by`: how many times it
    could not be read yet (D26).
    `eager`: its statements are waited for, since a pipelined run failed, or needed an answer that was not
    there yet (J27).
    `abandoned` returns whether the broker has taken the delivery back, so that waiting for a rival is pointless.
    `arrived`: when, by the monotonic clock. `logged`: its outcome is in the delivery log.
    """

    message: Message
    handler: BoundHandler
    call: Call | None = None
    refusal: BadMessage | None = None
    suspicion: Suspicion = Suspicion.NONE
    attempts: int = 0
    spared: int = 0
    saga: SagaWork | None = None
    own_id: str | None = None
    first: bool = False
    pending: Pending | None = None
    row: tuple[int, int] | None = None
    letter: int | None = None
    _nonce: bytes = b""
    abandoned: Callable[[], bool] = bool
    stray: bool = False
    misread: bool = False
    put_by: int = 0
    eager: bool = False
    arrived: float = field(default_factory=time.monotonic)
    logged: bool = False

    @classmethod
    def of(
        cls,
        handler: BoundHandler,
        message: Message,
        *,
        suspect: bool = False,
        leased: LeasedSaga | None = None,
        refusal: BadMessage | None = None,
        own_id: str | None = None,
        first: bool = False,
        pending: Pending | None = None,
        row: tuple[int, int] | None = None,
        letter: int | None = None,
    ) -> Work:
        """Create the work and decode it, if decoding does not wait and there is no `refusal`. `leased`: the saga of
        this delivery, from the store."""
        saga = SagaWork(leased, resumed=leased is not None) if handler.leased else None
        attempts = 0 if refusal is None else refusal.attempts
        work = cls(
            message,
            handler,
            refusal=refusal,
            saga=saga,
            attempts=attempts,
            own_id=own_id,
            first=first,
            pending=pending,
            row=row,
            letter=letter,
        )
        work.read_now()
        if suspect:
            work.suspect()
        if pending is not None:
            work.attempts = max(work.attempts, pending.attempts)
        return work

    def read_now(self) -> bool:
        """Decode it, unless it is decoded or refused, or belongs to a saga that has to run alone even then. False: its
        decoding waits, so that only `read` can do it."""
        if self.call is not None or self.refusal is not None or (self.leased is not None and self.leased.suspect):
            return True
        if self.handler.waits_for(self.message):
            return False
        try:
            self._is_read(self.handler.call_for(self.message))
        except BadMessage as bad:
            self._is_misread(bad)
        return True

    async def read(self) -> None:
        """Decode it, also again: a message that could not be read may be readable by now."""
        if self.misread:
            self.refusal, self.misread = None, False
        if self.call is None and self.refusal is None:
            try:
                self._is_read(await reading.read(self.handler, self.message))
            except BadMessage as bad:
                self._is_misread(bad)

    def _is_misread(self, bad: BadMessage) -> None:
        # A copy without its traceback, whose frames refer to this work: a large body would stay in memory until a
        # garbage collection.
        self.refusal = (
            NotReadNow(bad.error)
            if isinstance(bad, NotReadNow)
            else BadMessage(bad.reason, bad.detail, attempts=bad.attempts, record=bad.record)
        )
        self.attempts, self.misread = max(self.attempts, bad.attempts), bad.reason != "oversized"

    def _is_read(self, call: Call) -> None:
        leased = self.leased
        if leased is not None:  # L17: the stored key counts, whatever the key rule makes of the message now
            call.claim = msgspec.structs.replace(
                call.claim, key=leased.key, scope=leased.scope, fingerprint=None, canonical=None
            )
        if self.pending is not None:
            call.claim = msgspec.structs.replace(
                call.claim, key=self.pending.key, scope=self.pending.scope, pending=True
            )
        self.call = call

    def suspect(self) -> None:
        """Mark it as a possible killer of a worker. Not for sagas, which count their takeovers."""
        if self.suspicion is Suspicion.NONE and not self.handler.leased:
            self.suspicion = Suspicion.MARKED if self.attempts else Suspicion.SUSPECT

    @property
    def suspected(self) -> bool:
        return self.suspicion is not Suspicion.NONE

    @property
    def alone(self) -> bool:
        """Whether nothing else of this process may run at the same time."""
        return self.suspicion in (Suspicion.BEGUN, Suspicion.COUNTED)

    @property
    def nonce(self) -> bytes:
        """A random id of this delivery, for a message without `own_id`."""
        self._nonce = self._nonce or secrets.token_bytes(16)
        return self._nonce

    @property
    def key(self) -> bytes:
        if self.call is not None:
            return self.call.claim.key
        stored = self.leased or self.pending
        return b"" if stored is None else stored.key

    @property
    def identity(self) -> bytes:
        """Tells it apart from other messages in this process, even if it cannot be read."""
        return self._nonce or self.key or self.nonce

    @property
    def named(self) -> dict[str, object]:
        """The fields that tell which message a log line is about (O9)."""
        attempt = self.attempt if self.leased is None else self.leased.attempt
        return named(self.handler, self.message, self.key) | {"attempt": attempt}

    @property
    def of_saga(self) -> SagaWork:
        """What is known of it as a delivery to a saga's handler."""
        assert self.saga is not None
        return self.saga

    @property
    def leased(self) -> LeasedSaga | None:
        """The saga of this delivery, if this worker holds it."""
        return None if self.saga is None else self.saga.leased

    @property
    def tenant(self) -> str | None:
        """Its tenant; None also if it is not decoded yet."""
        return None if self.call is None else self.call.tenant

    @property
    def claim(self) -> Claim:
        """Its claim. Only for a message that could be decoded."""
        assert self.call is not None
        return self.call.claim

    @property
    def known_claim(self) -> Claim | None:
        """The claim of its record, even if it can no longer be decoded. None: it has no key."""
        if self.call is not None or self.pending is None:
            return None if self.call is None else self.call.claim
        retain = self.handler.options.retain
        return Claim(self.pending.key, self.pending.scope, fingerprint=None, retain=retain, pending=True)

    def claimed(self, found: Found) -> None:
        """Note the result of its own claim. A record that waits for this message shows as claimed or BUSY; if the
        result is a record, none waits for it."""
        self.stray = self.stray or (self.claim.token is not None and isinstance(found, Record))

    def judge(self, found: Found) -> Verdict:
        """The verdict by its record, or by the owner of its key. A PENDING record is taken to wait for a message whose
        header says that it was accepted, until the message's own claim shows otherwise (H46)."""
        awaited = self.pending is not None or (self.claim.token is not None and not self.stray)
        return self.claim.judge(found, pending=awaited)

    def may_be_awaited(self, record: Record) -> bool:
        """Whether only its own claim shows if this record waits for it."""
        return record.state is State.PENDING and self.claim.token is not None and not (self.stray or self.pending)

    @property
    def attempt(self) -> int:
        return self.spared + self.attempts + (self.suspicion is not Suspicion.COUNTED)

    def failed(self, attempts: int) -> None:
        """A run of it failed and was counted: `attempts` is the new number. The run ended, so it killed no worker."""
        self.attempts = attempts
        if self.suspected:
            self.suspicion = Suspicion.MARKED


def named(handler: BoundHandler, message: Message, key: bytes = b"") -> dict[str, object]:
    """As `Work.named`, for a message that may not be decoded."""
    place = {"source": message.source, "position": message.position or message.message_id, "key": key}
    return {"handler": handler.name} | {name: value for name, value in place.items() if value}


def traced(tracing: Tracing, group: Sequence[Work]) -> AbstractContextManager[Processing]:
    """Around the run of a group, all of one handler (O20)."""
    head = group[0]
    handler, messages = head.handler, (work.message for work in group)
    return tracing.processing(handler.app, handler.name, handler.subscriptions[0].group, messages, head.key)
