"""From an admitted request to its answer: claim, judge, run, replay, wait. Of no protocol of servers (H10)."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Final

from idemconsumer.errors import CommitUnknown, ConfigurationError, Contention, StoreUnavailable
from idemconsumer.http import problems
from idemconsumer.http.exchanged import replay
from idemconsumer.http.modes import Answer, Mode, RunApplication, refusal
from idemconsumer.http.opened_stores import OpenedStores
from idemconsumer.http.policy import Policy
from idemconsumer.http.problems import Outages
from idemconsumer.logs import log
from idemconsumer.ports.requests import Running
from idemconsumer.ports.store import Claim
from idemconsumer.rules.backoff import backoff
from idemconsumer.rules.values import Record
from idemconsumer.rules.verdicts import Verdict, judge

_FIRST_PAUSE: Final = 0.05  # seconds; doubled up to
_LONGEST_PAUSE: Final = 0.5
_DOUBT: Final = 5.0  # seconds in which a COMMIT without an answer should end
_DOUBTS: Final = 3


class Door:
    def __init__(self, opened: OpenedStores) -> None:
        self._opened = opened
        self._joined, self._leased = Outages(), Outages()  # of which one may be out of order alone

    async def answer(self, claimed: Callable[[], Claim], policy: Policy, run: RunApplication) -> Answer:
        """The answer to one request. Its store is opened, and then `claimed` hashes its key (R39). Raises what the
        application raises."""
        loop, claim, outages = asyncio.get_running_loop(), None, self._joined if policy.tx else self._leased
        until, looks, doubts = loop.time() + policy.wait, 0, 0
        while True:
            try:
                mode: Mode = await (self._opened.joined() if policy.tx else self._opened.leased())
                claim = claim or claimed()
                met = await mode.attempt(claim, policy, run)
            except CommitUnknown as error:
                if error.by_function:  # it came from the application, and says nothing about our store (B12)
                    raise
                doubts += 1
                until = max(until, loop.time() + _DOUBT)
                if doubts == _DOUBTS:
                    return refusal(outages.answered(error, problems.OUTCOME_UNKNOWN))
                continue
            except (StoreUnavailable, ConfigurationError, Contention) as error:
                problem = problems.OUTCOME_UNKNOWN if doubts else problems.UNAVAILABLE
                return refusal(outages.answered(error, problem))
            outages.heard(wrote=isinstance(met, Answer))
            if isinstance(met, Answer):
                return met
            if (answer := _standing(met, claim, policy)) is not None:
                return answer
            if (left := until - loop.time()) <= 0:
                return refusal(problems.OUTCOME_UNKNOWN if doubts else problems.IN_PROGRESS)
            looks += 1
            pause = backoff(looks, first=_FIRST_PAUSE, cap=_LONGEST_PAUSE)
            await asyncio.sleep(min(left, pause * random.uniform(0.5, 1.0)))

    async def answer_without_key(self, policy: Policy, run: RunApplication) -> Answer:
        """That to a request of which nothing is stored, so a COMMIT without an answer cannot be asked for (H16)."""
        try:
            answer = await (await self._opened.joined()).unclaimed(policy, run)
        except CommitUnknown as error:
            return refusal(self._joined.answered(error, problems.OUTCOME_LOST))
        except (StoreUnavailable, ConfigurationError, Contention) as error:
            return refusal(self._joined.answered(error, problems.UNAVAILABLE))
        self._joined.heard(wrote=False)
        return answer


def _standing(met: Record | Running, claim: Claim, policy: Policy) -> Answer | None:
    """The answer that is on record. None: it is in progress."""
    record = met.record if isinstance(met, Running) else met
    if record is None:
        return None
    verdict = judge(record, claim.fingerprint)
    if verdict is Verdict.CONFLICT:  # R12, also while the other request is in progress
        log.warning("a key was used for another request", route=policy.name, key=claim.key)
        return refusal(problems.KEY_REUSED)
    if isinstance(met, Running) and met.lost:  # H35: nobody runs it, so waiting would tell nothing
        return refusal(problems.OUTCOME_UNKNOWN)
    if isinstance(met, Running) or verdict is Verdict.BUSY:
        return None
    stored = record.result
    if verdict is Verdict.DEAD or stored is None or stored.status is None:
        return refusal(problems.NOT_REPLAYABLE)
    return Answer(replay(stored), live=False)
