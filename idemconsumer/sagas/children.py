"""Steps by which a saga starts other sagas, waits for their ends, and stops them when it is undone (L47 to L49)."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, get_args

import msgspec

from idemconsumer.errors import SIGNAL_TIMEOUT, OfTheEngine, Reject, SagaChanged, SagaMisused, SignalTimeout
from idemconsumer.handlers.arguments import Child, Duration, OnExisting, Tx
from idemconsumer.handlers.decorator import Handler
from idemconsumer.handlers.durations import MAX_DURATION, parse_duration
from idemconsumer.handlers.handler import BoundHandler, Starter
from idemconsumer.message import arguments, codecs, keys
from idemconsumer.message.message import StoredResult
from idemconsumer.rules.saga import CHILD, CONFLICT, EXISTS
from idemconsumer.rules.values import State, StepKind
from idemconsumer.rules.verdicts import Verdict
from idemconsumer.sagas.step import StepSpec, WaitSpec, step_key
from idemconsumer.stores.leased_saga import Kinship, LeasedSaga
from idemconsumer.stores.leases import PostgresLeases
from idemconsumer.stores.open_steps import PostgresStep


class ChildRuns(OfTheEngine):
    """An undo cannot go on until this child has ended."""

    def __init__(self, child: bytes) -> None:
        super().__init__(child.hex())
        self.child = child


class _Stored(msgspec.Struct):
    key: str
    tenant: str | None
    id: str


@dataclass(slots=True, eq=False, kw_only=True)
class StartSpec(StepSpec):
    """A step in a transaction that starts another saga: the `child`, whose handler is `bound`. `joins`: an existing
    saga with that key counts as the child. `owner`: the saga for which the child was begun; another saga than this one
    if that one's start came first (L80)."""

    child: Child[Any]
    bound: BoundHandler
    starter: Starter
    joins: bool
    owner: bytes = b""

    async def begin(self, opened: PostgresStep) -> None:
        """Claim the child, before the step's function runs. Raises BadMessage for a payload that the handler does not
        take, SagaMisused if this saga would wait for itself, and Reject if the child's key has begun with another
        payload, or exists and must not be joined."""
        child = self.child
        its = self.bound.from_code(self.args[0], key=child.key, tenant=child.tenant).claim
        if its.key.hex() != child.id:
            raise SagaMisused(
                f"step {self.name!r}: {self.bound.name!r} takes its tenant from its payload, and this saga has none; "
                "start it from a saga that has a tenant, or with app.start in a step"
            )
        check_circle(self.name, child.id, await opened.kinship(its.key))
        begun = await opened.start_child(its, None if self.joins else self._queued(child))
        for each in begun.found:
            if its.judge(each) is Verdict.CONFLICT:
                raise Reject(CONFLICT, {"child": its.key.hex()})
        if not self.joins and not begun.is_new:
            raise Reject(EXISTS, {"child": its.key.hex()})
        self.owner = begun.owner

    def _queued(self, child: Child[Any]) -> tuple[str, str]:
        """Queue and key of the message that begins the child."""
        return self.bound.own_source.partition(":")[2], child.key

    def digest_arguments(self, opaque: Iterable[object]) -> None:
        self.arguments = arguments.digest((*self.args, self.child.key))

    def encode(self, value: object) -> tuple[StoredResult | None, Any]:
        assert isinstance(value, Child)
        return codecs.encode(_Stored(value.key, value.tenant, value.id)), value

    def decode(self, output: StoredResult | None) -> Any:
        try:
            stored = msgspec.json.decode(b"" if output is None else output.body, type=_Stored)
        except msgspec.MsgspecError:
            raise SagaChanged(f"step {self.name!r} was recorded as something else than the start of a saga") from None
        return Child(self.child.handler, stored.key, stored.tenant, stored.id)

    async def stop(self, store: PostgresLeases, saga: LeasedSaga, child: Child[Any]) -> StartSpec:
        """Stop the child if this saga has begun it (L80), and return the step with the undo that is left once the child
        has ended (L49). Raises ChildRuns."""
        key = bytes.fromhex(child.id)
        stopping = key, self.bound.identity.scope(child.tenant), self._queued(child)
        ended = await store.stop_child(saga, *stopping)
        if ended is State.PROCESSING:
            check_circle(self.name, child.id, await store.kinship(saga.key, key))
            await self.starter.cancel(key, undo=True)
            ended = await store.stop_child(saga, *stopping)
        if ended is State.PROCESSING:
            raise ChildRuns(key)
        return self if ended is State.COMPLETED else replace(self, undo=_nothing)


@dataclass(slots=True, eq=False)
class ResultSpec(WaitSpec):
    """A wait for the end of a child."""

    def rejection(self, output: StoredResult | None) -> Reject:
        rejected = codecs.decode_rejection(output)
        if rejected.code == SIGNAL_TIMEOUT and rejected.body == {"signal": self.signal}:  # else the child's own
            return SignalTimeout(str(self.signal))
        return rejected


@dataclass(frozen=True, slots=True)
class Children:
    """Makes the steps by which one saga starts children."""

    app: str
    starter: Starter | None
    saga: LeasedSaga

    def start(
        self, name: str, handler: object, payload: object, key: str | None, undo: Any, on_existing: OnExisting
    ) -> StartSpec:
        """The step that starts a child. Raises SagaMisused."""
        starter, saga = self.starter, self.saga
        if on_existing not in get_args(OnExisting):
            raise SagaMisused(f'step {name!r}: on_existing is {on_existing!r}; write "join" or "reject"')
        if not isinstance(handler, Handler) or starter is None:
            shown = getattr(handler, "__name__", repr(handler))
            raise SagaMisused(
                f"step {name!r} starts {shown}, which is not a saga of an app; name a handler of the same app that "
                "takes Saga"
            )
        tenant = keys.tenant_of(saga.scope)
        given = str(step_key(saga.scope, saga.key, name)) if key is None else key
        bound = handler.plan.bind(self.app)
        child = Child(handler, given, tenant, bound.identity.digest(tenant, str(given)).hex())

        async def begin(tx: Tx, payload: object) -> Any:
            await starter.start(handler, payload, key=given, tenant=tenant, tx=tx, parent=spec.owner)
            return child

        spec = StartSpec(
            name, StepKind.TX, begin, (payload,), undo, child=child, bound=bound, starter=starter,
            joins=on_existing == "join",
        )  # fmt: skip
        return spec


def result(name: str, child: Child[Any], timeout: Duration | None) -> ResultSpec:
    """The step that waits for a child. Raises SagaMisused, and ConfigurationError for an invalid duration."""
    given: object = child
    if not isinstance(given, Child):
        raise SagaMisused(f"step {name!r} waits for {given!r:.60}; pass it what saga.start returned")
    seconds = MAX_DURATION if timeout is None else parse_duration(timeout)
    returns = inspect.unwrap(child.handler)
    return ResultSpec(
        name, StepKind.WAIT, returns, (), None, seconds=seconds, signal=CHILD + child.id,
        child=bytes.fromhex(child.id),
    )  # fmt: skip


async def _nothing(tx: Tx, child: object, payload: object) -> None:
    return


def check_circle(name: str, child: str, its: Kinship) -> None:
    """Refuse a wait of two sagas for each other, which neither would notice (L65). Raises SagaMisused."""
    if its.above:
        raise SagaMisused(
            f"step {name!r}: saga {child[:12]} is this saga, or started it and has not ended, so each would wait for "
            "the other; give the child another key"
        )


def check_result(spec: ResultSpec, its: Kinship) -> None:
    """Raises SagaMisused for a wait that would never end."""
    assert spec.child is not None
    check_circle(spec.name, spec.child.hex(), its)
    if not its.started:
        raise SagaMisused(
            f"step {spec.name!r} waits for saga {spec.child.hex()[:12]}, which this saga has not started, so the wait "
            "would never end; pass it what saga.start returned in this saga"
        )
