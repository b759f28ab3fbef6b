"""A handler as the engines see it: what turns a message into a call, and how its function is run."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import (
    Any,
    Final,
    TypeAlias,
)

import msgspec

from idemconsumer.errors import BadMessage, HandlerFault
from idemconsumer.handlers.batch import Items
from idemconsumer.handlers.options import Resolved
from idemconsumer.handlers.signature import Signature
from idemconsumer.message import codecs, keys
from idemconsumer.message.message import Message, Subscription
from idemconsumer.ports.handler import Saga, Tx
from idemconsumer.ports.store import Claim
from idemconsumer.settings import Settings

_DEFAULT_MAX_BYTES = Settings().max_message_bytes
_NO_RESOURCES: Final[Mapping[type, object]] = MappingProxyType({})
TENANT: Final = "idemconsumer-tenant"  # header of a saga begun from code
OrderOf: TypeAlias = Callable[[Message, object, str], str | bytes]
FingerprintOf: TypeAlias = Callable[[Message, object], bytes | None]


@dataclass(frozen=True, slots=True, eq=False)
class HandlerPlan:
    """All that is known of a handler without its app."""

    name: str
    sources: tuple[str, ...]
    options: Resolved
    key_rule: str
    signature: Signature
    reconcile: Signature | None
    decode: codecs.Decode
    key: keys.Extract
    tenant: keys.Extract | None
    order: OrderOf
    fingerprint: FingerprintOf

    def bind(
        self,
        app: str,
        *,
        max_message_bytes: int = _DEFAULT_MAX_BYTES,
        resources: Mapping[type, object] = _NO_RESOURCES,
    ) -> BoundHandler:
        """This handler as part of `app`, whose name is part of every key. `resources` is read at each call."""
        return BoundHandler(self, app, max_message_bytes, resources)

    @property
    def resource_parameters(self) -> tuple[tuple[str, type], ...]:
        """Parameters, its own and those of its reconcile, that only resources can fill, with their types."""
        return (*self.signature.resources, *(() if self.reconcile is None else self.reconcile.resources))


@dataclass(slots=True, eq=False)
class Call:
    """One message, ready to run: decoded and keyed. `order` is what the lane is chosen by."""

    arrived: Message
    payload: object
    key: str
    tenant: str | None
    claim: Claim
    order: str | bytes

    def message(self, attempt: int) -> Message:
        """The message as a handler sees it. Made on demand, since few handlers ask for it."""
        return msgspec.structs.replace(self.arrived, key=self.key, tenant=self.tenant, attempt=attempt)


class BoundHandler:
    """A handler of an app: turns messages into calls, and runs them."""

    __slots__ = (
        "_max_bytes",
        "_plan",
        "app",
        "batch",
        "leased",
        "name",
        "needs_tx",
        "options",
        "own_source",
        "reconciles",
        "resources",
        "subscriptions",
    )  # fmt: skip

    def __init__(self, plan: HandlerPlan, app: str, max_message_bytes: int, resources: Mapping[type, object]) -> None:
        self._plan = plan
        self.resources = resources
        self.app = app
        self._max_bytes = max_message_bytes
        self.name = plan.name
        self.options = plan.options
        self.needs_tx = plan.signature.needs_tx
        self.leased = plan.signature.needs_saga
        self.batch = plan.signature.batch
        self.reconciles = plan.reconcile is not None
        group = plan.options.consumer_group or app
        self.subscriptions = tuple(Subscription(source, plan.name, group) for source in plan.sources)
        # A queue in Postgres, for messages that their own broker would soon drop and for sagas begun from code.
        self.own_source = f"postgres:~{app}/{plan.name}"

    @property
    def key_rule(self) -> str:
        """Where the key comes from, in words."""
        return self._plan.key_rule

    def call_for(self, message: Message) -> Call:
        """Decode and key a message. Raises only BadMessage; one above the size limit is not even parsed."""
        plan = self._plan
        if len(message.body) > self._max_bytes:
            raise BadMessage("oversized", f"{len(message.body):,} bytes, at most {self._max_bytes:,} are allowed")
        payload = plan.decode(message.body)
        key, tenant = self._identity(message, payload)
        claim = Claim(
            keys.digest(self.app, tenant, self.name, key),
            keys.scope_name(self.app, tenant, self.name),
            plan.fingerprint(message, payload),
            plan.options.retain,
        )
        order = plan.order(message, payload, key)
        return Call(message, payload, key, tenant, claim, order)

    def _identity(self, message: Message, payload: object) -> tuple[str, str | None]:
        plan = self._plan
        ours = message.source == self.own_source and message.message_id is not None
        key = (_message_id if ours else plan.key)(message, payload)  # begun from code, which gave the key
        if ours and (given := message.headers.get(TENANT)) is not None:
            return key, str(given)
        return key, None if plan.tenant is None else plan.tenant(message, payload)

    def run(self, call: Call, tx: Tx | Saga | None, attempt: int) -> Awaitable[object]:
        """Run the function and raise what it raises. Cancelling ends an async function at its next await; a plain
        one runs on in its thread to its end, and its result is ignored."""
        return self._invoke(self._plan.signature, call, tx, attempt)

    async def run_batch(self, items: Items, tx: Tx | None) -> None:
        """`run` for a function that takes a batch; `items` then holds what was decided about each item."""
        try:
            returned = await self._plan.signature.invoke(items, tx, items.message(0), self.resources)
        finally:
            items.close()
        if returned is not None:
            raise HandlerFault(
                f"the handler of a batch returned a {type(returned).__name__}, which belongs to no single item; "
                "give each item its own result with batch.result(i, value), and return nothing"
            )

    async def reconcile(self, call: Call, tx: Tx, attempt: int) -> object:
        """Ask whether a saga is done already. Only where `reconciles`."""
        assert self._plan.reconcile is not None
        return await self._invoke(self._plan.reconcile, call, tx, attempt)

    def _invoke(self, signature: Signature, call: Call, tx: Tx | Saga | None, attempt: int) -> Awaitable[object]:
        message = call.message(attempt) if signature.needs_message else call.arrived
        return signature.invoke(call.payload, tx, message, self.resources)


_message_id = keys.compile_key(keys.Key.message_id(), Any, handler="app.start")


def given_key(key: object) -> str:
    """A key that stands in for the handler's key rule. Raises BadMessage for a key that no rule would give."""
    if key is not None and not isinstance(key, str):
        raise BadMessage("key_invalid", f"key= is of type {type(key).__name__}, not a string")
    return _message_id(Message("", b"", message_id=key), None)
