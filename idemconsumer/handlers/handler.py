"""A handler as the engines see it: it turns a message into a call, and runs the function."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType, TracebackType
from typing import Any, Final, Protocol, TypeAlias

import msgspec

from idemconsumer.errors import BadMessage, HandlerError, HandlerFault, OfTheEngine
from idemconsumer.handlers.arguments import Saga, Tx
from idemconsumer.handlers.batch import Items
from idemconsumer.handlers.options import Resolved
from idemconsumer.handlers.signature import Signature
from idemconsumer.hashing import HASHING
from idemconsumer.message import codecs, extraction, keys
from idemconsumer.message.decoders import DecodeHook
from idemconsumer.message.delivered import held_size, size_of
from idemconsumer.message.envelopes import Unwrap
from idemconsumer.message.keys import KeySpec
from idemconsumer.message.message import Message, Subscription
from idemconsumer.message.names import StoredName
from idemconsumer.message.origin import ACCEPTED, ORIGIN, PARENT, token_of
from idemconsumer.rules.claim import Claim
from idemconsumer.settings import Settings

_DEFAULT_MAX_BYTES = Settings().max_message_bytes
_NO_RESOURCES: Final[Mapping[type, object]] = MappingProxyType({})
TENANT: Final = "idemconsumer-tenant"  # header of a message that code starts
NO_HEADERS: Final[Mapping[str, str]] = MappingProxyType({})
OURS: Final = (TENANT, ORIGIN, ACCEPTED, PARENT)  # headers that a caller of the application must not send
OrderOf: TypeAlias = Callable[[Message, object], str | bytes | None]
StrandOf: TypeAlias = Callable[[Message], Hashable | None]
# From the message as it arrived, the message inside its envelope, and the payload to `Claim.fingerprint` and
# `.canonical`.
FingerprintOf: TypeAlias = Callable[[Message, Message, object], tuple[bytes | None, bytes | None]]


class Starter(Protocol):
    """The calls by which a saga makes its app start and cancel other sagas."""

    async def start(self, handler: Any, payload: Any, *, key: str, tenant: str | None, tx: Tx, parent: bytes) -> None:
        """Start a saga with the transaction of `tx`, on behalf of the saga with the stored key `parent` (L80)."""

    async def cancel(self, key: bytes, *, undo: bool) -> object:
        """Request the cancellation of the saga with this stored key, even if no handler of this app has it any more.
        The request is committed on return, unless the saga had ended before."""


@dataclass(frozen=True, slots=True, eq=False)
class HandlerPlan:
    """All that is known of a handler without its app."""

    name: str
    sources: tuple[str, ...]
    options: Resolved
    key_spec: KeySpec
    tenant_spec: KeySpec | None
    signature: Signature
    reconcile: Signature | None
    decode: codecs.Decode | None
    takes_none: bool
    hook: DecodeHook | None
    hook_waits: bool
    strand: StrandOf
    unwrap: Unwrap | None
    key: extraction.Extract
    tenant: extraction.Extract | None
    order: OrderOf
    fingerprint: FingerprintOf
    fingerprint_spec: KeySpec | None
    unsure_paths: Sequence[str]

    def bind(
        self,
        app: str,
        *,
        max_message_bytes: int = _DEFAULT_MAX_BYTES,
        resources: Mapping[type, object] = _NO_RESOURCES,
        starter: Starter | None = None,
        delivery_log: float = 0.0,
    ) -> BoundHandler:
        """This handler as part of `app`, whose name is part of every key. `resources` is read at each call; `starter`
        is the app for sagas that start others; `delivery_log`: for how many seconds deliveries are logged."""
        return BoundHandler(self, app, max_message_bytes, resources, starter, delivery_log)

    def identity(self, app: str) -> StoredName:
        """The name under which the handler is stored as part of `app` (L68)."""
        return StoredName(app, self.name)

    def consumer_group(self, app: str) -> str:
        """The Kafka consumer group."""
        return self.options.consumer_group or app

    @property
    def resource_parameters(self) -> tuple[tuple[str, type], ...]:
        """The parameters of the handler and its reconcile that only resources can fill, with their types."""
        return (*self.signature.resources, *(() if self.reconcile is None else self.reconcile.resources))


@dataclass(slots=True, eq=False)
class Call:
    """One message, ready to run: decoded and keyed. The lane is chosen by `order`; None: the message has no order.
    `payload` is for the first run; `given` once that run has it."""

    arrived: Message
    payload: object
    key: str
    tenant: str | None
    claim: Claim
    order: str | bytes | None
    from_code: bool
    given: bool = False

    def message(self, attempt: int) -> Message:
        """The message as a handler sees it. Made on demand, since few handlers take it."""
        return msgspec.structs.replace(self.arrived, key=self.key, tenant=self.tenant, attempt=attempt)


@dataclass(slots=True, eq=False, repr=False)
class BoundHandler:
    """A handler of an app: turns messages into calls, and runs them. See `HandlerPlan.bind`."""

    plan: HandlerPlan
    app: str
    max_message_bytes: int
    resources: Mapping[type, object]
    starter: Starter | None
    delivery_log: float
    name: str = field(init=False)
    options: Resolved = field(init=False)
    needs_tx: bool = field(init=False)
    leased: bool = field(init=False)
    batch: bool = field(init=False)
    decodes: bool = field(init=False)
    reconciles: bool = field(init=False)
    identity: StoredName = field(init=False)
    subscriptions: tuple[Subscription, ...] = field(init=False)
    own_source: str = field(init=False)
    retry_source: str = field(init=False)

    def __post_init__(self) -> None:
        plan = self.plan
        if plan.signature.needs_saga and HASHING.secrets:
            raise HandlerError(
                plan.name,
                "it is a saga, and `key_secrets` is set: the SQL functions that find sagas by key have no data key",
                "remove one of them; sagas may have a schema of their own, in a process of their own",
            )
        self.name = plan.name
        self.options = plan.options
        self.needs_tx = plan.signature.needs_tx
        self.leased = plan.signature.needs_saga
        self.batch = plan.signature.batch
        self.decodes = plan.hook is not None
        self.reconciles = plan.reconcile is not None
        self.identity = plan.identity(self.app)
        group = plan.consumer_group(self.app)
        self.subscriptions = tuple(Subscription(source, plan.name, group) for source in plan.sources)
        # A queue in Postgres: for messages that their own broker would soon drop, and for sagas begun from code.
        self.own_source = self.identity.own_source
        self.retry_source = self.identity.retry_source

    def is_own(self, source: str) -> bool:
        """Whether `source` is a queue that belongs to this handler."""
        return source in (self.own_source, self.retry_source)

    @property
    def key_rule(self) -> str:
        """The rule for the key, in words."""
        return keys.describe(self.plan.key_spec)

    def from_code(
        self, payload: object, *, key: object, tenant: str | None, headers: Mapping[str, str] = NO_HEADERS
    ) -> Call:
        """The call for a payload that code gives. Raises BadMessage if the handler could not take it, and TypeError for
        a payload that is not JSON."""
        given, encoded = given_key(key), codecs.encode(payload, "payload", "give")
        headers = {name: value for name, value in headers.items() if name.lower() not in OURS}
        if tenant is not None:
            headers[TENANT] = extraction.as_text(tenant, "tenant")
        body = b"null" if encoded is None else encoded.body
        return self.call_for(Message(self.own_source, body, headers, message_id=given))

    def waits_for(self, message: Message) -> bool:
        """Whether the message must be decoded by `read`, since `decode=` is an async function."""
        return self.plan.hook_waits and not message.tombstone and not self._is_from_code(message)

    def strand(self, message: Message) -> Hashable | None:
        """The strand in which messages are dispatched in order of arrival while they are decoded. None: the message has
        no order, or needs none here, since no user function decodes it."""
        return self.plan.strand(message) if self.decodes else None

    def call_for(self, message: Message) -> Call:
        """Decode and key a message. Raises only BadMessage. A message above the size limit is not even parsed."""
        opened, from_code = self._opened(message), self._is_from_code(message)
        with _ONLY_BAD:
            return self._keyed(message, opened, self._payload(opened, from_code=from_code), from_code=from_code)

    async def read(self, message: Message) -> Call:
        """Like `call_for`, for a message that `waits_for` its decoding. Also raises whatever `decode=` raises."""
        opened = self._opened(message)
        payload = await self._decoded(opened)
        with _ONLY_BAD:
            return self._keyed(message, opened, payload, from_code=self._is_from_code(message))

    async def renew(self, call: Call) -> None:
        """Before another run, call `decode=` again: the last run may have changed its payload."""
        plan = self.plan
        if call.given and plan.hook is not None and not call.arrived.tombstone and not call.from_code:
            call.payload = (
                await self._decoded(call.arrived) if plan.hook_waits else plan.hook(call.arrived.body, call.arrived)
            )
            call.given = False

    async def _decoded(self, message: Message) -> object:
        hook: Any = self.plan.hook
        return await hook(message.body, message)

    def _is_from_code(self, message: Message) -> bool:
        return message.source == self.own_source and message.message_id is not None

    def _opened(self, message: Message) -> Message:
        """The message inside its envelope."""
        plan = self.plan
        if (size := size_of(message)) > self.max_message_bytes or message.whole is not None:
            beside = " with its headers" if held_size(message) > len(message.body) else ""
            raise BadMessage("oversized", f"{size:,} bytes{beside}, at most {self.max_message_bytes:,} are allowed")
        if plan.unwrap is None or message.tombstone or self._is_from_code(message):
            return message
        with _ONLY_BAD:
            return plan.unwrap(message)

    def _keyed(self, arrived: Message, message: Message, payload: object, *, from_code: bool) -> Call:
        plan = self.plan
        key, tenant = self._identity(message, payload, from_code=from_code)
        fingerprint, canonical = plan.fingerprint(arrived, message, payload)
        claim = Claim(
            self.identity.digest(tenant, key),
            self.identity.scope(tenant),
            fingerprint,
            plan.options.retain,
            canonical,
            token=token_of(arrived),
        )
        order = plan.order(message, payload)
        return Call(message, payload, key, tenant, claim, order, from_code)

    def payload(self, call: Call) -> object:
        """The payload for one run. A run may change its payload, so the next run gets a new one (R33): JSON is decoded
        again here; `renew` has called `decode=` again."""
        if not call.given:
            call.given = True
            return call.payload
        return self._payload(call.arrived, from_code=call.from_code)

    def _payload(self, message: Message, *, from_code: bool) -> object:
        plan = self.plan
        if not message.tombstone:
            if plan.hook is not None and not from_code:
                return plan.hook(message.body, message)
            if plan.decode is None:
                raise BadMessage("undecodable", "decode= makes its payload, so it cannot be started from code")
            return plan.decode(message.body)
        if not plan.takes_none:
            raise BadMessage("tombstone", "the record has no value, and the payload's type has no `| None`")
        return None

    def _identity(self, message: Message, payload: object, *, from_code: bool) -> tuple[str, str | None]:
        plan = self.plan
        key = (_message_id if from_code else plan.key)(message, payload)  # code has set the key
        if from_code and (given := message.headers.get(TENANT)) is not None:
            return key, str(given)
        return key, None if plan.tenant is None else plan.tenant(message, payload)

    def run(self, call: Call, tx: Tx | Saga | None, attempt: int) -> Awaitable[object]:
        """Run the function and raise what it raises. A cancellation ends an async function at its next await; a plain
        function runs on in its thread to its end, and its result is ignored."""
        return self._invoke(self.plan.signature, call, tx, attempt)

    async def run_batch(self, items: Items, tx: Tx | None) -> None:
        """Like `run`, for a function that takes a batch; `items` then holds the decision about each item."""
        try:
            returned = await self.plan.signature.invoke(items, tx, items.message(0), self.resources)
        finally:
            items.close()
        if returned is not None:
            raise HandlerFault(
                f"the handler of a batch returned a {type(returned).__name__}, which belongs to no single item; "
                "give each item its own result with batch.result(i, value), and return nothing"
            )

    async def reconcile(self, call: Call, tx: Tx, attempt: int) -> object:
        """Ask whether a saga is done already. Only if `reconciles`."""
        assert self.plan.reconcile is not None
        return await self._invoke(self.plan.reconcile, call, tx, attempt)

    def _invoke(self, signature: Signature, call: Call, tx: Tx | Saga | None, attempt: int) -> Awaitable[object]:
        message = call.message(attempt) if signature.needs_message else call.arrived
        return signature.invoke(self.payload(call), tx, message, self.resources)


class _OnlyBad:
    """A context for code that reads a message, user functions included. Whatever it raises becomes BadMessage:
    otherwise the message would end one worker after another (B18)."""

    def __enter__(self) -> None:
        return

    def __exit__(self, _: object, error: BaseException | None, __: TracebackType | None) -> None:
        if error is not None and not isinstance(error, BadMessage | OfTheEngine):
            why = f"{type(error).__name__} was raised while decoding it, or deriving its key, tenant or order"
            raise BadMessage("undecodable", why) from None


_ONLY_BAD: Final = _OnlyBad()
_message_id = extraction.compile_key(keys.Key.message_id(), Any, handler="app.start")


def given_key(key: object) -> str:
    """A key that replaces the handler's key rule. Raises BadMessage for a key that no rule would give."""
    if key is not None and not isinstance(key, str):
        raise BadMessage("key_invalid", f"key= is of type {type(key).__name__}, not a string")
    return _message_id(Message("", b"", message_id=key), None)
