"""Work that is accepted now and done later: its PENDING record and its message are one commit (H40)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import psycopg
from psycopg import pq

from idemconsumer.errors import ConfigurationError
from idemconsumer.message.headers import encode_headers
from idemconsumer.message.message import Message, StoredResult
from idemconsumer.message.names import StoredName
from idemconsumer.message.origin import Pending, with_origin
from idemconsumer.rules.claim import Claim
from idemconsumer.rules.values import Record, State
from idemconsumer.sql.connecting import OwnCursor
from idemconsumer.sql.queries import in_words, load
from idemconsumer.stores.answers import moment, outcomes, standing
from idemconsumer.stores.claims import transaction
from idemconsumer.stores.columns import Statement, claimed, read_result
from idemconsumer.stores.pool import Pool


@dataclass(frozen=True, slots=True)
class Acceptance:
    """A message that is to run later, under the record of `claim`. `name`: the handler's, as it is stored. `sent`: the
    message for its own broker, instead of its row in the queue in Postgres (H46). `max_age`: the seconds after which it
    is too late; then it is `asked` about (H47), or FAILED."""

    claim: Claim
    message: Message
    name: StoredName
    sent: SentAccepted | None = None
    max_age: float | None = None
    asked: bool = False

    def statements(self) -> list[Statement]:
        """The statements after the claim. The header that names the record is valid only in the handler's own queue
        (H41)."""
        key, sent = self.claim.key, self.sent
        stored, whole = with_origin(self.message, Pending(key, self.claim.scope)), sent is None or self.asked
        noted: Statement = ("accept", {
            "key": key, "app": self.name.app, "handler": self.name.handler, "max_age": self.max_age,
            "via": None if sent is None else sent.destination, "token": None if sent is None else sent.token,
            "asked": self.asked, "body": stored.body if whole else None,
            "headers": encode_headers(stored.headers).decode() if whole else None,
        })  # fmt: skip
        if sent is None:
            return [noted]
        told: dict[str, Any] = {
            "destination": sent.destination, "body": self.message.body, "key": sent.key, "delay": 0.0,
            "headers": encode_headers(self.message.headers).decode(),
        }  # fmt: skip
        return [noted, ("store_outgoing", told)]


@dataclass(frozen=True, slots=True)
class SentAccepted:
    """Where the outbox sends the message, with Kafka's record key, or the message id at other brokers. `token`: a value
    that only this message and its record have."""

    destination: str
    key: str | None
    token: bytes


@dataclass(frozen=True, slots=True)
class AcceptedStanding:
    """The record of a key. `held`: it is PENDING, and another transaction has locked its key. `reason`: its dead
    letter's. `created_at`: when it was accepted; None for a key that was not."""

    state: State
    result: StoredResult | None = None
    held: bool = False
    reason: str | None = None
    created_at: datetime | None = None


async def accept(pool: Pool, acceptance: Acceptance) -> Record | None:
    """Accept in a transaction of its own. Returns None if it was stored, else the record that exists.

    Raises Contention when a rival holds the key, CommitUnknown, StoreUnavailable, and ConfigurationError for the schema
    as `accept_in`.
    """
    with in_words(pool.schema):
        async with transaction(pool, group=1) as claims:
            if (found := await claims.claim_one(acceptance.claim, State.PENDING)) is None:
                await claims.complete((), (), more=acceptance.statements())
            return found


async def scope_id(pool: Pool, claim: Claim) -> int:
    """The scope's id, in a commit of its own: inserted in the caller's transaction, a new scope would block any other
    transaction that names it (R30)."""
    async with pool.connection() as connection:
        (scope,) = await pool.scope_ids(connection, [claim])
        return scope


async def accept_in(
    connection: psycopg.AsyncConnection[Any], schema: str, scope: int, acceptance: Acceptance
) -> Record | None:
    """Accept in the open transaction of the connection; the key is locked until its end. Raises psycopg.Error,
    Contention, and ConfigurationError if the schema is not migrated, or if each statement would commit by itself."""
    if connection.autocommit and connection.info.transaction_status is pq.TransactionStatus.IDLE:
        raise ConfigurationError(
            "tx= is an autocommit connection outside a transaction, so a record could be committed without its "
            "message; write `async with connection.transaction():` around it"
        )
    queries, claim = load(schema), acceptance.claim
    cursor = OwnCursor(connection)
    with in_words(schema):
        given = {"claims": claimed([claim], [scope]), "state": int(State.PENDING)}
        await cursor.execute(queries["claim"], given)
        assert cursor.pgresult is not None
        if (found := standing(outcomes(cursor.pgresult, [claim.key])[0])) is None:
            for name, params in acceptance.statements():
                await cursor.execute(queries[name], params)
        return found


async def look_up(pool: Pool, key: bytes, scope: str) -> AcceptedStanding | None:
    """The record of a key. None: there is none in this scope, or it has expired. Raises StoreUnavailable, and
    ConfigurationError as `accept_in`."""
    with in_words(pool.schema):
        rows = await pool.alone("accepted", {"key": key, "scope": scope})
    for state, body, content_type, status, headers, held, reason, at in rows:
        result, created_at = read_result(body, content_type, status, headers), None if at is None else moment(at)
        return AcceptedStanding(State(state), result, held, reason, created_at)
    return None


async def time_out(pool: Pool, names: Sequence[StoredName], limit: int, rejection: StoredResult) -> list[bytes] | None:
    """Reject accepted work of these handlers that has not begun in time (H44). Returns the keys; None if nothing was
    due. Raises StoreUnavailable and CommitUnknown."""
    asked = {"apps": [name.app for name in names], "names": [name.handler for name in names], "limit": limit}
    if not (due := [key for (key,) in await pool.alone("overdue", asked)]):
        return None
    return await reject(pool, due, rejection)


async def reject(
    pool: Pool, keys: Sequence[bytes], rejection: StoredResult, *, asked: int | None = None
) -> list[bytes]:
    """Reject those that still wait: they are FAILED with this rejection. Returns their keys. With `asked`, only if
    no process has asked about them again since (H47); otherwise only if it is too late. Raises StoreUnavailable and
    CommitUnknown."""
    given: dict[str, Any] = {"keys": list(keys), "asked": asked, "body": rejection.body}
    given |= {"content_type": rejection.content_type, "status": rejection.status}
    async with transaction(pool, group=1) as claims:
        (answer,) = await claims.commit([("time_out", given)])
        return [key for (key,) in claims.rows(answer)]
