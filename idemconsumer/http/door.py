"""From an admitted request to its answer: claim, judge, run, replay, wait. Independent of ASGI and WSGI (H10)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

from idemconsumer.http import problems
from idemconsumer.http.exchanged import Answer, Response, RunApplication, replay
from idemconsumer.http.joined_request import Joined
from idemconsumer.http.leased_request import Leased
from idemconsumer.http.opened_stores import OpenedStores
from idemconsumer.http.policy import Policy
from idemconsumer.http.problems import OF_A_STORE, Outages, refusal
from idemconsumer.logs import log
from idemconsumer.ports.requests import Running
from idemconsumer.rules.claim import Claim
from idemconsumer.rules.values import Record
from idemconsumer.rules.verdicts import Verdict, judge
from idemconsumer.stores.decided import decided

_DOUBT: Final = 5.0  # seconds within which a COMMIT whose answer was lost should be decided


class Door:
    def __init__(self, opened: OpenedStores) -> None:
        self._opened = opened
        self._joined, self._leased = Outages(), Outages()  # separate, since one mode's store may fail alone

    async def answer(self, claimed: Callable[[], Claim], policy: Policy, run: RunApplication) -> Answer:
        """The answer to one request. The store is opened first; then `claimed` hashes the key (R39: not before). Raises
        what the application raises."""
        claim: Claim | None = None
        outages = self._joined if policy.tx else self._leased

        async def attempt() -> Answer | None:
            nonlocal claim
            mode: Joined | Leased = await (self._opened.joined() if policy.tx else self._opened.leased())
            claim = claim or claimed()
            met = await mode.attempt(claim, policy, _heard(outages, run))
            outages.heard(wrote=isinstance(met, Answer))
            return met if isinstance(met, Answer) else _standing(met, claim, policy)

        try:
            answer = await decided(
                attempt, wait=policy.wait, busy=lambda met: met is None, within=_DOUBT, asking=OF_A_STORE
            )
        except OF_A_STORE as error:
            return refusal(outages.answered(error))
        return answer or refusal(problems.IN_PROGRESS)

    async def answer_without_key(self, policy: Policy, run: RunApplication) -> Answer:
        """The answer to a request without a key. Nothing of it is stored, so the outcome of a COMMIT whose answer was
        lost cannot be queried (H16)."""
        try:
            answer = await (await self._opened.joined()).unclaimed(policy, _heard(self._joined, run))
        except OF_A_STORE as error:
            return refusal(self._joined.answered(error, problems.OUTCOME_LOST))
        self._joined.heard(wrote=False)
        return answer


def _heard(outages: Outages, run: RunApplication) -> RunApplication:
    """Runs the application and notes that the store has answered: the request has been claimed, so the store is known
    to have worked for as long as the run takes (H58)."""

    def heard(limit: float | None = None) -> Awaitable[Response]:
        outages.heard(wrote=False)
        return run(limit)

    return heard


def _standing(met: Record | Running, claim: Claim, policy: Policy) -> Answer | None:
    """The answer from the record; None if the request is in progress."""
    record = met.record if isinstance(met, Running) else met
    if record is None:
        return None
    verdict = judge(record, claim.fingerprint)
    if verdict is Verdict.CONFLICT:  # R12: a conflict even while the first request is in progress
        log.warning("a key was used for another request", route=policy.name, key=claim.key)
        return refusal(problems.KEY_REUSED)
    if isinstance(met, Running) and met.lost:  # H35: its owner was lost, so waiting is in vain
        return refusal(problems.OUTCOME_UNKNOWN)
    if isinstance(met, Running) or verdict is Verdict.BUSY:
        return None
    stored = record.result
    if verdict is Verdict.DEAD or stored is None or stored.status is None:
        return refusal(problems.NOT_REPLAYABLE)
    return Answer(replay(stored), live=False)
