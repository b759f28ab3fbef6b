"""Handlers whose messages all fail, and functions that fail in all sagas (D17), as known to one process.

The rule is in `rules.breaker`. A saga calls several functions, and the success of one is no evidence for the next, so
each has an account of its own. An account is found by the function's name and code, and not by the step's name: the
names of steps can be unlimited in number, and all lambdas of one handler share a name.
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
    """A handler or a function that may fail as a whole. `is_a` and `name` are its field in the log."""

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
    """`failed`: the keys that have failed and not ended yet, as far as this process knows. `tenants`: for each tenant
    how many messages have failed since one of it succeeded. `runs` in a row have failed since `began`, the last one
    with `error`; `handlers`: the names of the handlers that ran them."""

    health: HandlerHealth = _HEALTHY
    failed: dict[bytes, None] = field(default_factory=dict)
    tenants: dict[str, int] = field(default_factory=dict)
    runs: int = 0
    began: float = 0.0
    error: str = ""
    handlers: set[str] = field(default_factory=set)


class Failing:
    """One account per subject. Unless it is `watched`, no subject is ever probed: there would be no worker that waits.

    Failures are told apart by a key: of a message, or of a saga.
    """

    def __init__(self, *, watched: bool) -> None:
        self._watched = watched
        self._accounts: dict[Subject, _Account] = {}

    @property
    def any(self) -> bool:
        """Whether any message or saga has failed and not ended yet."""
        return bool(self._accounts)

    def of(self, subject: Subject) -> HandlerHealth:
        account = self._accounts.get(subject) if self._accounts else None
        return _HEALTHY if account is None else account.health

    def has_failed(self, subject: Subject, key: bytes) -> bool:
        account = self._accounts.get(subject) if self._accounts else None
        return account is not None and key in account.failed

    def failed_beside(self, subject: Subject, tenant: str | None) -> int:
        """How many messages of this tenant have failed since one of it succeeded; 0 without a tenant."""
        account = self._accounts.get(subject)
        return 0 if account is None or tenant is None else account.tenants.get(tenant, 0)

    def succeeded(self, subject: Subject, keys: Collection[bytes], tenants: Iterable[str | None] = ()) -> None:
        """A run of each of these succeeded."""
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
        """Report a failure; returns whether it costs no attempt. `first`: no earlier attempt of it was counted. A
        failure that the handler asked for (Retry) is no sign of an outage, and costs an attempt. `handler`: the
        handler's name, if that is not the subject."""
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
        """The subject of a handler that fails each time, and has done so for longest; None if there is none (O34)."""
        its = [(subject, of) for subject, of in self._accounts.items() if of.health.probing and handler in of.handlers]
        if not its:
            return None
        subject, of = min(its, key=lambda each: each[1].began)
        what = "all messages fail" if subject.is_a == "handler" else f"{subject.name} fails in all sagas"
        return Failures(what, of.runs, of.error, asyncio.get_running_loop().time() - of.began)

    def ended(self, subject: Subject, key: bytes) -> None:
        """The message or saga is over: it will not run again."""
        if (account := self._accounts.get(subject)) is not None:
            account.failed.pop(key, None)


def _in_short(error: BaseException) -> str:
    """The kind of error, and where it was raised. Without its text, which may quote the message."""
    kind, place = error.reason if isinstance(error, BadMessage) else type(error).__name__, where(error)
    return kind if place == "unknown" else f"{kind} at {place}"
