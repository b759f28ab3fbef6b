"""The histories of sagas that have not ended, to be kept in a file for tests that replay them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import datetime
from typing import Literal

import msgspec
from psycopg.rows import tuple_row

from idemconsumer.admin.saga_views import word_of
from idemconsumer.admin.sender import Statements
from idemconsumer.message.delivered import with_delivered
from idemconsumer.message.headers import decode_headers
from idemconsumer.message.message import Message, StoredResult
from idemconsumer.rules.values import State, StepKind, StepRow, StepState
from idemconsumer.sql.queries import load
from idemconsumer.stores.leased_saga import LeasedSaga
from idemconsumer.stores.shared_reads import step_row


class Octets(msgspec.Struct, frozen=True):
    """Bytes that are not text."""

    base64: bytes


class MessageHistory(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The message that began a saga. `headers` and `delivered` are JSON, as stored."""

    source: str
    position: str
    body: str | Octets
    message_id: str | None = None
    headers: str | Octets = "{}"
    delivered: str | Octets | None = None


class StepHistory(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A recorded step, or the answer of a `saga.patched`. `output` is the return value of its function, as stored."""

    name: str
    kind: str
    state: str
    has_undo: bool = False
    overlapped: bool = False
    position: int | None = None
    attempts: int = 1
    output: str | Octets | None = None
    content_type: str | None = None
    arguments: bytes | None = None


class SagaHistory(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One line of `idemconsumer sagas export`: a saga that has not ended, and its recorded steps.

    * `key` (hexadecimal), `scope` (app, tenant and handler): where it has been stored since `started_at`.
    * `handler`, `version`: its present handler, and the version in which it runs there.
    * `state`: processing or undoing, also while the saga is a dead letter for the reason `parked`.
    * `rejection`: the reason for its undo.
    * `cancel`: a cancellation has been requested, with undo or without.
    * `message`: the message that began it.
    * `steps`: in the order in which they finished; steps of unknown outcome and waits that are not over come last. Each
      has its kind, its state, its output and a digest of each of its `arguments`. Each also says whether it has an
      undo, and whether it `overlapped` others and so has no fixed place.
    """

    key: str
    scope: str
    handler: str
    state: str
    started_at: datetime
    message: MessageHistory
    steps: list[StepHistory]
    version: str | None = None
    parked: str | None = None
    cancel: bool | None = None
    rejection: str | Octets | None = None

    def __str__(self) -> str:
        """The handler, the first digits of the key, and the number of recorded steps: for the name of a test."""
        return f"{self.handler}-{self.key[:12]}-{len(self.steps)}"

    def rows(self) -> list[StepRow]:
        """Return the steps as a run reads them."""
        return [
            StepRow(
                step.name, StepKind[_name(step.kind)], StepState[_name(step.state)], step.has_undo, step.overlapped,
                step.position, step.attempts, _output(step), arguments=step.arguments,
            )
            for step in self.steps
        ]  # fmt: skip

    def leased(self) -> LeasedSaga:
        """Return the saga as a worker takes it for its next attempt."""
        its = self.message
        headers = decode_headers(_body(its.headers))
        message = Message(its.source, _body(its.body), headers, message_id=its.message_id, position=its.position)
        return LeasedSaga(
            key=bytes.fromhex(self.key), scope=self.scope, handler=self.handler, token=1, worker=1,
            state=State[_name(self.state)], attempt=1, version=self.version,
            rejection=None if self.rejection is None else _body(self.rejection), stale=False, cancel=self.cancel,
            message=with_delivered(message, None if its.delivered is None else _body(its.delivered)),
        )  # fmt: skip


async def histories(
    dsn: str,
    schema: str,
    *,
    handler: str | None = None,
    state: Literal["processing", "undoing", "dead"] | None = None,
    since: float | None = None,
    limit: int = 1000,
) -> AsyncIterator[SagaHistory]:
    """The histories of sagas that have not ended, newest first, all as of one moment. `since`: only sagas begun in the
    last so many seconds.

    Sagas that have ended are left out: their messages are not kept. Raises StoreUnavailable, and ConfigurationError if
    the schema is not migrated.
    """
    given = {"handler": handler, "state": state, "since": since, "limit": limit}
    async with Statements(dsn, schema).sending() as send:
        await send.connection.execute("begin isolation level repeatable read, read only")  # this works on a standby too
        for row in await send("saga_histories", **given):
            cursor = send.connection.cursor(row_factory=tuple_row)  # some columns have no name
            steps = await cursor.execute(load(schema)["steps"], {"keys": [row["key"]], "window": 1 << 40})
            its = {name: row.pop(name) for name in ("source", "position", "message_id", "body", "headers", "delivered")}
            its |= {name: _stored(its[name]) for name in ("body", "headers", "delivered")}
            message = MessageHistory(**its | {"body": its["body"] or "", "headers": its["headers"] or "{}"})
            row |= {
                "key": row["key"].hex(),
                "state": word_of(State(row["state"])),
                "rejection": _stored(row["rejection"]),
            }
            recorded = [_step(step_row(*step)) for _, *step in await steps.fetchall()]
            yield SagaHistory(**row, message=message, steps=recorded)


def _step(row: StepRow) -> StepHistory:
    given = {name: getattr(row, name) for name in ("name", "has_undo", "overlapped", "position", "arguments")}
    given |= {"kind": word_of(row.kind), "state": word_of(row.state), "attempts": row.attempt}
    if row.output is not None:
        given |= {"output": _stored(row.output.body), "content_type": row.output.content_type}
    return StepHistory(**given)


def _output(step: StepHistory) -> StoredResult | None:
    return None if step.output is None else StoredResult(_body(step.output), step.content_type or "")


def _stored(body: bytes | None) -> str | Octets | None:
    try:
        return None if body is None else body.decode()
    except UnicodeDecodeError:
        return Octets(body or b"")


def _body(stored: str | Octets) -> bytes:
    return stored.base64 if isinstance(stored, Octets) else stored.encode()


def _name(word: str) -> str:
    return word.upper().replace(" ", "_")
