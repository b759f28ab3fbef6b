"""Leased mode of a request: its key is held while it runs, and its response is stored afterwards (H6)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Final

from idemconsumer.errors import SelfCancelled
from idemconsumer.handlers.arguments import NotDone, Unknown
from idemconsumer.http.current import KEY, slot_for
from idemconsumer.http.exchanged import UNCLAIMED, Answer, CutOff, Open, Response, RunApplication, replay
from idemconsumer.http.lost import ask
from idemconsumer.http.policy import Policy
from idemconsumer.http.problems import OUTCOME_UNKNOWN, patience, refusal
from idemconsumer.logs import log
from idemconsumer.message.message import StoredResult
from idemconsumer.ports.observer import Point
from idemconsumer.ports.requests import Held, RequestStore, Running
from idemconsumer.redaction import error_text, typed_text
from idemconsumer.rules.claim import Claim
from idemconsumer.rules.doubt import Meaning, meaning
from idemconsumer.rules.http import kept_by_default
from idemconsumer.rules.values import Record
from idemconsumer.user_code.call import mark
from idemconsumer.user_code.cancellation import ends_this_task, uninterrupted, until_done

_AGAIN: Final = 0.2  # seconds between two attempts to store a response
_PATIENCE: Final = 10.0  # seconds to store a response: the effect has happened, and a client waits


class Leased:
    """Runs requests in leased mode, without a time limit: a key is held for as long as its endpoint runs (H13)."""

    def __init__(self, store: RequestStore, at: Callable[[Point, str, Sequence[bytes]], None]) -> None:
        self.store = store
        self._at = at
        self._running: set[asyncio.Future[None]] = set()

    async def ended(self, within: float | None = None) -> bool:
        """Wait until no request holds a key or claims one, for `within` seconds at most. Returns whether that is so."""
        try:
            async with asyncio.timeout(within):
                while self._running:
                    await asyncio.wait(self._running)
        except TimeoutError:
            return False
        return True

    async def attempt(self, claim: Claim, policy: Policy, run: RunApplication) -> Answer | Record | Running:
        """Like `Joined.attempt`."""
        lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def lose() -> None:
            if not lost.done():
                lost.set_result(None)

        with self._counted():
            async with patience("the store does not answer"):
                found = await self.store.claim(claim, lose, again=policy.again)
            if not isinstance(found, Held):
                return found
            self._at(Point.CLAIMED, policy.name, (claim.key,))
            if (known := await self._reconciled(found, policy, lost)) is not None:
                return known
            # If the loop ends, the endpoint may go on in a thread: its request never counts as `ended`.
            with self._counted(asyncio.CancelledError):
                return await self._held(found, policy, run, lost)

    @contextmanager
    def _counted(self, *but: type[BaseException]) -> Iterator[None]:
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._running.add(over)
        goes_on = False
        try:
            yield
        except but:
            goes_on = True
            raise
        finally:
            if not goes_on:
                self._running.discard(over)
                over.set_result(None)

    async def _held(self, held: Held, policy: Policy, run: RunApplication, lost: asyncio.Future[None]) -> Answer:
        claim = held.claim
        try:
            # An unclaimed response is not stored, so only this client can get it: it waits without a time limit.
            response = await self._ran(policy.name, run, None if held.unclaimed else policy.timeout, lost)
            result = response.stored() if response is not None and _kept(response, policy) else None
        except asyncio.CancelledError:  # H13: an endpoint that has begun is not ended, and keeps its key
            raise
        except BaseException as error:
            await uninterrupted(self._release(held, ran=isinstance(error, CutOff)))
            mark(error)  # else the endpoint's own outage would count as our store's, and it would run again
            raise
        if response is None or lost.done():
            log.warning("a request lost its key while it ran", route=policy.name, key=claim.key)
            return refusal(OUTCOME_UNKNOWN)
        if held.unclaimed:  # by the store's outage policy the request ran without a claim, so nothing is held
            return Answer(response, live=True, marks=UNCLAIMED)
        if result is None and not response.whole:
            return Answer(response, live=True, open=self._open(held, policy, lost))
        if result is None:
            await uninterrupted(self._release(held))
            return Answer(response, live=True)
        self._at(Point.SEALING, policy.name, (claim.key,))
        failed = response.status >= 400
        if not await uninterrupted(self._stored(held, result, lost, failed=failed)):
            return refusal(OUTCOME_UNKNOWN)
        self._at(Point.COMMITTED, policy.name, (claim.key,))
        return Answer(response, live=True)

    def _open(self, held: Held, policy: Policy, lost: asyncio.Future[None]) -> Open:
        """The application still sends its response: the key is released after it."""
        counted = ExitStack()
        counted.enter_context(self._counted())

        async def end() -> None:
            with counted:
                if lost.done():
                    log.warning("a request lost its key while it ran", route=policy.name, key=held.claim.key)
                else:
                    await self._release(held)

        return Open(lost, end)

    async def _reconciled(self, held: Held, policy: Policy, lost: asyncio.Future[None]) -> Answer | None:
        """The answer to a request whose former owner was lost, if `reconcile` gives one (H35). None: run it."""
        if not held.again or policy.route.reconcile is None:
            return None
        try:
            known = await ask(held, policy)
            result = known.stored() if isinstance(known, Response) else None
        except BaseException:
            await uninterrupted(self._release(held))
            raise
        if isinstance(known, NotDone) and not lost.done():
            return None
        if isinstance(known, Response) and result is not None:
            if await uninterrupted(self._stored(held, result, lost, failed=known.status >= 400)):
                log.warning("a lost request was settled", by="reconcile", route=policy.name, key=held.claim.key)
                return Answer(replay(result), live=False)
        elif isinstance(known, Unknown):
            await uninterrupted(self._release(held))
        return refusal(OUTCOME_UNKNOWN)

    async def _ran(
        self, route: str, run: RunApplication, limit: float | None, lost: asyncio.Future[None]
    ) -> Response | None:
        """Returns None if the key was lost and the run cut off. Raises SelfCancelled if the run cancelled itself."""
        with slot_for(route, KEY.get()):
            task = asyncio.ensure_future(run(limit))
        try:
            await until_done(task, lost)
        finally:
            if not task.done():
                task.cancel()
                await uninterrupted(asyncio.wait({task}))
        if not task.cancelled():
            return task.result()
        if lost.done():
            return None
        raise SelfCancelled

    async def _stored(self, held: Held, result: StoredResult, lost: asyncio.Future[None], *, failed: bool) -> bool:
        """Store the response, and return whether that succeeded. The effect has happened, so this retries for some
        seconds, while the key is renewed. Raises CannotKeep: then the store has released the key (H52)."""
        loop = asyncio.get_running_loop()
        until = loop.time() + _PATIENCE
        said: object = "another owner has its key"
        while not lost.done():
            try:
                if await self.store.complete(held, result, failed=failed):
                    return True
                break
            except BaseException as error:
                if ends_this_task(error) or meaning(error) is Meaning.REFUSED:
                    raise
                said = typed_text(error)  # whatever it is, keep the key: the request would run again (H52)
                if loop.time() > until:
                    break
                await asyncio.sleep(_AGAIN)
        log.warning("the response of a request could not be stored", key=held.claim.key, error=said)
        return False

    async def _release(self, held: Held, *, ran: bool = False) -> None:
        try:
            await self.store.release(held, ran=ran)
        except BaseException as error:  # the lease of the key expires by itself
            if ends_this_task(error):
                raise
            log.warning("the key of a request could not be released", key=held.claim.key, error=typed_text(error))


def _kept(response: Response, policy: Policy) -> bool:
    """Whether to store the response. If the user's `store` fails, the status decides, so that nothing runs again."""
    try:
        return policy.keeps(response)
    except Exception as error:  # noqa: BLE001 - user code
        log.error("`store` of a route failed, deciding by the status", route=policy.name, error=error_text(error))
        return kept_by_default(response.status)
