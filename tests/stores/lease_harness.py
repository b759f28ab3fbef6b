"""How the suite of a LeaseStore reaches one database, and what its tests share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Protocol

import pytest

from idemconsumer.handlers.arguments import Tx
from idemconsumer.message.message import Message, StoredResult
from idemconsumer.rules.claim import Claim
from idemconsumer.rules.values import Record, StepKind, StepRow, StepState
from idemconsumer.stores.joined import PostgresStore
from idemconsumer.stores.leased_saga import LeasedSaga
from idemconsumer.stores.leases import PostgresLeases as LeaseStore
from tests.stores.store_contract import claim_of

PATIENCE = 5.0  # seconds allowed for anything that must not wait for a rival
WHILE = 0.2  # seconds after which what has not ended is assumed to wait

APP, HANDLER = "shop", "pay"
OUTPUT = StoredResult(b'{"charge": "c-1"}')
REJECTION = StoredResult(b'{"code": "no_funds", "body": null}')


@dataclass(frozen=True)
class LeaseWorker:
    """One worker process, as far as a store can tell: `joined` and `leases` on one database, under one lease.

    `expire` ends that lease, as time does for a worker that was killed; `leases` goes on without noticing.
    """

    joined: PostgresStore
    leases: LeaseStore
    expire: Callable[[], Awaitable[None]]


class LeaseHarness(Protocol):
    """How the suite reaches one database."""

    async def worker(self) -> LeaseWorker:
        """One more worker on the same database, with a lease of its own of an hour. The suite closes `joined`."""
        ...

    async def write(self, tx: Tx, effect: str) -> None:
        """An effect of a step. Written twice it must be found twice."""
        ...

    async def break_transaction(self, tx: Tx) -> None:
        """A statement that fails, and fails the transaction; its error is swallowed."""
        ...

    async def commit(self, tx: Tx) -> None:
        """Try to commit, as no step may; the error of the database is swallowed."""
        ...

    async def effects(self) -> list[str]:
        """The effects that are committed, sorted."""
        ...

    async def letters(self) -> list[tuple[str, int]]:
        """Reason and number of arrivals of each dead letter, oldest first."""
        ...

    async def history(self, key: bytes) -> list[tuple[str, str | None]]:
        """What was noted of a saga, with its detail, oldest first."""
        ...


@pytest.mark.asyncio
class LeaseFixtures:
    """Two workers on one database, for the parts of the suite."""

    @pytest.fixture
    async def workers(self, harness: LeaseHarness) -> AsyncIterator[tuple[LeaseWorker, LeaseWorker]]:
        async with AsyncExitStack() as stack:
            pair = await harness.worker(), await harness.worker()
            for worker in pair:
                stack.push_async_callback(worker.joined.close)
            yield pair

    @pytest.fixture
    def one(self, workers: tuple[LeaseWorker, LeaseWorker]) -> LeaseWorker:
        return workers[0]

    @pytest.fixture
    def two(self, workers: tuple[LeaseWorker, LeaseWorker]) -> LeaseWorker:
        return workers[1]


def message_of(text: str) -> Message:
    return Message(
        "memory:orders", text.encode() + b"\x00\xff", {"text": "äöü", "bytes": b"\xff"}, message_id=text, position="o-1"
    )


async def begin(worker: LeaseWorker, text: str, *, scope: str | None = None, handler: str = HANDLER) -> LeasedSaga:
    """Begin a saga under a new key; this worker holds it."""
    claim = claim_of(text)
    if scope is not None:
        claim = Claim(claim.key, scope, claim.fingerprint)
    saga = await worker.leases.begin(claim, message_of(text), handler, "v1")
    assert isinstance(saga, LeasedSaga)
    return saga


async def take(worker: LeaseWorker, limit: int = 10, *, key: bytes | None = None) -> list[LeasedSaga]:
    """Take over what this worker may of the sagas of `HANDLER`, without waiting."""
    async with asyncio.timeout(PATIENCE):
        return await worker.leases.take(APP, [HANDLER], limit, key=key)


async def take_one(worker: LeaseWorker) -> LeasedSaga:
    (saga,) = await take(worker)
    return saga


async def record(worker: LeaseWorker, key: bytes) -> Record | None:
    (found,) = await worker.joined.peek([key])
    return found


async def record_call(
    worker: LeaseWorker,
    saga: LeasedSaga,
    name: str,
    state: StepState = StepState.DONE,
    output: StoredResult | None = None,
    *,
    has_undo: bool = False,
    overlapped: bool = False,
) -> None:
    await worker.leases.record(saga, name, StepKind.CALL, state, output, has_undo=has_undo, overlapped=overlapped)


async def finish_call(
    worker: LeaseWorker, saga: LeasedSaga, name: str, output: StoredResult | None = None, *, has_undo: bool = False
) -> None:
    """Intend and record, as for a call that succeeds."""
    await worker.leases.intend(saga, name, has_undo=has_undo, undo=False)
    await record_call(worker, saga, name, StepState.DONE, output, has_undo=has_undo)


async def finish_step(
    worker: LeaseWorker, saga: LeasedSaga, name: str, output: StoredResult | None = None, *, has_undo: bool = False
) -> None:
    """A `tx` step whose function does nothing."""
    async with worker.leases.step(saga, name, has_undo=has_undo, undo=False) as step:
        await step.finish(output, overlapped=False)


async def step_row(worker: LeaseWorker, saga: LeasedSaga, name: str) -> StepRow:
    (row,) = [row for row in await worker.leases.steps(saga.key) if row.name == name]
    return row


async def waits(task: asyncio.Task[object]) -> bool:
    """Whether it has not ended after a while."""
    done, _ = await asyncio.wait({task}, timeout=WHILE)
    return not done
