"""The calls of an app about one saga, by its key: start, inspect, signal, cancel and decide."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Concatenate, Final, TypeVar

from psycopg import AsyncConnection

from idemconsumer.admin.decisions import Cancellation
from idemconsumer.admin.saga_admin import SagaAdmin
from idemconsumer.admin.saga_views import SagaStatus, status
from idemconsumer.app.app_state import AppState
from idemconsumer.app.enqueuing import enqueue_in
from idemconsumer.app.following import tracing_of
from idemconsumer.handlers.arguments import Done, NotDone, Tx
from idemconsumer.handlers.decorator import Handler
from idemconsumer.handlers.handler import TENANT, given_key
from idemconsumer.message import codecs
from idemconsumer.message.origin import PARENT
from idemconsumer.ports.broker import Outgoing
from idemconsumer.rules.values import Signalled
from idemconsumer.stores.signals import Signal, send
from idemconsumer.stores.tx import connection_of
from idemconsumer.user_code.resources import Resources

T = TypeVar("T")

NAMED: Final = "name a handler that takes Saga"


class SagaCalls(AppState):
    """The calls of `App` that name a saga."""

    @property
    def _starter(self) -> AppStarter:
        return AppStarter(self)

    async def start(
        self,
        handler: Handler[Concatenate[T, ...], Any],
        payload: T,
        *,
        key: str,
        tenant: str | None = None,
        tx: Tx | AsyncConnection[Any] | None = None,
    ) -> None:
        """Start a saga from code; a worker of this app runs it.

        With `tx` (of a handler, or a psycopg connection of your own) the saga starts if and only if that transaction
        commits. Without `tx` the start is committed when this returns. A second start with the same key is a duplicate,
        or a conflict if its payload differs. `key` replaces the handler's key rule, and `tenant` its tenant rule.
        Raises BadMessage if the handler could not take the payload or the key, TypeError if the payload is not JSON,
        and ConfigurationError if it is not a saga of this app.
        """
        await self._start(handler, payload, key, tenant, tx, {})

    async def _start(
        self,
        handler: Handler[..., Any],
        payload: object,
        key: str,
        tenant: str | None,
        tx: Tx | AsyncConnection[Any] | None,
        headers: dict[str, str],
    ) -> None:
        self._check_saga(handler, "start a handler that takes Saga; for any other, publish to its source")
        settings = self._configured()
        bound = self._bind(handler, settings, Resources(()))
        message = bound.from_code(payload, key=key, tenant=tenant).arrived
        sent = tracing_of(settings).carried(headers if tenant is None else headers | {TENANT: tenant})
        outgoing = Outgoing(message.body, sent, message.message_id)
        queue = bound.own_source.partition(":")[2]
        if tx is not None:
            await enqueue_in(tx, settings.schema, queue, outgoing)
        else:
            await self._broker("postgres", settings).publish(queue, [outgoing])

    async def saga(self, handler: Handler[..., Any], *, key: str, tenant: str | None = None) -> SagaStatus | None:
        """Return a saga's state, its recovery point and its steps. None means that there is no record: the saga has not
        begun, is pruned, or its key is another one.

        For people and for tests: the state may have changed by the time this returns. Raises StoreUnavailable,
        BadMessage for an invalid key, and ConfigurationError if it is not a saga of this app.
        """
        admin, digest = self._saga_of(handler, tenant, key, "ask for its result")
        detail = await admin.look_up(digest)
        return None if detail is None else status(detail)

    async def signal(
        self,
        handler: Handler[..., Any],
        *,
        key: str,
        name: str,
        payload: object = None,
        tenant: str | None = None,
        tx: Tx | AsyncConnection[Any] | None = None,
    ) -> Signalled:
        """Send a signal to a saga, for its `saga.wait(name)`; each wait takes the oldest signal that is left.

        With `tx` (of a handler, or a psycopg connection of your own, in a READ COMMITTED transaction) the signal is
        sent if and only if that transaction commits. Without `tx` it is sent when this returns. A saga that has not
        begun gets the signal later, if it begins within the handler's `retain`. Not guaranteed: that a wait takes the
        signal before the saga ends. Raises StoreUnavailable, BadMessage for an invalid key, TypeError for a payload
        that is not JSON, and ConfigurationError if the name is invalid or the handler is not a saga of this app.
        """
        self._check_saga(handler, NAMED, "signal: ")
        key, encoded = given_key(key), codecs.encode(payload, "payload", "give")

        to = handler.plan.identity(self.name)

        def signal() -> Signal:
            return Signal(to.digest(tenant, key), to.scope(tenant), name, encoded)

        if tx is not None:
            return await send(connection_of(tx), self._configured().schema, signal())
        inline = await self._running()  # R39: before anything is hashed
        return await inline.signal(signal())

    async def cancel(
        self, handler: Handler[..., Any], *, key: str, tenant: str | None = None, undo: bool = False
    ) -> Cancellation:
        """Cancel a saga that has not ended; with `undo`, its finished steps are undone.

        Returns once the request is stored, or once it is known that the saga had ended first; never both. The saga's
        worker notices within about a second, and the saga ends FAILED with the code `cancelled`, for which `result`
        waits. A step that is in flight in a transaction gets a minute to finish. A call in flight is cut off, and its
        outcome is determined as after the loss of a worker; if that is impossible, the saga becomes a dead letter with
        the reason `unknown_effect`. A saga that is already a dead letter can be cancelled too. Raises StoreUnavailable,
        BadMessage for an invalid key, and ConfigurationError if it is not a saga of this app.
        """
        admin, digest = self._saga_of(handler, tenant, key, "only a saga can be cancelled")
        return await admin.cancel(digest, undo=undo, by=None)

    async def decide(
        self,
        handler: Handler[..., Any],
        step: str,
        answer: Done[Any] | NotDone,
        *,
        key: str,
        tenant: str | None = None,
        attempt: int | None = None,
    ) -> None:
        """Report how a call of unknown outcome ended, or its undo if the undo was begun. The saga then goes on at once,
        with all its attempts.

        `Done(result)` stores the result as the step's output, in JSON. When the saga goes on, the output is decoded by
        the annotation of the step's function; if it does not fit, the saga becomes a dead letter with the reason
        `saga_changed`. `NotDone()` lets the saga make the call again, with the same key. `attempt` is the step's number
        of attempts, as `saga` reports it: with it, the answer is refused if the call was begun again after you asked
        the remote system. Raises StoreUnavailable, BadMessage for an invalid key, TypeError for a result that is not
        JSON, and ConfigurationError if there is no such step or attempt, or if a worker is running the saga.
        """
        admin, digest = self._saga_of(handler, tenant, key, "only a saga has steps")
        await admin.decide(digest, step, answer, by=None, attempt=attempt)

    def _saga_of(self, handler: Handler[..., Any], tenant: str | None, key: str, why: str) -> tuple[SagaAdmin, bytes]:
        self._check_saga(handler, why)
        admin, key = self._admin(), given_key(key)
        return admin, handler.plan.identity(self.name).digest(tenant, key)

    def _admin(self) -> SagaAdmin:
        database, here = self._database(), self._opened.here()
        if here.sagas_admin is None:
            here.sagas_admin = SagaAdmin(*database)
        return here.sagas_admin


@dataclass(frozen=True, slots=True)
class AppStarter:
    """See `handlers.handler.Starter`."""

    app: SagaCalls

    async def start(self, handler: Any, payload: Any, *, key: str, tenant: str | None, tx: Tx, parent: bytes) -> None:
        await self.app._start(handler, payload, key, tenant, tx, {PARENT: parent.hex()})

    async def cancel(self, key: bytes, *, undo: bool) -> Cancellation:
        return await self.app._admin().cancel(key, undo=undo, by=None)
