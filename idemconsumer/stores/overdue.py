"""Accepted work that is too late, while its handler's reconcile is asked about it (H47)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from idemconsumer.message.headers import decode_headers
from idemconsumer.message.message import Message, StoredResult
from idemconsumer.message.names import StoredName
from idemconsumer.message.origin import restored
from idemconsumer.stores.claims import PostgresClaims, transaction
from idemconsumer.stores.pool import Pool


@dataclass(frozen=True, slots=True)
class Overdue:
    """A message that this sweeper has taken, for the handler that is stored as `name`. `waits`: it has not ended.
    `asked`: the number of this question; only the last one may decide. `failed`: how many questions in a row have
    failed, including this one until it is answered. `message`: as it was accepted, if that was kept."""

    key: bytes
    name: StoredName
    waits: bool
    asked: int
    failed: int
    message: Message | None


async def take_overdue(pool: Pool, names: Sequence[StoredName], seconds: float) -> Overdue | None:
    """Take one message, which no other process takes for `seconds`. None: nothing is due. Raises StoreUnavailable."""
    asked = {"apps": [name.app for name in names], "names": [name.handler for name in names], "taken": seconds}
    for key, app, handler, waits, body, headers, number, failed in await pool.alone("take_overdue", asked):
        message = None if body is None or headers is None else restored(Message("", body, decode_headers(headers)))
        return Overdue(key, StoredName(app, handler), waits, number, failed, message)
    return None


@asynccontextmanager
async def asking(pool: Pool, taken: Overdue) -> AsyncIterator[PostgresClaims | None]:
    """A transaction that locks the key as a claim does, so that no worker runs the message meanwhile. None: a worker is
    running it, it does not wait any more, or another process has asked since."""
    async with transaction(pool, group=1) as claims:
        asked = {"key": taken.key, "asked": taken.asked}
        ((locked,),), waits = await claims.begin(("lock_accepted", asked), ("see_accepted", asked))
        yield claims if locked and waits else None


async def complete(claims: PostgresClaims, taken: Overdue, result: StoredResult | None) -> None:
    """Commit COMPLETED with this result, and the writes of the transaction. Raises CommitUnknown."""
    results = [] if result is None else [(taken.key, result)]
    await claims.complete(results, [taken.key], more=[("complete_accepted", {"key": taken.key})])


async def ask_later(pool: Pool, taken: Overdue, seconds: float, failed: int) -> None:
    """Ask again after `seconds`, unless another process has asked since. Raises StoreUnavailable."""
    await pool.alone("ask_later", {"key": taken.key, "asked": taken.asked, "after": seconds, "failed": failed})
