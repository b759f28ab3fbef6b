"""Requests in leased mode whose owner was lost: asking `reconcile` about them, and storing decisions (H35, H36)."""

from __future__ import annotations

import asyncio
from typing import Final

from idemconsumer.errors import SelfCancelled
from idemconsumer.handlers.arguments import Done, NotDone, Unknown
from idemconsumer.http.exchanged import Response
from idemconsumer.http.policy import Policy
from idemconsumer.logs import log
from idemconsumer.message.keys import parts_of
from idemconsumer.ports.requests import Held, LostRequest, RequestStore
from idemconsumer.user_code.call import without_exit
from idemconsumer.user_code.cancellation import being_cancelled, ends_this_task, run_mortal

_SECONDS: Final = 30.0  # seconds for an answer, if the route has no timeout
_GRACE: Final = 5.0  # seconds for a cancelled `reconcile` to end: its key is held, and a client waits


class LostRequests:
    """The lost requests of one store, for one app or all. `by`: who decides, for the log and the audit."""

    def __init__(self, store: RequestStore, *, app: str | None = None, by: str) -> None:
        self._store = store
        self._app = app
        self._by = by

    async def all(self) -> list[LostRequest]:
        """All lost requests, oldest first. Raises StoreUnavailable."""
        return [each for each in await self._store.lost() if self._app in (None, each.app)]

    async def settle(self, lost: LostRequest, response: Response) -> bool:
        """Store the response. See `RequestStore.settle_lost`."""
        failed = response.status >= 400
        settled = await self._store.settle_lost(lost, response.stored(), by=self._by, failed=failed)
        return self._decided("a lost request was settled", lost, settled, status=response.status)

    async def release(self, lost: LostRequest) -> bool:
        """Release the key. See `RequestStore.release_lost`."""
        return self._decided("a lost request was released", lost, await self._store.release_lost(lost, by=self._by))

    def _decided(self, what: str, lost: LostRequest, done: bool, **more: object) -> bool:
        if done:
            about = {"app": lost.app, "route": lost.route, "key": lost.key, "since": f"{lost.since:%Y-%m-%d %H:%M:%S}Z"}
            log.warning(what, by=self._by, **about, **more)
        return done


async def ask(held: Held, policy: Policy) -> Response | NotDone | Unknown:
    """Ask the route's `reconcile` what became of a request that a former owner may have executed. An error, a timeout
    or an invalid answer counts as Unknown; only a cancellation of this task is raised."""
    assert policy.route.reconcile is not None
    assert held.since is not None
    claim = held.claim
    lost = LostRequest(claim.key.hex(), *parts_of(claim.scope), held.since, held.token)
    seconds = policy.timeout or _SECONDS

    def left() -> None:
        log.warning("reconcile did not end after its cancellation", route=policy.name, seconds=_GRACE)

    try:
        async with asyncio.timeout(seconds):
            answer = await run_mortal(without_exit(policy.route.reconcile(lost)), _GRACE, left)
    except BaseException as error:  # an error of user code: the outcome stays unknown
        if being_cancelled() or ends_this_task(error):
            raise
        known = SelfCancelled() if isinstance(error, asyncio.CancelledError) else error
        log.error("reconcile has failed", route=policy.name, key=claim.key, exc_info=known)
        return Unknown()
    match answer:
        case Done(result=Response()):
            return answer.result
        case NotDone() | Unknown():
            return answer
    log.error("reconcile returned no answer; return Done(Response(…)), NotDone() or Unknown()", route=policy.name)
    return Unknown()
