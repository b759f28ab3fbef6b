"""Observation of requests: counts, if the front door has a registry for them, and spans (H55)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Iterable
from typing import TYPE_CHECKING, Final

from idemconsumer.app.app import App
from idemconsumer.app.following import tracing_of
from idemconsumer.http import problems
from idemconsumer.http.current import KEY
from idemconsumer.http.exchanged import Answer, Response
from idemconsumer.http.policy import Policy
from idemconsumer.http.problems import Problem
from idemconsumer.logs import log
from idemconsumer.missing import cannot_import
from idemconsumer.redaction import typed_text

if TYPE_CHECKING:  # prometheus_client is optional
    from prometheus_client import CollectorRegistry

_FAILED: Final = "failed"
_CANCELLED: Final = "cancelled"
OUTCOMES: Final = ("run", "replayed", *(each.name for each in problems.ALL), _FAILED, _CANCELLED)


class DoorWatch:
    """Observes one front door. It decides nothing, and an error in it fails no request."""

    def __init__(self, app: App, registry: CollectorRegistry | None) -> None:
        self._app = app
        self._numbers = None
        self._failing = False
        if registry is not None:
            try:
                from idemconsumer.observe.request_metrics import numbers_in
            except ImportError as error:
                raise cannot_import("Idempotency(metrics=…)", error) from error

            self._numbers = numbers_in(registry)

    def expect(self, policies: Iterable[Policy]) -> None:
        """Create the counters of these policies at zero."""
        if self._numbers is not None:
            for policy in policies:
                self._numbers.expect(self._app.name, policy.name, OUTCOMES)

    def refused(self, policy: Policy, problem: Problem) -> Response:
        """Count and return the response to a request that is refused before its key is claimed."""
        self._count(policy, problem.name, None)
        return problem.response

    async def follow(self, policy: Policy, answering: Awaitable[Answer], *, keyed: bool) -> Answer:
        """Await the answer, and record its outcome, duration and span."""
        began, outcome = time.monotonic(), _FAILED
        with tracing_of(self._app.settings).request(self._app.name, policy.name) as span:
            try:
                answer = await answering
                outcome = answer.outcome
                return answer
            except asyncio.CancelledError:
                outcome = _CANCELLED
                raise
            finally:
                span.answered(outcome, KEY.get() if keyed else "")
                self._count(policy, outcome, time.monotonic() - began)

    def _count(self, policy: Policy, outcome: str, seconds: float | None) -> None:
        if self._numbers is None:
            return
        try:
            self._numbers.count(self._app.name, policy.name, outcome, seconds)
        except Exception as error:  # noqa: BLE001 - such as a full disk, with the file that processes count in
            if not self._failing:
                log.error("requests are not counted", error=typed_text(error))
            self._failing = True
