"""Observers, and the named points that a message and a saga pass."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol, runtime_checkable

from idemconsumer.message.message import Message
from idemconsumer.rules.values import Outcome


class Observer(Protocol):
    """Called at every named point, once per group; at FETCHED, DISPATCHED and a single message's HANDLED once per
    message. It decides nothing and must not raise."""

    def at(self, point: Point | SagaPoint, handler: str, keys: Sequence[bytes]) -> None: ...


@runtime_checkable
class SeesOutcomes(Protocol):
    """An observer that also gets the outcome of each run of a delivery, once its broker knows it."""

    def ended(self, handler: str, message: Message, outcome: Outcome) -> None: ...


class NullObserver:
    """The observer that does nothing."""

    def at(self, point: Point | SagaPoint, handler: str, keys: Sequence[bytes]) -> None:
        return


class Point(StrEnum):
    """Named places on the path of one message; a crash at any of them must neither lose nor double anything.

    * Before it runs: `fetched` from its broker. `reading` and `read`, around the decoding of a message that may have
      killed a worker. `dispatched` to its lane. `suspects_marked` or `suspect_counted`, for such messages before they
      run.
    * In its transaction: `claimed`, `handled`, and `sealing` just before COMMIT.
    * Once the result is known: `committed` or `rolled_back`.
    * After a failure: `attempt_counted`; `rejecting`, `rejected`; `dead_lettering`, `dead_lettered`.
    * Finally: `settling` and `settled` with the broker.
    * Apart from these: `relaying` and `relayed`, around the sending of outgoing messages, before their rows are
      deleted; for these two, the handler is the destination.
    """

    FETCHED = "fetched"
    READING = "reading"
    READ = "read"
    DISPATCHED = "dispatched"
    SUSPECTS_MARKED = "suspects_marked"
    SUSPECT_COUNTED = "suspect_counted"
    CLAIMED = "claimed"
    HANDLED = "handled"
    SEALING = "sealing"
    COMMITTED = "committed"
    ROLLED_BACK = "rolled_back"
    ATTEMPT_COUNTED = "attempt_counted"
    REJECTING = "rejecting"
    REJECTED = "rejected"
    DEAD_LETTERING = "dead_lettering"
    DEAD_LETTERED = "dead_lettered"
    SETTLING = "settling"
    SETTLED = "settled"
    RELAYING = "relaying"
    RELAYED = "relayed"


class SagaPoint(StrEnum):
    """Like `Point`, for the steps of a saga.

    * A `tx` step: `step_opening`, `step_committing`, `step_committed`.
    * A call: `intending`, `intended`, `called` when the remote service has answered, `step_recorded`.
    * An undo: `undoing`, `undone`, with `called` in between if it undoes a call.
    * `released`: any worker may take the saga after a failure.
    * `pausing`, `paused`: the run has ended until one of the saga's waits is over.
    """

    STEP_OPENING = "step_opening"
    STEP_COMMITTING = "step_committing"
    STEP_COMMITTED = "step_committed"
    INTENDING = "intending"
    INTENDED = "intended"
    CALLED = "called"
    STEP_RECORDED = "step_recorded"
    UNDOING = "undoing"
    UNDONE = "undone"
    RELEASED = "released"
    PAUSING = "pausing"
    PAUSED = "paused"
