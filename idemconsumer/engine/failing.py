"""Handlers whose messages all fail, and functions that fail in all sagas (D17): the ledger of one process.

The rule is in `rules.failing`. A saga calls several functions, and one that works says nothing of the next one: each
is on the ledger by its name and its code, since the names of steps may have no end, and lambdas of one handler share a
name.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, Final, TypeAlias

from idemconsumer.engine.blame import said, where
from idemconsumer.engine.evidence import put
from idemconsumer.errors import BadMessage, Retry
from idemconsumer.handlers.handler import BoundHandler
from idemconsumer.logs import log
from idemconsumer.rules.breaker import HandlerHealth
from idemconsumer.rules.held_up import Failures

Function: TypeAlias = Callable[..., Any]

_HEALTHY: Final = HandlerHealth()


@dataclass(frozen=True, slots=True)
class Subject:
    """What may fail as a whole. `is_a` and `name` are its field in the log."""

    is_a: str
    name: str
    code: object = None
    fails: str = field(default="all messages of a handler fail, trying one at a time", compare=False)
    works: str = field(default="handler works again", compare=False)

    @classmethod
    def handler(cls, handler: BoundHandler) -> Subject:
        return _of_handler(handler.name)

    @classmethod
    def function(cls, fn: Function) -> Subject:
        while isinstance(fn, partial):
            fn = fn.func
        named = fn if hasattr(fn, "__qualname__") else type(fn)
        return cls(
            "function",
            f"{named.__module__}.{named.__qualname__}",
            getattr(fn, "__code__", None),
            "a function fails in all sagas, trying one at a time",
            "saga function works again",
        )


@lru_cache(maxsize=1_024)
def _of_handler(name: str) -> Subject:
    return Subject("handler", name)


@dataclass(slots=True)
class _Account:
    """`failed`: what has failed and not ended yet, as far as this process has seen it. `tenants`: of how many messages
    of each that was so, since one of it succeeded. `runs` in a row have failed since `began`, the last one with
    `error`; `handlers`: whose they were."""

    health: HandlerHealth = _HEALTHY
    failed: dict[bytes, None] = field(default_factory=dict)
    tenants: dict[str, int] = field(default_factory=dict)
    runs: int = 0
    began: float = 0.0
    error: str = ""
    handlers: set[str] = field(default_factory=set)


class Failing:
    """One account per subject. Unless it is `watched`, none is ever probed: nobody would wait.

    What fails is told apart by a key: of a message, or of a saga.
    """

    def __init__(self, *, watched: bool) -> None:
        self._watched = watched
        self._accounts: dict[Subject, _Account] = {}

    @property
    def any(self) -> bool:
        """Whether something has failed that has not ended."""
        return bool(self._accounts)

    def of(self, subject: Subject) -> HandlerHealth:
        account = self._accounts.get(subject) if self._accounts else None
        return _HEALTHY if account is None else account.health

    def has_failed(self, subject: Subject, key: bytes) -> bool:
        account = self._accounts.get(subject) if self._accounts else None
        return account is not None and key in account.failed

    def failed_beside(self, subject: Subject, tenant: str | None) -> int:
        """How many of this tenant have failed since one of it succeeded; 0 of what has no tenant."""
        account = self._accounts.get(subject)
        return 0 if account is None or tenant is None else account.tenants.get(tenant, 0)

    def succeeded(self, subject: Subject, keys: Collection[bytes], tenants: Iterable[str | None] = ()) -> None:
        """A run of these."""
        if not self._accounts or (account := self._accounts.get(subject)) is None:
            return
        for key in keys:
            account.failed.pop(key, None)
        for tenant in tenants:
            if tenant is not None:
                account.tenants.pop(tenant, None)
        before, account.health, account.runs = account.health, account.health.succeeded(len(keys)), 0
        if not account.failed:
            del self._accounts[subject]
        if before.since is not None:
            seconds = asyncio.get_running_loop().time() - before.since
            log.info(subject.works, **{subject.is_a: subject.name}, seconds=round(seconds, 1))

    def failed(
        self,
        subject: Subject,
        key: bytes,
        error: BaseException,
        *,
        first: bool,
        tenant: str | None = None,
        handler: str | None = None,
    ) -> bool:
        """Whether this failure costs no attempt. `first`: as far as its attempts tell. One that was asked for (Retry)
        is no sign, and costs one. `handler`: whose it is, if that is not the subject."""
        if not self._watched or isinstance(error, Retry):
            return False
        account, now = self._accounts.setdefault(subject, _Account()), asyncio.get_running_loop().time()
        before = account.health
        health = account.health = before.failed(now, first=first and key not in account.failed)
        if key not in account.failed:
            put(account.failed, key, None)
            if tenant is not None:
                put(account.tenants, tenant, account.tenants.get(tenant, 0) + 1)
        account.began = account.began if account.runs else now
        account.runs += 1
        account.error = _in_short(error)
        account.handlers.add(handler or subject.name)
        if health.probing and not before.probing:
            log.error(subject.fails, **{subject.is_a: subject.name}, failed=health.failures, **said(error))
        return health.is_free(now)

    def all_fail(self, handler: str) -> Failures | None:
        """What of a handler fails each time, and has for longest; None: nothing (O34)."""
        its = [(subject, of) for subject, of in self._accounts.items() if of.health.probing and handler in of.handlers]
        if not its:
            return None
        subject, of = min(its, key=lambda each: each[1].began)
        what = "all messages fail" if subject.is_a == "handler" else f"{subject.name} fails in all sagas"
        return Failures(what, of.runs, of.error, asyncio.get_running_loop().time() - of.began)

    def ended(self, subject: Subject, key: bytes) -> None:
        """Nothing of it runs again."""
        if (account := self._accounts.get(subject)) is not None:
            account.failed.pop(key, None)


def _in_short(error: BaseException) -> str:
    """What it is, and where. What it says may quote the message."""
    kind, place = error.reason if isinstance(error, BadMessage) else type(error).__name__, where(error)
    return kind if place == "unknown" else f"{kind} at {place}"
