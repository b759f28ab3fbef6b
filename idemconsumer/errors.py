"""Everything idemconsumer raises, in one tree, split by who must act.

* `ConfigurationError`: the author of the handler or the settings. Raised at import or at start, never per message. The
  only one raised later is `Replaced`, by a worker whose place another process has taken.
* `BadMessage`: the producer of the message. It becomes a dead letter; it never reaches a handler.
* `Retry`, `Reject`: not faults. A handler raises them to ask the engine for something.
* `Unavailable`: the operator of the servers. The worker waits, with backoff, and logs it once.
* `Interrupted`: no one. The engine rolls back and decides again.
"""

from __future__ import annotations

from datetime import timedelta


class IdemConsumerError(Exception):
    """The base class of all errors of idemconsumer.

    `by_function`: the error came out of a user's function that called another app or another pool. Whatever its type,
    it then says nothing about the engine that called the function.
    """

    by_function = False


class ConfigurationError(IdemConsumerError):
    """Code or settings are wrong. The text says where, and what to write instead."""


class NothingFound(IdemConsumerError):
    """The thing that a person asked for does not exist. Nothing was done."""


class Replaced(ConfigurationError):
    """Another process has taken this worker's place, because both have the same value of a setting that must differ.
    Raised while the worker runs, and only in the worker that was replaced."""


class HandlerError(ConfigurationError):
    """A handler cannot run as written: `handler` is its name, `problem` is the mistake, and `instead` is the
    correction."""

    def __init__(self, handler: str, problem: str, instead: str) -> None:
        super().__init__(f"handler {handler!r}: {problem}; {instead}")
        self.handler = handler
        self.problem = problem
        self.instead = instead


class BadMessage(IdemConsumerError):
    """A message can never run: it cannot be decoded, has no key, is too large, or kills the process that decodes it.

    `reason` is the dead letter's reason (`undecodable`, `key_missing`, `key_invalid`, `oversized`, `killed_worker`,
    `unreadable`). `detail` explains the problem; since it is logged, it never quotes the payload. `attempts` counts the
    tries, and `record` is the key under which that count is stored.
    """

    def __init__(self, reason: str, detail: str, *, attempts: int = 0, record: bytes | None = None) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail
        self.attempts = attempts
        self.record = record


class NotReadNow(BadMessage):
    """`decode=` cannot read a message now: it raised Retry, or a server that it needs is down. Neither the message nor
    `decode=` is at fault, and the message is read again later (D26). `error` is the exception that it raised."""

    def __init__(self, error: Exception) -> None:
        super().__init__("undecodable", f"decode= raised {type(error).__name__}, and is tried again")
        self.error = error


class CannotKeep(IdemConsumerError):
    """A store reports that it cannot keep this result for anyone. Nothing of it is stored."""


class Retry(IdemConsumerError):
    """A handler raises this to roll back and run again after `after`: seconds, a duration like "5s", or the backoff.

    It costs an attempt. `message` is for people: it is stored as the attempt's error, and logged. If `decode=` raises
    it, the message is read again after that time, at no cost.
    """

    def __init__(self, message: str = "", *, after: str | float | timedelta | None = None) -> None:
        super().__init__(message)
        self.after = after


class Reject(IdemConsumerError):
    """A handler raises this to refuse a message for good. Effects roll back; `code` and `body` are stored for
    duplicates.

    `status`, an HTTP status from 400 to 599, is stored with them. Clients that ask for the result of an `app.accept`
    get it.
    """

    def __init__(self, code: str, body: object = None, *, status: int | None = None) -> None:
        if status is not None and status not in range(400, 600):
            raise ValueError(f"status={status!r}: write an HTTP error status, such as 409 or 422")
        super().__init__(code)
        self.code = code
        self.body = body
        self.status = status


SIGNAL_TIMEOUT: str = "signal_timeout"


class SignalTimeout(Reject):
    """`saga.wait` raises this if the signal did not come in time. `signal` is its name.

    If the handler does not catch it, the saga is rejected with the code `signal_timeout`: its finished steps are
    undone.
    """

    def __init__(self, signal: str) -> None:
        super().__init__(SIGNAL_TIMEOUT, {"signal": signal})
        self.signal = signal


class Unavailable(IdemConsumerError):
    """A server cannot be used now. Nothing was settled; runs in progress are rolled back."""


class StoreUnavailable(Unavailable):
    """The database cannot be reached, or the connection broke before COMMIT was sent."""


class StoreChanged(StoreUnavailable):
    """The database answers but has changed: a table, column, function or sequence of idemconsumer, or a right of the
    role, is not what one of its statements needs. The text says what to do; after that, work goes on by itself."""


class Denied(ConfigurationError):
    """The database's role lacks rights. `reads`: it has all rights that are needed for reading."""

    def __init__(self, text: str, *, reads: bool = False) -> None:
        super().__init__(text)
        self.reads = reads


class LockNotGiven(StoreUnavailable):
    """Others kept a lock that a migration needs for longer than the wait allowed. Nothing of it is applied."""


class ServerSilent(StoreUnavailable):
    """A statement, or the request to cancel it, got no answer. If the function timed out, that was not its fault."""


class ConnectionLost(StoreUnavailable):
    """The connection broke while a user's function ran in its transaction. Nothing of it is committed."""


class TransactionEnded(ConnectionLost):
    """The server ended a transaction that was idle for too long (25P03). Nothing of it is committed."""


class CrashedBeside(ConnectionLost):
    """The server ended every session because another one had crashed (57P02). Nothing of it is committed."""


class BrokerUnavailable(Unavailable):
    """The broker cannot be reached, or a source does not exist. The text names it and says what to do."""


class SessionEnded(Unavailable):
    """The broker session is over; its deliveries are forgotten and will be redelivered."""


class Interrupted(IdemConsumerError):
    """The group's transaction ended without a verdict on its messages."""


class OfTheEngine(BaseException):
    """Raised by the engine where a user's function runs, to end the function. Never counts as a failure of the function
    (B18)."""


class RunEagerly(OfTheEngine):
    """A pipelined statement, which was sent without waiting for its result, has failed (J27). Everything in the
    transaction runs again. `run` is the number of the handler's run in its transaction; None if that is not certain.
    Without an `error`, code asked for a row count that is not known yet."""

    def __init__(self, run: int | None = None, error: Exception | None = None) -> None:
        super().__init__(run, error)
        self.run = run
        self.error = error


class NestedRun(OfTheEngine):
    """A handler that `app.process` runs has called `app.process` again (J29). The inner call would wait for a second
    connection while the outer one holds its own."""


class Fenced(Interrupted):
    """The saga has another owner, or is in another phase. The run that gets this writes nothing and settles nothing."""


class SagaCancelled(Fenced):
    """A request to cancel the saga came before this write, and the run did not know it (L50)."""


class SagaParked(IdemConsumerError):
    """Only a person can continue the saga. `reason` is its dead letter's reason."""

    reason = ""


class SagaChanged(SagaParked):
    """The handler no longer fits the recorded steps of the saga."""

    reason = "saga_changed"


class UnknownEffect(SagaParked):
    """It cannot be determined whether a call had its effect."""

    reason = "unknown_effect"


class SagaMisused(IdemConsumerError):
    """A handler broke its contract with the saga: a step requested twice, or left in flight."""


class CommitUnknown(Interrupted):
    """COMMIT was sent and its answer was lost. Only a new claim on a new connection can tell what happened."""


class Contention(Interrupted):
    """40001, 40P01, 55P03 or 53200: no message is at fault. The group runs again, and this costs no attempt.

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
