"""What a RabbitMQ queue's own limits would do to messages, read from the management API (Q9)."""

from __future__ import annotations

import base64
import json
import math
import ssl
import urllib.request
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from idemconsumer.ports.broker import Finding

# RabbitMQ 4 deletes or dead-letters a message after this many deliveries, unless configured otherwise.
DEFAULT_LIMIT_SINCE_4 = 20
# Deliveries after which the worker stores the message in the database, where no limit applies.
TAKE_OVER_AFTER = 15


def read_queue(base: str, vhost: str, queue: str, tls: ssl.SSLContext | None) -> tuple[dict[str, Any], str]:
    """The queue as the management API describes it, and the broker's version.

    Blocks. Raises OSError or ValueError.
    """
    path = f"/api/queues/{quote(vhost, safe='')}/{quote(queue, safe='')}"
    return _get(base, path, tls), str(_get(base, "/api/overview", tls).get("rabbitmq_version", "0"))


def limits(subject: str, queue: Mapping[str, Any], version: str) -> list[Finding]:
    """Findings on one queue. Its own arguments take precedence over a policy; of two delivery limits the lower one
    applies."""
    arguments, policy = _given(queue)
    name, kind = queue.get("name", subject), queue.get("type", "classic")
    if kind == "stream":
        return [Finding("error", subject, f"{name!r} is a stream, which has no acks per message; use a quorum queue")]
    exchange = arguments.get("x-dead-letter-exchange", policy.get("dead-letter-exchange"))
    dead_letters = "the default exchange" if exchange == "" else None if exchange is None else repr(exchange)
    found = []
    if kind == "quorum":
        both = (arguments.get("x-delivery-limit"), policy.get("delivery-limit"))
        given = [int(limit) for limit in both if limit is not None]
        limit = min(given) if given else (DEFAULT_LIMIT_SINCE_4 if _major(version) >= 4 else -1)
        found.append(_delivery_limit(subject, name, limit, dead_letters, is_default=not given))
    if "x-message-ttl" in arguments or "message-ttl" in policy:
        found.append(_dropped(subject, name, "message TTL", dead_letters))
    bounds = {"x-max-length", "x-max-length-bytes", "max-length", "max-length-bytes"}
    if (
        bounds & {*arguments, *policy}
        and (arguments.get("x-overflow") or policy.get("overflow") or "drop-head") == "drop-head"
    ):
        found.append(_dropped(subject, name, "length limit with overflow drop-head", dead_letters))
    if not queue.get("durable", True):
        found.append(Finding("warning", subject, f"queue {name!r} is not durable: a restart loses it"))
    return found or [Finding("ok", subject, f"{kind} queue {name!r} has no limit that loses messages")]


def time_to_live(queue: Mapping[str, Any]) -> float:
    """Seconds after which the queue drops a message; `inf` without a limit. Of two limits the lower one applies."""
    arguments, policy = _given(queue)
    both = (arguments.get("x-message-ttl"), policy.get("message-ttl"))
    return min((int(limit) / 1000 for limit in both if limit is not None), default=math.inf)


def _given(queue: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The queue's own arguments, and those that a policy adds."""
    policy = queue.get("effective_policy_definition") or {}
    # RabbitMQ sends an empty policy as a list.
    return queue.get("arguments") or {}, policy if isinstance(policy, Mapping) else {}


def _delivery_limit(subject: str, name: object, limit: int, dead_letters: str | None, *, is_default: bool) -> Finding:
    if limit < 0:
        return Finding("ok", subject, f"quorum queue {name!r} has no delivery limit")
    default = " (the default of RabbitMQ 4)" if is_default else ""
    said = f"quorum queue {name!r} has the delivery limit {limit}{default}"
    if not dead_letters:
        return Finding(
            "error",
            subject,
            f"{said} and no dead-letter exchange: beyond the limit the broker deletes a message, and each worker that "
            "ends returns all messages that it prefetched, which counts as a delivery; give it an exchange, for "
            "example: rabbitmqctl "
            f"set_policy keep-{name} '^{name}$' "
            """'{"dead-letter-exchange":"dlx"}' --apply-to queues, and bind a queue to that exchange""",
        )
    if limit < TAKE_OVER_AFTER:
        return Finding(
            "warning",
            subject,
            f"{said}, below {TAKE_OVER_AFTER}: messages that were only prefetched by restarting workers go to "
            f"{dead_letters} before the worker can take them over; set it to 20 or more",
        )
    return Finding("ok", subject, f"{said}; messages beyond it go to {dead_letters}")


def _dropped(subject: str, name: object, what: str, dead_letters: str | None) -> Finding:
    said = f"queue {name!r} has a {what}"
    if dead_letters:
        return Finding("ok", subject, f"{said}; messages that it removes go to {dead_letters}")
    return Finding("warning", subject, f"{said} and no dead-letter exchange: it deletes unprocessed messages")


def _major(version: str) -> int:
    head = version.partition(".")[0]
    return int(head) if head.isdigit() else 0


def _get(base: str, path: str, tls: ssl.SSLContext | None) -> dict[str, Any]:
    parts = urlsplit(base)
    host = parts.netloc.rpartition("@")[2]
    request = urllib.request.Request(urlunsplit((parts.scheme, host, parts.path.rstrip("/") + path, "", "")))
    user, password = unquote(parts.username or "guest"), unquote(parts.password or "guest")
    request.add_header("Authorization", "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode())
    with urllib.request.urlopen(request, timeout=5, context=tls) as response:
        answer = json.load(response)
    if not isinstance(answer, dict):
        raise ValueError(f"{path} did not answer with an object")
    return answer
