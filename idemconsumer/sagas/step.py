"""One step, as a run's handler requests it: its name, its functions, its limits, its key, and how its output is stored.

A step in a transaction and a call have a function; a wait has none, but an end (L40).
"""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from idemconsumer.errors import BadMessage, Reject, SagaChanged, SagaMisused, SignalTimeout
from idemconsumer.handlers.arguments import First
from idemconsumer.message import arguments, codecs
from idemconsumer.message.message import StoredResult
from idemconsumer.rules.backoff import Backoff
from idemconsumer.rules.replay import PATCH
from idemconsumer.rules.values import StepKind, StepRow
from idemconsumer.sagas import outputs

_LONGEST_NAME: Final = 200  # characters
_UNDO: Final = "undo:"
_RESERVED: Final = {_UNDO: "the keys of undos", PATCH: "saga.patched"}
_PREFIXES: Final = tuple(_RESERVED)
_NAMESPACE: Final = uuid.UUID("6f6a0f8e-6f0f-5d1b-9a57-3b1f0a7f7c11")
_NULL: Final = StoredResult(b"null", "application/json")


@dataclass(frozen=True, slots=True)
class StepCall:
    """The first argument of a `call` step's function; see `handlers.arguments.Step`."""

    key: uuid.UUID
    attempt: int
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class OwnLimits:
    """Limits of a single step, `timeout` in seconds (L45). None: the handler's limit applies."""

    timeout: float | None = None
    max_attempts: int | None = None
    backoff: Backoff | None = None


NONE: Final = OwnLimits()


@dataclass(slots=True, eq=False)
class StepSpec:
    """A step as this run's handler requests it, and how far this run has got with it.

    `overlapped`: another step ran at the same time, or a task other than the handler's own requested it, so that it has
    no fixed place among the others. `finished`: this run has committed its output or its refusal. `arguments`: a digest
    of its arguments (L73).
    """

    name: str
    kind: StepKind
    fn: Callable[..., Awaitable[Any]]
    args: tuple[Any, ...]
    undo: Callable[..., Awaitable[object]] | None
    reconcile: Callable[..., Awaitable[Any]] | None = None
    reconcile_undo: Callable[..., Awaitable[Any]] | None = None
    limits: OwnLimits = NONE
    args_may_differ: bool = False
    overlapped: bool = False
    finished: bool = False
    arguments: bytes | None = None

    @property
    def parts(self) -> Sequence[StepSpec]:
        """The single steps that this request consists of."""
        return (self,)

    def row(self, rows: Mapping[str, StepRow]) -> StepRow | None:
        """The record of this step, if there is one."""
        return rows.get(self.name)

    @property
    def recorded_as(self) -> str:
        """The name under which the step is recorded once it is over."""
        return self.name

    @property
    def has_undo(self) -> bool:
        return self.undo is not None

    def check_name(self) -> None:
        """Raises SagaMisused for a name that could not be stored or shown, or that is reserved, such as for undos."""
        name: object = self.name
        if not isinstance(name, str):
            raise SagaMisused(f'a step\'s name is {name!r}; write a string, such as saga.tx("ride_created", …)')
        if not name or not name.isprintable() or name != name.strip() or len(name) > _LONGEST_NAME:
            shown = repr(name if len(name) <= _LONGEST_NAME else f"{name[:40]}…")
            raise SagaMisused(f"a step's name is {shown}; write a printable string of 1 to {_LONGEST_NAME} characters")
        if not name.startswith(_PREFIXES):
            return
        for reserved, what in _RESERVED.items():
            if name.startswith(reserved) and not (reserved == PATCH and is_patch(self)):
                raise SagaMisused(
                    f"step {name!r}: names that start with {reserved!r} are reserved for {what}; "
                    f"choose another, such as {name.replace(':', '_')!r}"
                )

    def check_functions(self) -> None:
        """Refuse functions that are not async, and an output that cannot be stored, before any function has an effect
        (L69). Raises SagaMisused."""
        for function in (self.fn, self.undo, self.reconcile, self.reconcile_undo):
            if function is not None and (name := outputs.plain(function)) is not None:
                raise SagaMisused(
                    f"step {self.name!r}: {name} is not async; write async def, or annotate its return as Awaitable"
                )
        try:
            outputs.check(self.fn)
        except TypeError as error:
            raise SagaMisused(f"step {self.name!r} returns what cannot be stored: {error}") from None

    def digest_arguments(self, opaque: Iterable[object]) -> None:
        """Called before the arguments can change. `opaque`: objects that may be passed on and are not values."""
        self.arguments = None if self.args_may_differ else arguments.digest(self.args, opaque)

    def forget_arguments(self) -> None:
        """The step is finished. Only an undo needs its arguments, which may be large outputs of others (L55)."""
        if not self.has_undo:
            self.args = ()

    def encode(self, value: object) -> tuple[StoredResult | None, Any]:
        """The stored form of an output, and the value that a resume will get. Raises SagaMisused."""
        try:
            return outputs.encode(self.fn, value)
        except TypeError as error:
            raise SagaMisused(f"step {self.name!r}: {error}") from error

    def rejection(self, output: StoredResult | None) -> Reject:
        """The exception that a resume raises for a stored rejection."""
        return codecs.decode_rejection(output)

    def decode(self, output: StoredResult | None) -> Any:
        """The value of a stored output. Raises SagaChanged."""
        try:
            return outputs.decode(self.fn, output)
        except (BadMessage, TypeError) as error:
            raise SagaChanged(f"the stored output of step {self.name!r} no longer decodes: {error}") from error


@dataclass(slots=True, eq=False)
class WaitSpec(StepSpec):
    """A step that lasts until `seconds` after it was first requested, until a `signal` of this name, or until the end
    of the `child` with this stored key."""

    seconds: float = 0.0
    signal: str | None = None
    child: bytes | None = None

    @property
    def parts(self) -> Sequence[WaitSpec]:
        """The single waits."""
        return (self,)

    def rejection(self, output: StoredResult | None) -> Reject:
        return SignalTimeout(self.signal or self.name)

    def decode(self, output: StoredResult | None) -> Any:
        """The value of a signal. A signal without a payload is null, which `into` may not allow."""
        return StepSpec.decode(self, _NULL if output is None else output)


@dataclass(slots=True, eq=False)
class FirstSpec(WaitSpec):
    """Lasts until the first of several waits is over (L74), which then is `over`. It is named after one of them."""

    waits: Mapping[str, WaitSpec] = field(default_factory=dict)
    over: WaitSpec | None = None

    @property
    def parts(self) -> Sequence[WaitSpec]:
        return tuple(self.waits.values())

    @property
    def recorded_as(self) -> str:
        return self.name if self.over is None else self.over.name

    def row(self, rows: Mapping[str, StepRow]) -> StepRow | None:
        recorded = [(row, each) for each in self.parts if (row := rows.get(each.name)) is not None]
        ended = [(row, each) for row, each in recorded if row.position is not None]
        if ended:
            row, self.over = min(ended, key=lambda pair: pair[0].position or 0)
            return row
        return recorded[0][0] if recorded else None

    def rejection(self, output: StoredResult | None) -> Reject:
        assert self.over is not None
        return self.over.rejection(output)

    def decode(self, output: StoredResult | None) -> Any:
        which = next(which for which, each in self.waits.items() if each is self.over)
        assert self.over is not None
        return First(which, self.over.decode(output))


async def no_patch() -> bool:
    """Stands for the function in the record of a decision at a patch (L30)."""
    raise AssertionError("it is recorded, and never run")


def is_patch(spec: StepSpec) -> bool:
    return spec.fn is no_patch


def step_key(scope: str, key: bytes, name: str, *, undo: bool = False) -> uuid.UUID:
    """The key that the remote system gets: the same for every attempt of a step, and a different one for its undo."""
    return uuid.uuid5(_NAMESPACE, f"{len(scope)}:{scope}:{key.hex()}:{_UNDO if undo else ''}{name}")
