"""What the front door decides about a request and its response, as pure functions (H5, H11, H12)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import Enum
from typing import Final

MAX_KEY: Final = 255  # characters
MOST_DIGITS: Final = 18  # of a content length; one with more digits exceeds any limit

_STRING: Final = r'"((?:[ !#-\[\]-~]|\\["\\])*)"'
_BARE: Final = r"[!#-+\--:<-\[\]-~]+"  # the visible characters except `"`, `,`, `;` and `\`
_QUOTED: Final = re.compile(rf"{_STRING}(.*)", re.ASCII | re.DOTALL)
_PARAMETERS: Final = re.compile(rf"(?:; *[a-z*][a-z0-9_.*-]*(?:=(?:{_STRING}|{_BARE}))?)*", re.ASCII)
_TOKEN: Final = re.compile(_BARE, re.ASCII)

# The same request may succeed later: the client has logged in, or there is less traffic.
_PASSING: Final = frozenset({401, 405, 407, 408, 425, 429})
# A router's answer for a path that it does not have, or has with another slash or under a language.
_OF_ROUTERS: Final = frozenset({301, 302, 307, 308, 404})

# They belong to this one answer, connection or caller: a replay has its own, or must not get them (H5).
_NEVER: Final = frozenset({
    "set-cookie", "set-cookie2", "clear-site-data",
    "authorization", "www-authenticate", "authentication-info",
    "proxy-authenticate", "proxy-authorization", "proxy-authentication-info",
    "connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade",
    "content-length", "content-type", "date", "server", "idempotent-replayed", "idempotent-unclaimed",
    "age", "via", "server-timing", "traceparent", "tracestate", "traceresponse", "x-request-id", "x-correlation-id",
})  # fmt: skip
_NEVER_PREFIXES: Final = ("access-control-", "ratelimit", "x-ratelimit")
_SECRET: Final = re.compile(r"(?:^|-)(?:token|csrf|xsrf|csrftoken|secret|password|session|cookie|api-?key)(?:-|$)")
_STREAMS: Final = ("text/event-stream", "multipart/x-mixed-replace")

Headers = Sequence[tuple[str, str]]


class BadKey(Enum):
    """What is wrong with the `Idempotency-Key` header of a request."""

    MALFORMED = "malformed"
    REPEATED = "repeated"


def parse_key(values: Sequence[str]) -> str | BadKey | None:
    """The key that the values of `Idempotency-Key` give, None if there are no values.

    A quoted string and a bare token of the same characters are the same key. Parameters of a quoted string (RFC 8941)
    mean nothing here.
    """
    if not values:
        return None
    if len(values) > 1:
        return BadKey.REPEATED
    value = values[0].strip(" \t")
    rest, key = "", value
    if quoted := _QUOTED.fullmatch(value):
        key, rest = re.sub(r"\\(.)", r"\1", quoted[1]), _PARAMETERS.sub("", quoted[2], count=1).strip(" \t")
    elif not _TOKEN.fullmatch(value):
        # A proxy joins two lines with a comma.
        parts = [part.strip(" \t") for part in value.split(",")]
        twice = len(parts) > 1 and all(_TOKEN.fullmatch(part) for part in parts)
        return BadKey.REPEATED if twice else BadKey.MALFORMED
    if rest:
        return BadKey.REPEATED if rest.startswith(",") else BadKey.MALFORMED
    return key if 0 < len(key) <= MAX_KEY else BadKey.MALFORMED


def host_name(host: str) -> str:
    """The host of a Host header without its port: one service may listen on several."""
    return re.sub(r":[0-9]*$", "", host.strip(" \t")).rstrip(".").lower()


def kept_by_default(status: int) -> bool:
    """Whether a response with this status is stored as the answer to its key."""
    return 200 <= status < 500 and status not in _PASSING


def of_router(status: int) -> bool:
    """Whether a router answers with this status by itself when no endpoint matches."""
    return status in _OF_ROUTERS


def kept_headers(headers: Headers) -> tuple[tuple[str, str], ...]:
    """The headers that a replay has too, in their order; names in lower case."""
    listed = (value for name, value in headers if name.lower() == "connection")
    hops = {option.strip(" \t").lower() for value in listed for option in value.split(",")}
    lower = [(name.lower(), value) for name, value in headers]
    return tuple((name, value) for name, value in lower if name not in hops and keepable(name))


def keepable(name: str) -> bool:
    """Whether a replay may have this header. `name` is in lower case."""
    return name not in _NEVER and not name.startswith(_NEVER_PREFIXES) and not _SECRET.search(name)


def content_type(headers: Headers) -> str:
    """The media type of a response. Empty if the response names none."""
    return next((value for name, value in headers if name.lower() == "content-type"), "")


def streams(media_type: str) -> bool:
    """Whether a response of this type may never end, so that its end cannot be waited for."""
    return media_type.lower().startswith(_STREAMS)


def bodiless(status: int) -> bool:
    """Whether a response with this status has neither a body nor a content length."""
    return status < 200 or status in (204, 304)
