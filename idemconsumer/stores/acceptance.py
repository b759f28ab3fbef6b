"""What is accepted now and done later: its record, PENDING, and its message are one commit (H40)."""

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
    """A message that is to run later, under the record of `claim`. `name`: the handler's, as it is stored. `sent`: what
    goes to its own broker instead of into its queue in Postgres (H46). `max_age`: seconds after which it is too late,
    and then it is `asked` about (H47), or FAILED."""

    claim: Claim
    message: Message
    name: StoredName
    sent: SentAccepted | None = None
    max_age: float | None = None
    asked: bool = False

    def statements(self) -> list[Statement]:
        """What follows the claim. The header that names the record counts in the handler's own queue alone (H41)."""
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
    """Where a message goes by the outbox, with the record key of Kafka or the message id elsewhere. `token`: what only
    it and its record have."""

    destination: str
    key: str | None
    token: bytes


@dataclass(frozen=True, slots=True)
class AcceptedStanding:
    """What is on record of a key. `held`: it is PENDING, and somebody has it in hand. `reason`: of its dead letter.
    `created_at`: when it was accepted; None for what was not."""

    state: State
    result: StoredResult | None = None
    held: bool = False
    reason: str | None = None
    created_at: datetime | None = None


async def accept(pool: Pool, acceptance: Acceptance) -> Record | None:
    """In a transaction of its own: None when it was stored; the record that there is.

    Raises Contention when a rival holds the key, CommitUnknown, StoreUnavailable, and ConfigurationError for the schema
    as `accept_in`.
    """
    with in_words(pool.schema):
        async with transaction(pool, group=1) as claims:
            if (found := await claims.claim_one(acceptance.claim, State.PENDING)) is None:
                await claims.complete((), (), more=acceptance.statements())
            return found


async def scope_id(pool: Pool, claim: Claim) -> int:
    """In a commit of its own: whoever else names a new scope would wait for the end of the transaction (R30)."""
    async with pool.connection() as connection:
        (scope,) = await pool.scope_ids(connection, [claim])
        return scope


async def accept_in(
    connection: psycopg.AsyncConnection[Any], schema: str, scope: int, acceptance: Acceptance
) -> Record | None:
    """In whatever transaction is open on the connection; the key is held until its end. Raises psycopg.Error,
    Contention, and ConfigurationError when the schema is not migrated, or each statement would commit by itself."""
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
    """None: there is no record in this scope, or it has expired. Raises StoreUnavailable, and ConfigurationError as
    `accept_in`."""
    with in_words(pool.schema):
        rows = await pool.alone("accepted", {"key": key, "scope": scope})
    for state, body, content_type, status, headers, held, reason, at in rows:
        result, created_at = read_result(body, content_type, status, headers), None if at is None else moment(at)
        return AcceptedStanding(State(state), result, held, reason, created_at)
    return None


async def time_out(pool: Pool, names: Sequence[StoredName], limit: int, rejection: StoredResult) -> list[bytes] | None:
    """Reject what was accepted for handlers of these names and has not begun in time (H44): the keys. None: nothing is
    due. Raises StoreUnavailable and CommitUnknown."""
    asked = {"apps": [name.app for name in names], "names": [name.handler for name in names], "limit": limit}
    if not (due := [key for (key,) in await pool.alone("overdue", asked)]):
        return None
    return await reject(pool, due, rejection)


async def reject(
    pool: Pool, keys: Sequence[bytes], rejection: StoredResult, *, asked: int | None = None
) -> list[bytes]:
    """Those of them that were waiting, and are FAILED with this from now on. `asked`: only if nobody has asked again
    since (H47), and else only if it is too late. Raises StoreUnavailable and CommitUnknown."""
    given: dict[str, Any] = {"keys": list(keys), "asked": asked, "body": rejection.body}
    given |= {"content_type": rejection.content_type, "status": rejection.status}
    async with transaction(pool, group=1) as claims:
        (answer,) = await claims.commit([("time_out", given)])
        return [key for (key,) in claims.rows(answer)]
