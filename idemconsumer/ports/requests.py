"""What the front door needs of a store, for requests whose effects are not in a transaction of ours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from idemconsumer.message.message import StoredResult
from idemconsumer.rules.claim import Claim
from idemconsumer.rules.values import Record


@dataclass(frozen=True, slots=True)
class Held:
    """A key that this process has leased for a running request. `token` fences: a later owner has a greater one.

    `again`: a former owner was lost while it had the key, so the handler may have run before, in part or to its end.
    `since`: when that owner claimed the key. `unclaimed`: no process has the key, since the store is down and its
    outage policy is to run nevertheless; others may run the request too, and nothing will be stored.
    """

    claim: Claim
    token: int
    again: bool = False
    unclaimed: bool = False
    since: datetime | None = None


@dataclass(frozen=True, slots=True)
class Running:
    """Another owner has the key. `record` is None if it is not known yet for which request.

    `lost`: that owner was lost, and no other has taken the key since, because the request has another fingerprint or
    must not run again.
    """

    record: Record | None = None
    lost: bool = False


@dataclass(frozen=True, slots=True)
class LostRequest:
    """A request that was begun, and whose owner was lost: it is unknown how far it got.

    `key` is the key as it is stored, in hex; `current_key()` returned it in the endpoint. `app`, `tenant` and `route`
    identify the request. `since` is the time when the lost owner claimed it, the last one if there were several.
    `token` identifies this owner; once another owner has taken the key, calls with this token are refused.
    """

    key: str
    app: str
    tenant: str | None
    route: str
    since: datetime
    token: int


class RequestStore(Protocol):
    """A store that claims first and completes afterwards (leased mode of a request).

    The store renews the lease of a claim until `complete` or `release` has succeeded. If the owner dies, the lease
    ends after `lease` seconds, and the next claim of the key gets it. The handler may then run a second time, since it
    is unknown how far the first run got (`Held.again`). The lease of a running request does not end otherwise.
    `claim`, `complete` and `peek` raise StoreUnavailable if nothing could be decided: then nothing may run.
    """

    async def claim(self, claim: Claim, lost: Callable[[], None], *, again: bool = True) -> Held | Running | Record:
        """Lease the key. Returns the final record if there is one, also one with another fingerprint, or Running if
        another owner has the key. An expired record (`Claim.expires`) counts as none. `lost` is called in the event
        loop once the lease is over.

        If the key's owner was lost, the next claim with the same fingerprint gets the key. With `again` false it does
        not: the result stays Running until a person has released the key. If this raises or is cancelled, no key stays
        leased.
        """
        ...

    async def complete(self, held: Held, result: StoredResult, *, failed: bool = False) -> bool:
        """Store the final response: COMPLETED, or FAILED. Returns False, with nothing stored, if another owner has the
        key by now. It can be repeated: True if exactly this response is stored.

        Raises CannotKeep for a response that this store can never store; it has then released the key. After any other
        exception, or a cancellation, the store keeps trying by itself, and the key stays leased meanwhile; call again
        to learn the result.
        """
        ...

    async def release(self, held: Held, *, ran: bool = False) -> None:
        """End a claim whose handler has done nothing that counts: the next claim of the key is new, or has `again` if
        this one had it. With `ran`, it is unknown whether the handler did anything, so the key is treated as if the
        lease had ended. During an outage this returns at once; the release happens when the outage is over, or when the
        lease ends."""
        ...

    async def peek(self, key: bytes) -> Record | None:
        """Return the present record, unless it has expired. Claims nothing."""
        ...

    async def lost(self) -> list[LostRequest]:
        """Return the requests whose owner was lost and that no one has taken since, oldest first. Raises
        StoreUnavailable."""
        ...

    async def settle_lost(self, lost: LostRequest, result: StoredResult, *, by: str, failed: bool = False) -> bool:
        """Store the response of a lost request; raises as `complete`. Returns False, with nothing stored, if the
        request is not lost any more. It can be repeated: True if exactly this response is stored. `by`: the person who
        decided, for the audit, if the store has one."""
        ...

    async def release_lost(self, lost: LostRequest, *, by: str) -> bool:
        """End the claim of a lost request that did nothing that counts: the next claim of the key is new. Returns
        False, with nothing changed, if the request is not lost any more. Raises StoreUnavailable and CommitUnknown."""
        ...

    async def close(self) -> None:
        """Release the keys that are still leased; their next claims have `again`."""
        ...
