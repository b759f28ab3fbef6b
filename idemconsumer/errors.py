"""Everything idemconsumer raises, in one tree, split by who must act.

* `ConfigurationError`: the author of the handler or the settings. Raised at import or at start, never per message.
  Later only by a worker whose place another one has (`Replaced`).
* `BadMessage`: the producer of the message. It becomes a dead letter; it never reaches a handler.
* `Retry`, `Reject`: not faults. A handler raises them to ask the engine for something.
* `Unavailable`: the operator of the servers. The worker waits, with backoff, and logs it once.
* `Interrupted`: no one. The engine rolls back and judges again.
"""

from __future__ import annotations

from datetime import timedelta


class IdemConsumerError(Exception):
    """The root of the tree.

    `by_function`: it left a user's function, which asked another app or another pool. So it says nothing about the
    engine that called the function, whatever its type says (B12).
    """

    by_function = False


class ConfigurationError(IdemConsumerError):
    """A mistake in code or settings. The text says where, and what to write instead."""


class NothingFound(IdemConsumerError):
    """What a person has asked about is not there. Nothing was done."""


class Replaced(ConfigurationError):
    """Another process has this worker's place, by a setting that should differ. Met while running, by this worker
    alone."""


class HandlerError(ConfigurationError):
    """A handler that cannot be run as written: `handler` is its name, `problem` what is wrong, `instead` what to write
    in its place."""

    def __init__(self, handler: str, problem: str, instead: str) -> None:
        super().__init__(f"handler {handler!r}: {problem}; {instead}")
        self.handler = handler
        self.problem = problem
        self.instead = instead


class BadMessage(IdemConsumerError):
    """A message that can never be run: undecodable, without its key, too large, deadly to whoever decodes it.

    `reason` is the dead letter's reason (`undecodable`, `key_missing`, `key_invalid`, `oversized`, `killed_worker`,
    `unreadable`).
    `detail` says what is wrong and never quotes the payload, since it is logged. `attempts` is how often it was tried,
    and `record` the key under which that is on record.
    """

    def __init__(self, reason: str, detail: str, *, attempts: int = 0, record: bytes | None = None) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail
        self.attempts = attempts
        self.record = record


class NotReadNow(BadMessage):
    """A message that `decode=` cannot read now: it asks for another attempt, or what it needs is away. Nobody is to
    blame, and it is read again (D26). `error` is what it raised."""

    def __init__(self, error: Exception) -> None:
        super().__init__("undecodable", f"decode= raised {type(error).__name__}, and is tried again")
        self.error = error


class CannotKeep(IdemConsumerError):
    """A store's own word that it can keep this result for nobody. Nothing of it is stored."""


class Retry(IdemConsumerError):
    """Raised by a handler: roll back and run me again after `after`: seconds, a duration like "5s", or the backoff.

    It costs an attempt. `message` is for people: it is stored as the error of the attempt, and logged as one (R13).
    Raised by a `decode=`: read the message again then, at no cost.
    """

    def __init__(self, message: str = "", *, after: str | float | timedelta | None = None) -> None:
        super().__init__(message)
        self.after = after


class Reject(IdemConsumerError):
    """Raised by a handler: final refusal. Effects roll back; `code` and `body` are stored for duplicates.

    `status` is the HTTP status, from 400 to 599, for who asks for what `app.accept` has taken; it is stored with them.
    """

    def __init__(self, code: str, body: object = None, *, status: int | None = None) -> None:
        if status is not None and status not in range(400, 600):
            raise ValueError(f"status={status!r}: write an HTTP status that says no, such as 409 or 422")
        super().__init__(code)
        self.code = code
        self.body = body
        self.status = status


SIGNAL_TIMEOUT: str = "signal_timeout"


class SignalTimeout(Reject):
    """Raised by `saga.wait`: the signal did not come in time. `signal` is its name.

    A handler that does not catch it is rejected: its finished steps are undone, and the code is `signal_timeout`.
    """

    def __init__(self, signal: str) -> None:
        super().__init__(SIGNAL_TIMEOUT, {"signal": signal})
        self.signal = signal


class Unavailable(IdemConsumerError):
    """A server cannot be used now. Nothing was settled; what was running is rolled back."""


class StoreUnavailable(Unavailable):
    """The database cannot be reached, or the connection broke before COMMIT was sent."""


class Denied(ConfigurationError):
    """The database's role lacks rights. `reads`: it has all those that reading takes."""

    def __init__(self, text: str, *, reads: bool = False) -> None:
        super().__init__(text)
        self.reads = reads


class LockNotGiven(StoreUnavailable):
    """Others kept a lock that a migration needs for longer than was to be waited. Nothing of it is applied."""


class ServerSilent(StoreUnavailable):
    """A statement, or the request to cancel it, got no answer. That the function was late is not its own fault."""


class ConnectionLost(StoreUnavailable):
    """The connection broke while a user's function ran in its transaction. Nothing of it is committed."""


class TransactionEnded(ConnectionLost):
    """The server ended a transaction that was idle for too long (25P03). Nothing of it is committed."""


class CrashedBeside(ConnectionLost):
    """The server ended every session because another one had crashed (57P02). Nothing of it is committed."""


class BrokerUnavailable(Unavailable):
    """The broker cannot be reached, or a source does not exist. The text says which and what to do."""


class SessionEnded(Unavailable):
    """The broker session is over; its deliveries are forgotten and will be redelivered."""


class Interrupted(IdemConsumerError):
    """The group's transaction ended without a verdict on its messages."""


class OfTheEngine(BaseException):
    """Raised by the engine where a user's function runs: it ends that, and is never the function's failure (B18)."""


class RunEagerly(OfTheEngine):
    """A statement that was sent ahead has failed: one of the handler's run number `run` in its transaction, or None if
    that is not certain. Without an `error` somebody asked for a count that is not known yet. All is run again (J27)."""

    def __init__(self, run: int | None = None, error: Exception | None = None) -> None:
        super().__init__(run, error)
        self.run = run
        self.error = error


class NestedRun(OfTheEngine):
    """A handler that `app.process` runs has called it, and would wait for a second connection with one in its hands
    (J29)."""


class Fenced(Interrupted):
    """The saga has another owner, or is in another phase. The run that gets this writes nothing and settles nothing."""


class SagaCancelled(Fenced):
    """A request to cancel the saga came before this write, and the run did not know it (L50)."""


class SagaParked(IdemConsumerError):
    """A saga that only a person can continue. `reason` is its dead letter's reason."""

    reason = ""


class SagaChanged(SagaParked):
    """The handler no longer fits what is recorded of the saga."""

    reason = "saga_changed"


class UnknownEffect(SagaParked):
    """It cannot be determined whether a call had its effect."""

    reason = "unknown_effect"


class SagaMisused(IdemConsumerError):
    """A handler broke its contract with the saga: a step requested twice, or left in flight."""


class CommitUnknown(Interrupted):
    """COMMIT was sent and its answer was lost. Only a new claim on a new connection can tell what happened."""


class Contention(Interrupted):
    """40001, 40P01, 55P03 or 53200: no message is at fault. The group runs again, at no cost of an attempt.

    `cap_groups` is true for 53200, where the shared lock table ran out and groups must be smaller.
    """

    def __init__(self, message: str, *, cap_groups: bool = False) -> None:
        super().__init__(message)
        self.cap_groups = cap_groups


class HandlerFault(IdemConsumerError):
    """A handler broke its contract with the transaction: swallowed a database error, or ended the transaction."""


class SelfCancelled(HandlerFault):
    """A user's function raised CancelledError though its task was not cancelled. How far it got is not known."""

    def __init__(self) -> None:
        super().__init__("raised CancelledError though nothing cancelled it")


class GuardViolated(HandlerFault):
    """The transaction that reached the seal is not the one that the engine opened. Everything was rolled back."""
