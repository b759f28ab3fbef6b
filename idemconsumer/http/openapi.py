"""Additions of the front door to an OpenAPI document: its headers, its own responses, and the policy (H10)."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any, Final

from idemconsumer.http import problems
from idemconsumer.http.frameworks import AsgiRoutes
from idemconsumer.http.idempotency import Idempotency
from idemconsumer.http.policy import Policy
from idemconsumer.rules.http import MAX_KEY

_HEADER: Final = "Idempotency-Key"
_REPLAYED: Final = {"description": "`true` on a repetition's response.", "schema": {"type": "string", "enum": ["true"]}}
_OBJECT: Final = {
    "type": "object",
    "required": ["type", "title", "status", "detail"],
    "properties": {
        "type": {"type": "string", "format": "uri"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string"},
    },
}


def describe(schema: MutableMapping[str, Any], idempotency: Idempotency, app: object = None) -> None:
    """Add the front door's headers and responses to the covered operations of an OpenAPI document; other operations
    stay as they are.

    `app` is the Starlette, FastAPI or Litestar app whose endpoints may be marked. A second call adds nothing.
    """
    table = idempotency.table(AsgiRoutes(app))
    for path, operations in schema.get("paths", {}).items():
        for method, operation in operations.items():
            policy = table.find_described(method.upper(), path)
            if isinstance(operation, MutableMapping) and policy is not None:
                _describe(operation, policy)


def _describe(operation: MutableMapping[str, Any], policy: Policy) -> None:
    parameters = operation.setdefault("parameters", [])
    parameters[:] = [each for each in parameters if each.get("name", "").lower() != _HEADER.lower()]
    parameters.append(
        {
            "name": _HEADER,
            "in": "header",
            "required": policy.route.required,
            "description": "New for each operation and the same for each repetition, such as a UUID. Bare or quoted.",
            "schema": {"type": "string", "minLength": 1, "maxLength": MAX_KEY},
        }
    )
    responses = operation.setdefault("responses", {})
    for status, response in responses.items():
        if str(status)[0] in "23":
            response.setdefault("headers", {})["Idempotent-Replayed"] = _REPLAYED
    for status in sorted({problem.status for problem in problems.ALL}):
        its = [problem for problem in problems.ALL if problem.status == status]
        response = responses.setdefault(str(status), {"description": its[0].title})
        types = [problems.TYPE + problem.name for problem in its]
        response.setdefault("content", {})[problems.MEDIA_TYPE] = {"schema": _OBJECT | {"x-types": types}}
        if any(problem.again is not None for problem in its):
            response.setdefault("headers", {})["Retry-After"] = {"schema": {"type": "integer"}}
    operation["x-idempotency"] = {
        "mode": "joined" if policy.tx else "leased",
        "required": policy.route.required,
        "fingerprint": _compared(policy),
        "expires": policy.expires,
        "wait": policy.wait,
        "maxBody": policy.route.max_body,
        "maxResponse": policy.route.max_response,
    }


def _compared(policy: Policy) -> object:
    given = policy.route.fingerprint
    return given if given is None or isinstance(given, str) else list(given)
