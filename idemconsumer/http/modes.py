"""What both modes give the door: one attempt to have a key, and what it met."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, Protocol

from idemconsumer.errors import IdemConsumerError, StoreUnavailable
from idemconsumer.http.exchanged import Headers, Response
from idemconsumer.http.policy import Policy
from idemconsumer.http.problems import Problem
from idemconsumer.message.message import StoredResult
from idemconsumer.ports.requests import Running
from idemconsumer.ports.store import Claim
from idemconsumer.redaction import typed_text
from idemconsumer.rules.http import of_router
from idemconsumer.rules.values import Record

PATIENCE: Final = 5.0  # seconds for a connection, and for what is asked before anything runs: a client waits

UNCLAIMED: Final = (("idempotent-unclaimed", "true"),)
"""Of a response whose key nobody held (H27): the client knows that the request may run again."""


class CutOff(RuntimeError):
    """The application was ended in the middle, as its process is about to be: nobody knows how far it came."""


class RunApplication(Protocol):
    """Runs the application."""

    def __call__(self, limit: float | None = None) -> Awaitable[Response]:
        """The response of a new run, which is not sent before `Answer.live` says so. It has begun when this returns.

        After `limit` seconds the client may be told that it goes on; that ends nothing. Cancelled, it ends the
        application, as far as that can be ended. Raises what the application raises, and CutOff."""
        ...


@dataclass(frozen=True, slots=True)
class Open:
    """A response that is not kept, and of which more is to come: its key is held until `end`, which is to be called
    once the application has ended. If `lost` is done, the key is, and the application is to be cut off."""

    lost: asyncio.Future[None]
    end: Callable[[], Coroutine[Any, Any, None]]


@dataclass(frozen=True, slots=True)
class Answer:
    """What the client gets. `live`: what the application gave in the last run, to be sent as the application has it,
    and `marks` with its headers; else `response` is to be sent, and the application is to be ended if it waits.
    `problem`: the name of the one that it is."""

    response: Response
    live: bool
    marks: Headers = ()
    open: Open | None = None
    problem: str | None = None

    @property
    def outcome(self) -> str:
        """How the request was answered, in a word for who counts."""
        return self.problem or ("run" if self.live else "replayed")


def refusal(problem: Problem) -> Answer:
    return Answer(problem.response, live=False, problem=problem.name)


class Mode(Protocol):
    """Joined or leased."""

    async def attempt(self, claim: Claim, policy: Policy, run: RunApplication) -> Answer | Record | Running:
        """Claim the key and, if it is ours, run and store. Or what stands on record, or who runs it now.

        Raises what the application raises; StoreUnavailable and Contention if nothing was done; CommitUnknown if it is
        not known whether the effect and the response were stored.
        """
        ...


@asynccontextmanager
async def patience(problem: str) -> AsyncIterator[None]:
    """Around what a store is asked while nothing has run: a client waits, and so does its connection. Raises our own
    errors, and for all others StoreUnavailable (H52): for a client it is an outage, whatever a driver calls it."""
    try:
        async with asyncio.timeout(PATIENCE):
            yield
    except TimeoutError:
        raise StoreUnavailable(problem) from None
    except IdemConsumerError:
        raise
    except Exception as error:
        raise StoreUnavailable(f"{typed_text(error)}; `idemconsumer check` says what to do") from error


def kept(response: Response, policy: Policy) -> bool:
    """Whether it is the answer to its key. What the router has answered by itself is of no endpoint (H12). Raises what
    the route's `store` raises."""
    return (response.routed or not of_router(response.status)) and policy.kept(response)


def kept_result(response: Response) -> StoredResult:
    """What is stored of it: of what is not whole, nothing that could be replayed (H7)."""
    return response.stored() if response.whole else StoredResult(b"")
