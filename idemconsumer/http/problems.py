"""The responses of the front door itself: problem details (RFC 9457), whose types never change. Also what is logged,
once, about a store that cannot be used (H58)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec

from idemconsumer.errors import (
    CommitUnknown,
    ConfigurationError,
    Contention,
    IdemConsumerError,
    StoreChanged,
    StoreUnavailable,
)
from idemconsumer.http.exchanged import Answer, Response
from idemconsumer.logs import log
from idemconsumer.redaction import typed_text

TYPE: Final = "urn:idemconsumer:problem:"
DESCRIBED: Final = "https://datatracker.ietf.org/doc/draft-ietf-httpapi-idempotency-key-header/"
"""A link to the definition of the header, for clients that used it wrongly."""
MEDIA_TYPE: Final = "application/problem+json"
PATIENCE: Final = 5.0  # seconds for a connection, and for queries before anything runs: a client waits


@dataclass(frozen=True, slots=True)
class Problem:
    """One kind of problem. `again`: seconds after which the same request may be sent again, with the same key."""

    name: str
    status: int
    title: str
    detail: str
    again: int | None = None

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of the response body."""
        return {"type": TYPE + self.name, "title": self.title, "status": self.status, "detail": self.detail}

    @property
    def response(self) -> Response:
        body = msgspec.json.encode(self.fields)
        headers = [("content-type", MEDIA_TYPE), ("content-length", str(len(body))), ("cache-control", "no-store")]
        if self.name.startswith("key-"):
            headers.append(("link", f'<{DESCRIBED}>; rel="describedby"'))
        if self.again is not None:
            headers.append(("retry-after", str(self.again)))
        if self.status == 401:
            headers.append(("www-authenticate", "Bearer"))
        return Response(self.status, tuple(headers), body)


def refusal(problem: Problem) -> Answer:
    return Answer(problem.response, live=False, problem=problem.name)


@asynccontextmanager
async def patience(problem: str) -> AsyncIterator[None]:
    """A time limit around queries to a store while nothing has run: a client waits, and its connection with it. Raises
    idemconsumer's own errors. All others become StoreUnavailable (H52): whatever a driver raises, for the client it is
    an outage."""
    try:
        async with asyncio.timeout(PATIENCE):
            yield
    except TimeoutError:
        raise StoreUnavailable(problem) from None
    except IdemConsumerError:
        raise
    except Exception as error:
        raise StoreUnavailable(f"{typed_text(error)}; `idemconsumer check` says what to do") from error


class Refused(Exception):
    """A request is answered with a problem, and nothing of it begins."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.name)
        self.problem = problem


KEY_MISSING: Final = Problem(
    "key-missing",
    400,
    "Idempotency-Key is missing",
    "This operation needs the header Idempotency-Key: a value that is new for each operation, such as a UUID, and the "
    "same for each repetition.",
)
KEY_MALFORMED: Final = Problem(
    "key-malformed",
    400,
    "Idempotency-Key is malformed",
    "Send 1 to 255 visible ASCII characters, bare or as a quoted string.",
)
KEY_REPEATED: Final = Problem(
    "key-repeated", 400, "More than one Idempotency-Key", "Send the header once, with one value."
)
TENANT_MISSING: Final = Problem(
    "tenant-missing",
    401,
    "Unknown caller",
    "A key belongs to its caller, and this request does not identify its caller.",
)
BODY_TOO_LARGE: Final = Problem(
    "body-too-large", 413, "The body is too large", "The body is larger than this operation takes with a key."
)
KEY_REUSED: Final = Problem(
    "key-reused",
    422,
    "Idempotency-Key was used for another request",
    "The same key came before with another request. Send what came first, or use a new key.",
)
IN_PROGRESS: Final = Problem(
    "in-progress",
    409,
    "The request is in progress",
    "A request with this key has begun and not ended. Send it again later, with the same key.",
    again=1,
)
NOT_REPLAYABLE: Final = Problem(
    "not-replayable",
    410,
    "The response is gone",
    "The request was executed. Its response is not kept: it was a stream, or too large, or it was removed.",
)
UNAVAILABLE: Final = Problem(
    "unavailable",
    503,
    "Not available",
    "Nothing was done. Send the request again later, with the same key.",
    again=2,
)
TIMED_OUT: Final = Problem(
    "timed-out",
    503,
    "It took too long",
    "The operation was cut off, and no response of it is stored. Send the request again, with the same key.",
    again=2,
)
GOES_ON: Final = replace(
    TIMED_OUT,
    detail="The operation goes on, and its response will be stored. Send the request again later, with the same key, "
    "to get it.",
)
OUTCOME_UNKNOWN: Final = Problem(
    "outcome-unknown",
    503,
    "The outcome is not known",
    "It is not known whether the request was executed. Send it again with the same key to find out.",
    again=2,
)
OUTCOME_LOST: Final = replace(
    OUTCOME_UNKNOWN,
    detail="It is not known whether the request was executed. It had no key, so that cannot be found out.",
    again=None,
)
# For requests that are accepted and done later (H45).
NOT_FOUND: Final = Problem(
    "not-found", 404, "Not known", "Nothing was accepted under this key, or it is no longer kept."
)
UNREADABLE: Final = Problem(
    "unreadable", 400, "The body cannot be read", "The body is not what this operation takes. Nothing was accepted."
)
KEY_DIFFERS: Final = Problem(
    "key-differs",
    422,
    "The body belongs to another request",
    "The body names another key than Idempotency-Key does, or another caller than this one. Nothing was accepted.",
)
REJECTED: Final = Problem("rejected", 422, "It was rejected", "It was refused for good, and had no effect.")
PUT_ASIDE: Final = Problem(
    "put-aside", 500, "It could not be done", "It failed, and waits for a person to decide about it."
)
ALL: Final = (
    KEY_MISSING, KEY_MALFORMED, KEY_REPEATED, TENANT_MISSING, IN_PROGRESS, NOT_REPLAYABLE, BODY_TOO_LARGE, KEY_REUSED,
    UNAVAILABLE, TIMED_OUT, OUTCOME_UNKNOWN,
)  # fmt: skip


OF_A_STORE: Final = (CommitUnknown, StoreUnavailable, ConfigurationError, Contention)
"""The errors that `Outages` turns into a response."""


class Outages:
    """Errors of one use of a store. Before the store has ever worked, a configuration error is raised, since the author
    of the service must see it. Later the code is the same as when it worked, so the cause is a change that the operator
    must repair, and the error becomes a 503."""

    def __init__(self) -> None:
        self._worked = False
        self._said: type[IdemConsumerError] | None = None

    def answered(self, error: IdemConsumerError, unknown: Problem = OUTCOME_UNKNOWN) -> Problem:
        """The problem for an error of the store. `unknown`: the problem if something may have been done. Raises the
        error if it came from the application, where it says nothing about our store (B12), or if it is for the
        author."""
        wrong = isinstance(error, ConfigurationError | StoreChanged)
        if error.by_function or (wrong and not self._worked):
            raise error
        if not isinstance(error, Contention) and (self._said is None or (wrong and self._said is not type(error))):
            self._said = type(error)
            if wrong:
                log.error("the front door answers 503 until its store is repaired", error=str(error))
            else:
                log.warning("the front door answers 503 while its store is unreachable", error=str(error))
        return unknown if isinstance(error, CommitUnknown) else UNAVAILABLE

    def heard(self, *, wrote: bool) -> None:
        """The store has answered; with `wrote` it has also written. A store that is full or lacks a right can still be
        read, so only a write ends an outage."""
        self._worked = True
        if wrote and self._said is not None:
            self._said = None
            log.info("the store of the front door works again")
