"""Transactions of a saga in which a user's function runs: a `tx` step or its undo, and a completion in doubt.

The saga's row is locked already, and what they are about to do is written; they are not sealed yet.
"""

from __future__ import annotations

from typing import Any

from idemconsumer.message.message import StoredResult
from idemconsumer.rules.claim import Claim
from idemconsumer.rules.values import Record, State, StepState
from idemconsumer.stores.claims import PostgresClaims
from idemconsumer.stores.columns import claimed
from idemconsumer.stores.leased_saga import Begun, Kinship, LeasedSaga


class PostgresCompletion:
    """A transaction that completes the saga if it is done; its record is COMPLETED already. `claims` is the
    transaction."""

    def __init__(self, claims: PostgresClaims, saga: LeasedSaga) -> None:
        self.claims = claims
        self._key = saga.key
        self.tx = claims.tx
        self.check = claims.check

    async def finish(self, result: StoredResult | None) -> None:
        """Store the result, delete the saga's row, seal and COMMIT as one act. Raises as `PostgresClaims.complete`."""
        note = {"key": self._key, "what": "reconciled", "detail": "done"}
        results = [] if result is None else [(self._key, result)]
        await self.claims.complete(results, [], more=[("note", note), ("end_saga", {"key": self._key})])


class PostgresStep:
    """The transaction of a `tx` step, or of its undo; the checkpoint is inserted. `claims` is the transaction."""

    def __init__(self, claims: PostgresClaims, saga: LeasedSaga, name: str, *, undo: bool) -> None:
        self.claims = claims
        self._key = saga.key
        state = StepState.UNDONE if undo else StepState.DONE
        self._finished = {"key": saga.key, "token": saga.token, "name": name, "state": int(state)}
        self.tx = claims.tx
        self.check = claims.check

    async def start_child(self, claim: Claim, queued: tuple[str, str] | None) -> Begun:
        """Record that this saga starts the one of `claim` (L47). `queued`: the queue and the key of its message; then a
        message that another client has put there counts as existing."""
        queue, given = queued or (None, None)
        its = {"claims": claimed([claim], [None]), "key": self._key, "queue": queue, "given": given}
        rows = await self.claims.send("start_child", its)
        found = [Record(State(state), fingerprint, canonical=canonical) for state, fingerprint, canonical, *_ in rows]
        return Begun(found, *rows[0][3:])

    async def kinship(self, child: bytes) -> Kinship:
        """As `PostgresLeases.kinship`."""
        (row,) = await self.claims.send("kinship", {"key": self._key, "child": child})
        return Kinship(*row)

    async def finish(self, output: StoredResult | None, *, overlapped: bool) -> int:
        """Store output and position, seal and COMMIT as one act; returns the position. Raises as
        `PostgresClaims.complete`."""
        return await self.claims.complete([], [], last=("finish_step", self._finished | finished(output, overlapped)))


def finished(output: StoredResult | None, overlapped: bool) -> dict[str, Any]:
    """The parameters of a step's end."""
    return {
        "overlapped": overlapped,
        "output": None if output is None else output.body,
        "content_type": None if output is None else output.content_type,
    }
