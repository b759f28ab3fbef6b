"""Which rights each kind of role needs, as the statements that grant them; nothing here runs a statement.

A worker changes rows of every table, and each version decides which ones: with exactly these rights the previous
version still starts. The other roles have the rights that their statements need, column by column where a table holds
messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, LiteralString

from psycopg import sql

from idemconsumer.stores.migrations import names

_MESSAGE: Final = "name, message_id, body, headers"
_EVERY: Final[tuple[LiteralString, ...]] = ("SELECT", "INSERT", "UPDATE", "DELETE")
# For a request: its claim, which deletes expired records, its lease and its answer. A person's decision is audited.
_REQUESTS: Final[Mapping[LiteralString, tuple[LiteralString, ...]]] = {
    "record": _EVERY,
    "result": _EVERY,
    "request": _EVERY,
    "worker": _EVERY,
    "scope": ("SELECT", "INSERT", "UPDATE"),
    "hashing": ("SELECT", "INSERT", "UPDATE"),
    "audit": ("INSERT",),
}
_OF_REQUESTS: Final = (
    *("accept", "claim", "prepare_claim", "shown_as", "recorded", "claim_request", "complete_request", "use_scopes"),
    *("seal", "open_sealed", "sequences_behind"),
)
# H56: what the front door needs besides `_PURGE`. A process that ends deletes its lease, personal data of a key is
# deleted on request, and for accepted work the time is read. It is stored by a function with its owner's rights
# (migrations/0002).
_FRONT_DOOR: Final[tuple[LiteralString, ...]] = (
    *(f"GRANT {', '.join(rights)} ON {{schema}}.{table} TO {{role}}" for table, rights in _REQUESTS.items()),
    "GRANT SELECT ON {schema}.migration TO {role}",
    "GRANT SELECT (key, worker) ON {schema}.saga TO {role}",
    "GRANT SELECT (key), UPDATE (body, content_type, fingerprint, canonical) ON {schema}.child TO {role}",
    "GRANT SELECT (token, created_at), UPDATE (body, headers) ON {schema}.accepted TO {role}",
    "GRANT SELECT (id) ON {schema}.audit TO {role}",
    "GRANT SELECT (key) ON {schema}.redrive TO {role}",
    "GRANT UPDATE (keys, positions) ON {schema}.delivery_log TO {role}",
    "GRANT USAGE ON SEQUENCE {schema}.saga_token TO {role}",
    "GRANT EXECUTE ON FUNCTION "
    "{schema}.claim({schema}.claim[], smallint, boolean), {schema}.prepare_claim({schema}.claim[]), "
    "{schema}.shown_as(bytea), {schema}.recorded(bytea[], bytea[]), {schema}.use_scopes(int[]), "
    "{schema}.claim_request({schema}.claim[], bigint), "
    "{schema}.complete_request(bytea, bigint, smallint, bytea, text, smallint, bytea), "
    "{schema}.seal(text), {schema}.open_sealed(text, text, text, text), {schema}.sequences_behind(), "
    "{schema}.accept(bytea, text, text, float8, text, bytea, boolean, bytea, jsonb) TO {role}",
)
_LATER: Final = "ALTER DEFAULT PRIVILEGES IN SCHEMA {schema} GRANT "
_WORKER: Final[tuple[LiteralString, ...]] = (
    "GRANT SELECT, INSERT, UPDATE, DELETE ON {tables} TO {role}",
    "GRANT SELECT ON {schema}.line, {schema}.of_all TO {role}",
    "GRANT SELECT ON {schema}.migration TO {role}",
    "GRANT USAGE ON SEQUENCE {sequences} TO {role}",
    "GRANT USAGE ON SEQUENCE {schema}.queue_id_seq, {schema}.outbox_id_seq TO {role}",
    "GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA {schema} TO {role}",
    f"{_LATER}SELECT, INSERT, UPDATE, DELETE ON TABLES TO {{role}}",
    f"{_LATER}USAGE ON SEQUENCES TO {{role}}",
    f"{_LATER}EXECUTE ON FUNCTIONS TO {{role}}",
)
# INSERT … RETURNING id reads the id, and nothing else that others have sent. A signal is stored by a function with its
# owner's rights (migrations/0005), since that has to read the record.
_PRODUCER: Final[tuple[LiteralString, ...]] = (
    f"GRANT INSERT ({_MESSAGE}), SELECT (id) ON {{schema}}.queue TO {{role}}",
    f"GRANT INSERT ({_MESSAGE}, due_at), SELECT (id) ON {{schema}}.delayed TO {{role}}",
    "GRANT INSERT (destination, key, order_key, body, headers, due_at), SELECT (id) ON {schema}.outbox TO {role}",
    "GRANT EXECUTE ON FUNCTION {schema}.publish(text, jsonb, text, jsonb, interval), "
    "{schema}.publish_bytes(text, bytea, text, jsonb, interval), "
    "{schema}.signal(text, text, text, text, jsonb, text), {schema}.send_signal(bytea, text, text, bytea, text), "
    "{schema}.check_saga(text, text, text), "
    "{schema}.saga_key(text, text, text, text), {schema}.saga_scope(text, text, text) TO {role}",
)
_READER: Final[tuple[LiteralString, ...]] = (
    "GRANT SELECT ON ALL TABLES IN SCHEMA {schema} TO {role}",
    "GRANT EXECUTE ON FUNCTION {schema}.saga_key(text, text, text, text), {schema}.low_water_of(text, text), "
    "{schema}.recorded(bytea[], bytea[]) TO {role}",
)
# Tables are measured before they are emptied, so the messages of dead letters can be read; those of sagas cannot.
_PURGE: Final[tuple[LiteralString, ...]] = (
    "GRANT SELECT, DELETE ON {schema}.record, {schema}.attempt, {schema}.schedule TO {role}",
    "GRANT SELECT ON {schema}.dead_retention TO {role}",
    "GRANT SELECT, DELETE, UPDATE (seen_at, retired_at) ON {schema}.scope TO {role}",
    "GRANT SELECT (key), DELETE ON {schema}.result, {schema}.step, {schema}.history, {schema}.accepted TO {role}",
    "GRANT SELECT (key, scope_id, sent_at), DELETE ON {schema}.signal TO {role}",
    "GRANT SELECT (parent), DELETE ON {schema}.child TO {role}",
    "GRANT SELECT, DELETE, UPDATE (again) ON {schema}.request TO {role}",
    "GRANT SELECT ON {schema}.worker TO {role}",
    "GRANT SELECT (letter), DELETE ON {schema}.redrive TO {role}",
    "GRANT SELECT (seen_at), DELETE ON {schema}.process TO {role}",
    "GRANT SELECT, DELETE ON {schema}.delivery_log TO {role}",
    "GRANT SELECT, UPDATE ON {schema}.upkeep TO {role}",
    "GRANT SELECT, INSERT, UPDATE ON {schema}.upkeep_range TO {role}",
    "GRANT SELECT (key, scope_id) ON {schema}.saga TO {role}",
    "GRANT SELECT, DELETE, UPDATE (body, body_size, body_sha256, headers, delivered, error, emptied_at) "
    "ON {schema}.dead_letter TO {role}",
    "GRANT SELECT, DELETE, UPDATE (looked_at) ON {schema}.low_water TO {role}",
    "GRANT SELECT ON {schema}.of_all TO {role}",
    "GRANT SELECT (name, id, moved) ON {schema}.queue TO {role}",
    "GRANT SELECT (name, due_at) ON {schema}.delayed TO {role}",
    "GRANT SELECT (destination, id, due_at, tries, parked_at) ON {schema}.outbox TO {role}",
    "GRANT EXECUTE ON FUNCTION {schema}.error_type(text), {schema}.error_place(text) TO {role}",
)


Kind = Literal["worker", "front-door"]


@dataclass(frozen=True, slots=True)
class Needed:
    """The rights without which a process cannot start (each table with a right), and the statements that grant all
    rights that it uses."""

    tables: Sequence[tuple[str, str]]
    sequences: Sequence[str]
    functions: Sequence[str]
    statements: Callable[[str, str], list[str]]


def needed(kind: Kind) -> Needed:
    """The rights for a process of that kind."""
    if kind == "worker":
        every = [(table, right) for table in names("table") for right in _EVERY]
        return Needed(every, names("sequence"), names("function"), worker)
    pairs = [(table, right) for table, rights in _REQUESTS.items() for right in rights]
    return Needed(pairs, ["saga_token"], _OF_REQUESTS, front_door)


def worker(schema: str, role: str) -> list[str]:
    """For a process that runs handlers. Covers objects of later migrations too, if the migrating role runs these."""
    tables, sequences = (
        sql.SQL(", ").join(sql.Identifier(schema, name) for name in each)
        for each in (names("table"), names("sequence"))
    )
    return _all(_WORKER, schema, role, tables=tables, sequences=sequences)


def producer(schema: str, role: str) -> list[str]:
    """For a process that publishes to Postgres queues and into the outbox, starts sagas and sends signals, and reads
    none of them."""
    return _all(_PRODUCER, schema, role)


def reader(schema: str, role: str) -> list[str]:
    """For people who may read everything that is stored, messages and results too. It changes nothing."""
    return _all(_READER, schema, role)


def front_door(schema: str, role: str) -> list[str]:
    """For web processes that answer requests, and for `prune` and `keys forget` with the same role. It runs no
    handler."""
    return _all((*_FRONT_DOOR, *_PURGE), schema, role)


def purge(schema: str, role: str) -> list[str]:
    """For `prune`, if a role other than the workers' is to run it."""
    return _all(_PURGE, schema, role)


def _all(statements: Iterable[LiteralString], schema: str, role: str, **more: sql.Composable) -> list[str]:
    places = {"schema": sql.Identifier(schema), "role": sql.Identifier(role), **more}
    every = ("GRANT USAGE ON SCHEMA {schema} TO {role}", *statements)
    return [sql.SQL(each).format(**places).as_string(None) for each in every]
