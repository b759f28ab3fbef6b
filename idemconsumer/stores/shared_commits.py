"""Group commit for sagas: writes that arrive during one shared commit go into the next one (L9).

Most of a saga's commits are small and ready at once: claims, intents, outputs, completions. One transaction at a time
takes those of all sagas of the process, in one message, with one set-based statement per kind; each row is fenced
separately. No write waits for a group to fill: one that arrives alone is committed alone, at once. If a shared
transaction leaves a write out, for any reason, its caller repeats the write in a transaction of its own, which waits
for locks where it must and raises the reason. So one saga's failure never affects another.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, Final

from psycopg.pq.abc import PGresult

from idemconsumer.errors import CommitUnknown, Fenced, SagaCancelled, StoreUnavailable
from idemconsumer.logs import log
from idemconsumer.rules.claim import Claim
from idemconsumer.rules.values import Mark, Record
from idemconsumer.stores.answers import begun as begun_sagas
from idemconsumer.stores.claims import PostgresClaims, transaction
from idemconsumer.stores.columns import Statement, claimed
from idemconsumer.stores.leased_saga import LeasedSaga
from idemconsumer.stores.pool import Pool
from idemconsumer.stores.together import Together

BEGIN_SAGAS: Final = "begin_sagas"
BEGIN_STEPS: Final = "begin_steps"
FINISH_STEPS: Final = "finish_steps"
END_SAGAS: Final = "end_sagas"
NOT_OURS: Final = "the saga has another owner, or another phase"
ENDED: Final = "the step has already ended, so another worker has resumed the saga"
_IDENTITY: Final = attrgetter("identity")
_KINDS: Final = (BEGIN_SAGAS, BEGIN_STEPS, FINISH_STEPS, END_SAGAS)

_MOST_WRITES: Final = 128  # the same as the keys of a joined group (G4)
_MOST_BYTES: Final = 4 << 20  # of bodies and outputs: a statement is built in memory on both sides

# The result of a write: the saga's fence token, the attempt of a step that begins, the position of one that has ended;
# the result of a claim that failed; None: not written.
Answer = int | Record | Mark | None


class Write:
    """One row for one of the set-based statements: a value for each of its arrays. `claim`: that of a saga that begins.

    `identity`: the saga's key and the step's name, empty for a write about the whole saga.
    """

    __slots__ = ("claim", "identity", "row", "statement")

    def __init__(self, statement: str, row: Mapping[str, Any], claim: Claim | None = None) -> None:
        self.statement = statement
        self.row = row
        self.claim = claim
        self.identity: tuple[bytes, str] = row["key"] if claim is None else claim.key, row.get("name", "")

    @property
    def size(self) -> int:
        return sum([len(value) for value in self.row.values() if type(value) is bytes])


async def send(claims: PostgresClaims, write: Write) -> int | None:
    """Write in a transaction that is open. None: the fence stopped it."""
    assert write.claim is None
    rows = await claims.send(f"{write.statement}:one", dict(write.row))
    return int(rows[0][2]) if rows else None


async def commit(claims: PostgresClaims, writes: Sequence[Write]) -> dict[Write, Answer]:
    """Commit a whole transaction in one message, with one statement for all writes of a kind. The result leaves out the
    writes that the fence stopped."""
    sent: list[tuple[Statement, list[Write]]] = []
    for name in _KINDS:
        if kind := [write for write in writes if write.statement == name]:
            if name == END_SAGAS and len(kind) > 1:
                sent.append((("no_scans", {}), []))
            sent.append((await _statement(claims, kind), kind))
    answers = await claims.commit([statement for statement, _ in sent])
    written: dict[Write, Answer] = {}
    for answer, (_, kind) in zip(answers, sent, strict=True):
        written |= _answered(claims, answer, kind)
    return written


async def _statement(claims: PostgresClaims, kind: Sequence[Write]) -> Statement:
    name, columns = kind[0].statement, {column: [write.row[column] for write in kind] for column in kind[0].row}
    more: dict[str, Any] = {}
    if begun := [write.claim for write in kind if write.claim is not None]:
        scopes = await claims.scope_ids(begun)
        columns |= {"key": [claim.key for claim in begun], "scope": scopes}
        more = {"claims": claimed(begun, scopes)}
    if len(kind) == 1:
        return f"{name}:one", {column: value for column, (value,) in columns.items()} | more
    return name, columns | more


def _answered(claims: PostgresClaims, answer: PGresult, kind: Sequence[Write]) -> dict[Write, Answer]:
    if kind and kind[0].statement == BEGIN_SAGAS:
        return dict(zip(kind, begun_sagas(answer, [write.identity[0] for write in kind]), strict=True))
    answers = {(key, step): int(value) for key, step, value in claims.rows(answer)} if kind else {}
    return {write: value for write in kind if (value := answers.get(write.identity)) is not None}


def fence(saga: LeasedSaga) -> dict[str, Any]:
    """The parameters with which a statement fences itself."""
    return {"key": saga.key, "token": saga.token, "worker": saga.worker, "phase": int(saga.state)}


def see_whole(locked: Sequence[tuple[Any, ...]], saga: LeasedSaga, *, ends: bool = True) -> None:
    """Read what `fence_whole` returned. Raises Fenced when the saga is no longer ours, and SagaCancelled if the write
    `ends` it or its phase, and it is to be cancelled by now (L50)."""
    if not locked:
        raise Fenced(NOT_OURS)
    if ends and locked[0][1] is not None and saga.cancel is None:
        raise SagaCancelled("it is to be cancelled")


async def _alone(claims: PostgresClaims, saga: LeasedSaga, write: Write) -> int:
    """Write it in a transaction of its own. If it is left out, wait for the saga's row and repeat, or raise why."""
    await claims.begin()
    answer = await send(claims, write)
    if answer is None:
        if write.statement == END_SAGAS:
            see_whole(await claims.send("fence_whole", fence(saga)), saga)
        elif not await claims.send("fence", fence(saga)):
            raise Fenced(NOT_OURS)
        answer = await send(claims, write)
    if answer is None:
        raise Fenced(ENDED)
    await claims.complete([], [])
    return answer


class SharedCommits:
    """The shared commits of one process."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._together = Together(self._flush, _next_group, commits=True)

    async def begin(self, write: Write) -> int | Record | Mark:
        """Commit the claim of a saga. Returns its token, or the claim result if the key was not claimed."""
        answer = await self._together.ask(write)
        if answer is None:
            async with transaction(self._pool, group=1) as claims:
                answer = (await commit(claims, [write]))[write]
        assert answer is not None
        return answer

    async def write(self, saga: LeasedSaga, write: Write) -> int:
        """Commit a write of a saga that this worker holds. Raises Fenced, and SagaCancelled as `see_whole`."""
        answer = await self._together.ask(write)
        if answer is None:
            async with transaction(self._pool, group=1) as claims:
                answer = await _alone(claims, saga, write)
        assert isinstance(answer, int)
        return answer

    async def _flush(self, writes: Sequence[Write]) -> list[Answer]:
        """Run one transaction, always with a group's short lock_timeout, so that no row delays the others for long.
        None for a write that was left out and must be repeated alone. Raises StoreUnavailable when nothing was written,
        and CommitUnknown when the answer to its COMMIT was lost."""
        try:
            async with transaction(self._pool, group=max(2, len(writes))) as claims:
                answers = await commit(claims, sorted(writes, key=_IDENTITY))
        except (StoreUnavailable, CommitUnknown):
            raise
        except Exception as error:  # noqa: BLE001 - each transaction of its own will show which write failed
            kind = type(error).__name__
            log.info("shared commit failed, committing each write alone", writes=len(writes), error=kind)
            answers = {}
        return [answers.get(write) for write in writes]


def _next_group(queue: Iterable[Write]) -> list[Write]:
    """The next writes that may share a transaction, in order of arrival.

    Different steps of one saga may go together. A write about the whole saga, its claim or its end, is the only one of
    its saga in the group. No run ends a saga while one of its steps waits to be written; but if one ever did, the
    statement for the end would have to see the step's row.
    """
    group: list[Write] = []
    names: dict[bytes, set[str]] = {}
    size = 0
    for write in queue:
        key, name = write.identity
        beside = names.setdefault(key, set())
        if name in beside or (beside and (not name or "" in beside)):
            continue
        size += write.size
        if group and size > _MOST_BYTES:
            break
        beside.add(name)
        group.append(write)
        if len(group) == _MOST_WRITES:
            break
    return group
