"""The sagas of a kit, for queries by a test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from idemconsumer.admin.saga_admin import SagaAdmin
from idemconsumer.admin.saga_views import SagaStatus, status
from idemconsumer.app.app import App
from idemconsumer.handlers.decorator import Handler
from idemconsumer.handlers.handler import given_key
from idemconsumer.testing.kit.clock import Connection
from idemconsumer.testing.kit.databases import SCHEMA


@dataclass(frozen=True, slots=True)
class SagaSeen:
    """A saga at this moment. `state`: processing, undoing, completed, failed or dead. `result`: its return value, or
    its rejection. `steps`: the names of the finished steps, in the order of their starts. `status`: the whole
    record."""

    state: str
    result: Any
    steps: tuple[str, ...]
    status: SagaStatus


async def sagas_of(
    connection: Connection,
    dsn: str,
    apps: Sequence[App],
    key: str,
    handler: Handler[..., Any] | None,
    tenant: str | None,
) -> dict[str, SagaSeen]:
    """The sagas with this key, by `app/handler`."""
    found: dict[str, SagaSeen] = {}
    admin = SagaAdmin(dsn, SCHEMA)
    for app in apps:
        for each in app.handlers.values():
            if each.plan.signature.needs_saga and handler in (None, each):
                digest = each.plan.identity(app.name).digest(tenant, given_key(key))
                if (detail := await admin.look_up(digest)) is not None:
                    found[f"{app.name}/{each.name}"] = await _seen(connection, digest, status(detail))
    return found


async def _seen(connection: Connection, digest: bytes, its: SagaStatus) -> SagaSeen:
    cursor = await connection.execute("select body, content_type from idemconsumer.result where key = %s", (digest,))
    result = None
    for body, content_type in await cursor.fetchall():
        is_json = content_type is None or content_type.startswith("application/json")
        result = msgspec.json.decode(body) if body and is_json else body
    done = tuple(step.name for step in its.steps if step.state == "done")
    return SagaSeen(its.state.name.lower(), result, done, its)
