"""What the lanes of a worker ask of an engine about failures (D17)."""

from __future__ import annotations

from idemconsumer.engine.failing import Failing, Subject
from idemconsumer.engine.work import Work
from idemconsumer.handlers.handler import BoundHandler
from idemconsumer.rules.breaker import HandlerHealth


class NoFailures:
    """An engine in which nothing fails, with groups of one."""

    def health(self, handler: object) -> HandlerHealth:
        return HandlerHealth()

    def group_size(self, handler: object) -> int:
        return 1

    def has_failed(self, work: Work) -> bool:
        return False

    def failed_beside(self, work: Work) -> int:
        return 0


class Failures(NoFailures):
    """The failures of one handler, judged as the engine does."""

    def __init__(self, handler: BoundHandler) -> None:
        self._failing, self._subject = Failing(watched=True), Subject.handler(handler)

    def health(self, handler: object) -> HandlerHealth:
        return self._failing.of(self._subject)

    def has_failed(self, work: Work) -> bool:
        return work.attempts > 0 or self._failing.has_failed(self._subject, work.identity)

    def failed_beside(self, work: Work) -> int:
        return self._failing.failed_beside(self._subject, work.tenant)
