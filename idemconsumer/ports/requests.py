"""What the front door needs of a store, for requests whose effects are in no transaction of ours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from idemconsumer.message.message import StoredResult
from idemconsumer.ports.store import Claim
from idemconsumer.rules.values import Record


@dataclass(frozen=True, slots=True)
class Held:
    """A key that this process holds for a request that runs. `token` fences: a later owner has a greater one.

    `again`: a former owner was lost while it held the key, so the handler may have run before, in part or to its
    end. `since`: when that one claimed it.
    `unclaimed`: nobody holds the key. The store is down, and its outage policy is to run nevertheless; others may run
    it too, and nothing will be stored.
    """

    claim: Claim
    token: int
    again: bool = False
    unclaimed: bool = False
    since: datetime | None = None


@dataclass(frozen=True, slots=True)
class Running:
    """Somebody else holds the key. `record` is None where what it is held for is not known yet.

    `lost`: its owner was lost, and nobody has it now; it is of another fingerprint, or was not to be run again.
    """

    record: Record | None = None
    lost: bool = False


@dataclass(frozen=True, slots=True)
class LostRequest:
    """A request that was begun, and whose owner was lost: nobody knows how far it came.

    `key` is as it is stored, in hex: what `current_key()` said in its endpoint. `app`, `tenant` and `route`:
    whose it is. `since`: when the owner that was lost claimed it, the last one if there were several. `token`: that of
    this owner; once another one has taken the key, what was meant for this one is refused.
    """

    key: str
    app: str
    tenant: str | None
    route: str
    since: datetime
    token: int


class RequestStore(Protocol):
    """Claims first, and completes afterwards (leased mode of a request).

    A claim that is held is renewed by the store until `complete` or `release` has done its work. If its owner dies it
    is over after `lease` seconds, and the next claim of the key gets it: the handler may run a second time then, since
    nobody knows how far the first one came (`Held.again`). What runs does not expire otherwise. `claim`, `complete` and
    `peek` raise StoreUnavailable when nothing could be decided: nothing may run then.
    """

    async def claim(self, claim: Claim, lost: Callable[[], None], *, again: bool = True) -> Held | Running | Record:
        """Hold the key; or the final record, also one of another fingerprint; or who holds it. A record that has
        expired (`Claim.expires`) counts as none. `lost` is called in the loop once the lease of it is over.

        A key whose owner was lost is given to the next claim with the same fingerprint; with `again` false it is not,
        and stays Running until a person has released it. If this raises or is cancelled, nothing stays held."""
        ...

    async def complete(self, held: Held, result: StoredResult, *, failed: bool = False) -> bool:
        """Store the response, final: COMPLETED, or FAILED. False: another owner has the key by now, and nothing was
        stored. It can be repeated: True if exactly this response is what is stored.

        Raises CannotKeep for a response that this store can keep for nobody: it has given the key back then. Whatever
        else it raises, or when it is cancelled, the store goes on trying by itself, and the claim stays held meanwhile;
        call it again to know more."""
        ...

    async def release(self, held: Held, *, ran: bool = False) -> None:
        """The handler has not done anything that counts: the next claim of the key is new; or `again`, if this one was.
        With `ran` nobody knows whether it has: as if the lease had ended. During an outage this returns, and is done
        when that is over, or with the end of the lease."""
        ...

    async def peek(self, key: bytes) -> Record | None:
        """What is on record now, unless it has expired. Claims nothing."""
        ...

    async def lost(self) -> list[LostRequest]:
        """Requests whose owner was lost and that nobody has taken since, the oldest first. Raises StoreUnavailable."""
        ...

    async def settle_lost(self, lost: LostRequest, result: StoredResult, *, by: str, failed: bool = False) -> bool:
        """Store the response of a lost request, as `complete`, and raises as that. False: it is not lost any more, and
        nothing was stored. Can be repeated: True if exactly this response is what is stored. `by`: who decides, for the
        audit, where the store has one."""
        ...

    async def release_lost(self, lost: LostRequest, *, by: str) -> bool:
        """It did nothing that counts: the next claim of the key is new. False: it is not lost any more, and nothing was
        changed. Raises StoreUnavailable and CommitUnknown."""
        ...

    async def close(self) -> None:
        """What is still held is free from now on, with `again`."""
        ...
