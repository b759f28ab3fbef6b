"""What the database stores about a key, and decisions of people about it (O7, O8)."""

from __future__ import annotations

from base64 import b64encode
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

import msgspec

from idemconsumer.admin.dead_letters import Admin, Redrive, key_range, only, unknown_handler
from idemconsumer.admin.decisions import Deciding
from idemconsumer.admin.saga_admin import SagaAdmin
from idemconsumer.admin.saga_views import readable
from idemconsumer.admin.sender import PATIENCE, NamedRow, Statements
from idemconsumer.admin.timeline import Event
from idemconsumer.errors import ConfigurationError, NothingFound
from idemconsumer.message import keys
from idemconsumer.message.sources import retry_source
from idemconsumer.rules.coming_again import coming_again
from idemconsumer.rules.values import State
from idemconsumer.stores.claims import PostgresClaims
from idemconsumer.stores.columns import first_bytes

_MOST_FOUND: Final = 5
_MOST_DELIVERIES: Final = 1_000


class KeyDetail(msgspec.Struct, frozen=True, kw_only=True):
    """Everything known about a key.

    `state`: None if it has no record; `until`: when the record may be pruned. `due`: when the stored message of a
    PENDING key runs, None for at once. `created_at`: when it was accepted, if it was; `awaited`: the source from which
    its message is still expected (H46). `deliveries`: the last thousand in the delivery log (O22), newest first.
    `next`: what would happen if its message came again now. `timeline`: all of this and the events of its saga, in
    order. `store`: where the record is.

    `attempts`: how often its message was tried without an end, and the last error with its place. `request`: a request
    that has been running since `since`. It is `lost` if its owner's lease has expired, so how far it came is unknown;
    the next request with its key and payload takes it over, or `keys release` makes the key new. `again`: it is not the
    first run.
    """

    key: str
    scope: str | None
    state: str | None
    changed_at: datetime | None
    until: datetime | None
    result: str | None
    due: datetime | None
    created_at: datetime | None
    awaited: str | None
    attempts: NamedRow | None
    request: NamedRow | None
    letters: Sequence[NamedRow]
    redrives: Sequence[Redrive]
    deliveries: Sequence[NamedRow]
    timeline: Sequence[Event]
    next: str
    store: str = "postgres"


class Keys:
    """Queries and decisions in one schema. Raises like `Admin`, and ConfigurationError if a key allows no decision."""

    def __init__(self, dsn: str, schema: str) -> None:
        self._sql = Statements(dsn, schema, patience=PATIENCE)
        self._letters = Admin(dsn, schema)
        self._sagas = SagaAdmin(dsn, schema)
        self._deciding = Deciding(dsn, schema)

    async def find(
        self,
        *,
        prefix: str | None = None,
        handler: str = "",
        key: str = "",
        tenant: str | None = None,
        app: str | None = None,
        unknown: bool = False,
        elsewhere: Callable[[bytes], Awaitable[bool]] | None = None,
    ) -> bytes:
        """The only stored key that begins with `prefix` (hex) and of which something is known, or under which `handler`
        stores the text `key`. For a request, `handler` is its route, or its method and path.

        `unknown`: also accept a complete key of which nothing is known, since a log may have it. `elsewhere` tells
        whether another store has a key; `app` must then be given, since the database has no scope that tells it. Raises
        NothingFound.
        """
        stored = list[bytes]()
        if prefix is not None:
            low, high = key_range(prefix)
            found, what = await self._known(low, high), f"{prefix!r}"
            if low == high and (unknown or (not found and elsewhere is not None and await elsewhere(low))):
                found = [low]
        else:
            what = f"handler {handler!r} and this key"
            stored = await self._letters.stored_keys(handler, key, tenant=tenant, app=app)
            found = stored if len(stored) == 1 else [each for each in stored if await self._known(each, each)]
            if not found and elsewhere is not None:
                found = [each for each in stored if await elsewhere(each)]
        if not found:
            known = stored or prefix is not None
            if not known and (why := await unknown_handler(self._sql.dsn, self._sql.schema, handler)) is not None:
                raise ConfigurationError(why)
            raise NothingFound(f"nothing is known of {what}; `idemconsumer keys list` shows known keys")
        return only(found, what, more=", or --tenant")

    async def born(self) -> str:
        """An identifier by which this schema differs from those in all other databases (H33)."""
        return str((await self._sql.rows("born"))[0]["born"])

    async def list(
        self,
        *,
        handler: str | None = None,
        tenant: str | None = None,
        state: State | None = None,
        after: str | None = None,
        limit: int = 50,
    ) -> list[NamedRow]:
        """Records in the order of their keys, after `after` (hex). If few match, all records are read."""
        scopes = None
        if handler is not None or tenant is not None:
            named = {row["id"]: keys.parts_of(row["name"]) for row in await self._sql.rows("scope_ids")}
            scopes = [id for id, (_, of, name) in named.items() if handler in (None, name) and tenant in (None, of)]
        behind = None if after is None else key_range(after)[1]
        number = None if state is None else int(state)
        rows = await self._sql.rows("key_list", after=behind, scopes=scopes, state=number, limit=limit)
        return [NamedRow(row, state=State(row.state).name.lower()) for row in rows]

    async def explain(self, key: bytes) -> KeyDetail:
        """Everything known about a key (O7). Changes nothing. Not one snapshot: an event during the call may show in
        one part and not in another."""
        record = await self._first("key_record", key=key)
        tried = await self._first("key_attempts", key=key)
        letters = await self._sql.rows("key_letters", key=key)
        redrives = await self._sql.values(Redrive, "dead_redrives", letter=None, key=key)
        logged = {"first": first_bytes(key), "limit": _MOST_DELIVERIES}
        deliveries = await self._sql.rows("key_deliveries", **logged)
        saga = await self._sagas.look_up(key)
        state = None if record["state"] is None else State(record["state"])
        scope = record["scope"] or tried["scope"]
        request = None
        if record["request_since"] is not None:
            request = NamedRow({name: record[f"request_{name}"] for name in ("since", "owner", "lost", "again")})
        attempts = None
        if tried["scope"] is not None:
            attempts = NamedRow({name: tried[name] for name in ("count", "error", "changed_at")})
        detail = KeyDetail(
            key=key.hex(),
            scope=scope,
            state=None if state is None else state.name.lower(),
            changed_at=record["changed_at"],
            until=record["until"] if state in (State.COMPLETED, State.FAILED) else None,
            result=readable(record["result"]),
            due=await self._due(key, scope) if state is State.PENDING and scope is not None else None,
            created_at=record["accepted_at"],
            awaited=record["via"] if record["awaited"] else None,
            attempts=attempts,
            request=request,
            letters=letters,
            redrives=redrives,
            deliveries=deliveries,
            timeline=[] if saga is None else saga.timeline,
            next=coming_again(
                state,
                compared=bool(record["compared"]),
                over=bool(record["over"]),
                letter=max((letter.id for letter in letters if letter.redriven_at is None), default=None),
                lost=None if request is None else request.lost,
                awaited=record["via"] if record["awaited"] else None,
            ),
        )
        timeline = sorted([*detail.timeline, *_events(detail, record["via"])], key=lambda event: event.at)
        return msgspec.structs.replace(detail, timeline=timeline)

    async def forget(self, key: bytes, *, by: str, record: bool = False) -> int:
        """Remove personal data: result, dead letters with their messages, errors, steps, history, signals, fingerprints
        (O8). Returns how many dead letters there were. Raises NothingFound if nothing is known of the key.

        The record itself stays, as a hash and a state, so its message still does not run again. With `record` it is
        removed too, and the message counts as new. Dead letters without a key are not found by a key. The delivery log
        is searched last, without the key's lock: repeat the call if it is interrupted there, or if the message comes
        again meanwhile.
        """
        known = await self._known(key, key)
        async with self._deciding.transaction() as claims:
            state = await self._decided(claims, key, "forgotten")
            ((letters,),) = await claims.send("forget_key", {"key": key})
            if record and state is not None:
                await claims.send("delete_record", {"key": key})
            target = f"key {key.hex()[:12]}{' and its record' if record else ''}"
            await claims.send("note_decision", {"by": by, "what": "forget", "target": target})
            await claims.complete([], [])
        async with self._sql.changing() as send:
            timeout = f"set local statement_timeout = '{PATIENCE:g}s'"  # `set local` works behind a pooler too
            await send.connection.execute(timeout.encode())
            logged = await send.execute("forget_deliveries", first=first_bytes(key))
        if not known and not logged.rowcount:
            raise NothingFound(f"nothing is known of key {key.hex()[:12]}, so nothing was forgotten")
        return int(letters)

    async def release(self, key: bytes, *, by: str) -> None:
        """Let the message run when it comes again, if its key is DEAD or FAILED, belongs to a request whose owner was
        lost (H24), or waits for a message from its handler's own broker (H46). Its dead letters are closed."""
        async with self._deciding.transaction() as claims:
            state = await self._decided(claims, key, "released", steps=False)
            if state not in (State.DEAD, State.FAILED, State.PROCESSING, State.PENDING):
                found = "has no record" if state is None else "is COMPLETED, and would be applied twice"
                raise ConfigurationError(f"key {key.hex()[:12]} is not released: it {found}")
            await claims.send("release_key", {"key": key, "by": by})
            await claims.send("note_decision", {"by": by, "what": "release", "target": f"key {key.hex()[:12]}"})
            await claims.complete([], [])

    async def _decided(self, claims: PostgresClaims, key: bytes, what: str, *, steps: bool = True) -> State | None:
        """Lock the key as a claim does (J1); returns its state. Raises ConfigurationError if it is in progress."""
        await claims.send("lock_key", {"key": key})
        await claims.send("lock_request", {"key": key})
        ((number, runs, stepped, requested, awaited),) = await claims.send("decided_key", {"key": key})
        state = None if number is None else State(number)
        why = None
        if requested:
            why = "its request runs; repeat this when it is over"
        elif runs or (stepped and not steps):
            why = "it is a saga's; `idemconsumer sagas` decides about it"
        elif state is State.PENDING and (steps or not awaited):
            why = "its message is stored, and runs once more; repeat this then"
        if why is not None:
            raise ConfigurationError(f"key {key.hex()[:12]} is not {what}: {why}")
        return state

    async def _due(self, key: bytes, scope: str) -> datetime | None:
        app, _, handler = keys.parts_of(scope)
        name = retry_source(app, handler).partition(":")[2]
        return next(
            (row["due_at"] for row in await self._sql.rows("key_stored", name=name, digits=b64encode(key))), None
        )

    async def _known(self, low: bytes, high: bytes) -> Sequence[bytes]:
        return [row["key"] for row in await self._sql.rows("known_keys", low=low, high=high, limit=_MOST_FOUND)]

    async def _first(self, statement: str, **given: Any) -> Mapping[str, Any]:
        """The first row; without one, all its columns are None."""
        return next(iter(await self._sql.rows(statement, **given)), defaultdict(lambda: None))


def _events(of: KeyDetail, via: str | None) -> Iterator[Event]:
    """The events of a key, without those of its saga."""
    if of.created_at is not None:
        yield Event(at=of.created_at, what="accepted", detail=via)
    if of.request is not None:
        detail = "its owner was lost" if of.request.lost else "it runs"
        yield Event(at=of.request.since, what="request", owner=of.request.owner, detail=detail)
    for each in of.deliveries:
        detail = f"from {each.place}, {each.seconds:.3g} s after it arrived"
        yield Event(at=each.at, what=f"delivery {each.outcome}", owner=each.worker, attempt=each.attempt, detail=detail)
    if of.attempts is not None:
        detail = of.attempts.error or "begun, or delivered again"
        yield Event(at=of.attempts.changed_at, what="tried", attempt=of.attempts.count, detail=detail)
    for letter in of.letters:
        detail = f"{letter.reason}: {letter.error}, from {letter.source} {letter.position}"
        yield Event(at=letter.first_at, what=f"letter {letter.id}", attempt=letter.attempts, detail=detail)
        if letter.arrivals > 1:
            yield Event(at=letter.last_at, what=f"letter {letter.id} again", detail=f"arrival {letter.arrivals}")
    for run in of.redrives:
        what = "released" if run.outcome == "released" else "redriven"
        yield Event(at=run.at, what=what, owner=run.by, detail=f"letter {run.letter}, run {run.run}")
        if run.ended_at is not None and what == "redriven":
            yield Event(at=run.ended_at, what=f"redrive {run.outcome}", detail=f"letter {run.letter}")
    if of.due is not None:
        yield Event(at=of.due, what="next attempt")
