"""Accept a message now and have a worker run it later. The result is queried by the message's key (H40 to H44)."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime
from functools import partial
from typing import Any, Final

import msgspec
from psycopg import AsyncConnection

from idemconsumer.app.app_state import AppState
from idemconsumer.app.following import tracing_of
from idemconsumer.app.sending import check_via, to_send
from idemconsumer.errors import Contention, NotReadNow, StoreUnavailable
from idemconsumer.handlers.arguments import Tx
from idemconsumer.handlers.decorator import Handler
from idemconsumer.handlers.handler import NO_HEADERS, given_key
from idemconsumer.message import codecs
from idemconsumer.rules.progress import Progress, progress
from idemconsumer.rules.values import Record, State
from idemconsumer.rules.verdicts import Verdict
from idemconsumer.stores.acceptance import Acceptance, AcceptedStanding, accept_in
from idemconsumer.stores.decided import contended, decided
from idemconsumer.stores.tx import connection_of
from idemconsumer.user_code.resources import Resources

_ID: Final = re.compile(r"[0-9a-f]{64}", re.ASCII)
_PATIENCE: Final = 2.0  # seconds to wait for a rival that accepts the same key; it commits in milliseconds


class Accepted(msgspec.Struct, frozen=True):
    """How far an accepted message has come.

    * `progress`: how far.
    * `new`: this call has stored the message.
    * `conflict`: the key was used before with another payload. Nothing was stored, and `progress` is that of the first
      message.
    * `body`, `content_type`: the result, for `done` and `failed`.
    * `status`, `headers`: of the response, if the handler set them.
    * `reason`: the code of the rejection (`failed`) or of the dead letter (`dead`).
    * `created_at`: the time of acceptance by the database's clock. Only `accepted` returns it. It is None for a message
      that was not accepted but came from a broker.
    """

    progress: Progress
    new: bool = False
    conflict: bool = False
    status: int | None = None
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes | None = None
    content_type: str | None = None
    reason: str | None = None
    created_at: datetime | None = None


class Accepting(AppState):
    """The calls of `App` that accept messages."""

    async def accept(
        self,
        handler: Handler[..., Any],
        payload: object,
        *,
        key: str,
        tenant: str | None = None,
        headers: Mapping[str, str] = NO_HEADERS,
        via: str | None = None,
        tx: Tx | AsyncConnection[Any] | None = None,
    ) -> Accepted:
        """Store a message, to be run by a worker of this app. Storing is one commit, whatever the handler's source is.

        Bytes in `payload` are the body as they are; anything else is encoded as JSON. `key` replaces the handler's key
        rule, and `tenant` its tenant rule; `headers` are the message's headers. With `tx` (of a handler, or a psycopg
        connection of your own) the message is accepted if and only if that transaction commits. Without `tx` it is
        accepted when this returns.

        The handler gets the message from a queue in Postgres. With `via`, which names one of the handler's sources such
        as "kafka:orders", the message goes through the outbox to that source. Then it has the order of that source, and
        other readers of the source see it too. The handler's rules must find the same `key` and `tenant` in the
        message. Where a rule reads a header, this call sets that header; where a rule reads the payload, the payload
        must already agree. docs/handlers.md lists the rules that work with `via`.

        A second call with the same key stores nothing and returns how far the first message has come. If its payload
        differs, the result is a `conflict`, and no dead letter is written. Not guaranteed: any order without `via`.
        Raises BadMessage if the handler could not take payload, key or tenant, TypeError if the payload is not JSON,
        and ConfigurationError if it is not a handler of this app or cannot accept the message by `via`. Raises
        StoreUnavailable if nothing is stored, and CommitUnknown if the message may be stored: then call again with the
        same key.
        """
        self._check_own(handler)
        if via is not None:
            check_via(handler.plan, via)
        settings = self._configured()
        bound = self._bind(handler, settings, Resources(()))
        sent = tracing_of(settings).carried(headers)
        inline = await self._running("front-door")  # R39: before anything is hashed
        if via is None:
            call, out = bound.from_code(payload, key=key, tenant=tenant, headers=sent), None
        else:
            try:
                call, out = await to_send(bound, via, payload, key=given_key(key), tenant=tenant, headers=sent)
            except NotReadNow as not_now:
                raise StoreUnavailable(f"nothing is stored: {not_now.detail}") from not_now.error
        max_age = bound.options.max_age
        asked = max_age is not None and bound.reconciles
        acceptance = Acceptance(call.claim, call.arrived, bound.identity, out, max_age, asked)
        if tx is not None:
            connection, schema = connection_of(tx), settings.schema
            storing = partial(accept_in, connection, schema, await inline.scope_id(acceptance.claim), acceptance)
            return _told(await _stored(storing, 0.0), acceptance)
        return _told(await _stored(partial(inline.accept, acceptance), _PATIENCE), acceptance)

    async def accepted(self, handler: Handler[..., Any], *, key: str, tenant: str | None = None) -> Accepted:
        """Return how far the message accepted under a key has come. Runs nothing.

        `tenant` must be the tenant that the message was accepted for; with another tenant no message is found. Raises
        StoreUnavailable, BadMessage for an invalid key, and ConfigurationError if it is not a handler of this app.
        """
        id = await self.accepted_id(handler, key=key, tenant=tenant)
        return await self.accepted_by_id(handler, id=id, tenant=tenant)

    async def accepted_id(self, handler: Handler[..., Any], *, key: str, tenant: str | None = None) -> str:
        """Return an id that stands for a key in a URL: 64 hex digits, always the same for the same key and tenant. It
        does not contain the key. Raises as `accepted`."""
        self._check_own(handler)
        key = given_key(key)
        await self._running("front-door")  # R39: before anything is hashed
        return handler.plan.identity(self.name).digest(tenant, key).hex()

    async def accepted_by_id(self, handler: Handler[..., Any], *, id: str, tenant: str | None = None) -> Accepted:
        """Like `accepted`, but takes the id that `accepted_id` returned. No message is found for the id of another
        tenant or handler, or for a text that is not an id."""
        self._check_own(handler)
        inline = await self._running("front-door")
        if not _ID.fullmatch(id):
            return _found(None)
        return _found(await inline.standing(bytes.fromhex(id), handler.plan.identity(self.name).scope(tenant)))


async def _stored(accept: Callable[[], Awaitable[Record | None]], patience: float) -> Record | None:
    """Raises StoreUnavailable if a rival holds the key for longer than `patience` seconds: there is no record yet."""
    try:
        return await decided(accept, wait=patience, busy=contended, within=patience)
    except Contention as contention:
        raise StoreUnavailable(f"the key cannot be claimed now: {contention}") from contention


def _told(standing: Record | None, acceptance: Acceptance) -> Accepted:
    if standing is None:
        return Accepted(Progress.PENDING, new=True)
    if acceptance.claim.judge(standing) is Verdict.CONFLICT:
        return Accepted(progress(standing.state), conflict=True)
    return _found(AcceptedStanding(standing.state, standing.result))


def _found(standing: AcceptedStanding | None) -> Accepted:
    if standing is None:
        return Accepted(progress(None))
    far, result, reason = progress(standing.state, held=standing.held), standing.result, standing.reason
    if standing.state is State.FAILED and result is not None:
        reason = codecs.decode_rejection(result).code
    if result is None:
        return Accepted(far, reason=reason, created_at=standing.created_at)
    return Accepted(
        far,
        status=result.status,
        headers=result.headers,
        body=result.body,
        content_type=result.content_type,
        reason=reason,
        created_at=standing.created_at,
    )
