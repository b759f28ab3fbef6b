"""Compares the recorded steps of a saga with those that its handler requests in this run (L6, L73).

A handler that requests other steps than the recorded ones, or the same steps with other arguments, is not the handler
that recorded them. Nothing here awaits.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Final

from idemconsumer.errors import SagaChanged, SagaMisused, UnknownEffect
from idemconsumer.message import arguments
from idemconsumer.rules import replay
from idemconsumer.rules.replay import Unasked
from idemconsumer.rules.values import StepRow, StepState
from idemconsumer.sagas import outputs
from idemconsumer.sagas.step import StepSpec

_MOST_NAMES: Final = 50  # names listed in the error of a dead letter


class Comparison:
    """The comparison in one run. `asked`: the requested steps, by name; `rows`: the recorded ones; `open`: the names of
    calls with an unknown outcome."""

    def __init__(
        self, rows: Sequence[StepRow], opaque: Collection[object], *, accepted: bool, superseded: bool
    ) -> None:
        """`opaque`: objects that a handler may pass to steps and that are not values: a replay has other ones.
        `accepted`: a person has allowed the saga to continue with a handler that requests other steps. `superseded`: a
        worker of another build may run the saga, and may know patches that this one does not."""
        self.rows = {row.name: row for row in rows}
        self.asked: dict[str, StepSpec] = {}
        self.unasked = Unasked(rows)
        self.open = {row.name for row in rows if row.state is StepState.INTENT}
        self.accepted = accepted
        self._superseded = superseded
        self._opaque = opaque

    def ask(self, spec: StepSpec, inside: str | None) -> None:
        """The handler requests this step, for the first time in this run. `inside`: the step whose function requests
        it. Raises SagaMisused, and SagaChanged for another kind of step under its name, or for other arguments."""
        spec.check_name()
        name = spec.name
        if name in self.asked:
            raise SagaMisused(
                f"step {name!r} is requested twice in one run, and a step is identified by its name; "
                'give each one its own, in a loop with a suffix: saga.tx(f"line_{n}", …)'
            )
        if inside is not None:
            raise SagaMisused(
                f"step {name!r} is requested inside step {inside!r}; a step's function takes no steps, so call them "
                "one after another in the handler"
            )
        self.unasked.ask(name)
        self.compare(spec)

    def compare(self, spec: StepSpec) -> None:
        """Like `ask`, for a step that is not requested by the handler now."""
        name = spec.name
        self.asked[name] = spec
        spec.digest_arguments(self._opaque)
        if (row := self.rows.get(name)) is None:
            return
        if row.kind is not spec.kind:
            raise SagaChanged(
                f"step {name!r} was recorded as {row.kind.name.lower()}, and is now {spec.kind.name.lower()}"
            )
        other = replay.other_argument(row.arguments, spec.arguments, arguments.SIZE)
        if other is None or self.accepted:
            return
        its = f"{outputs.parameter(spec.fn, other + 1)} (its argument {other + 1})"
        elsewhere = [each.name for each in self.rows.values() if each.arguments and each.arguments == spec.arguments]
        hint = f"; its present arguments were recorded for step {elsewhere[0]!r}" if elsewhere else ""
        raise SagaChanged(
            f"step {name!r} was recorded with another {its}{hint}. A handler that runs again must request the same "
            "steps with the same arguments: sort unordered values such as sets; take times and random numbers from a "
            "step's output; or write args_may_differ=True"
        )

    def forget(self, specs: Iterable[StepSpec]) -> None:
        """These steps have not begun. Those without a record count as not requested. The recorded ones stay, since the
        outcomes of calls among them may have to be determined (L50)."""
        for each in specs:
            if each.name not in self.rows:
                del self.asked[each.name]

    @property
    def undoable(self) -> list[str]:
        """The requested steps for which the handler has an undo now."""
        return [name for name, spec in self.asked.items() if spec.has_undo]

    def undos_added(self) -> list[str]:
        """The `undoable` steps that were recorded without an undo (L25)."""
        return [name for name in self.undoable if (row := self.rows.get(name)) is not None and not row.has_undo]

    def check_complete(self) -> None:
        """Before completion: every recorded step must have been requested, and every call must have a known outcome.
        Raises SagaChanged and UnknownEffect."""
        self.check_nothing_passed_over(at_end=True)
        if self.open:
            raise UnknownEffect(f"the handler has ended, and the outcome of step {min(self.open)!r} is unknown")

    def check_nothing_passed_over(self, *, at_end: bool) -> None:
        """Raises SagaChanged if the handler should have requested a recorded step by now."""
        if self.accepted:
            return
        if (row := self.unasked.passed_over(at_end=at_end)) is not None:
            raise SagaChanged(f"step {row.name!r} is recorded, and the handler no longer requests it")
        if self._superseded and self.unasked.patches:
            raise SagaChanged(f"{min(self.unasked.patches)!r} is recorded, and this handler does not know it")


def both_lists(rows: Iterable[StepRow], asked: Iterable[str] | None) -> str:
    """The recorded steps, and those that the handler has requested, as text. None: the handler did not run."""
    asked_for = "nothing, it did not run" if asked is None else _names(list(asked))
    return f"recorded: {_names([row.name for row in rows])}; requested: {asked_for}"


def _names(steps: Sequence[str]) -> str:
    more = f" and {len(steps) - _MOST_NAMES} more" if len(steps) > _MOST_NAMES else ""
    return (", ".join(steps[:_MOST_NAMES]) or "no step") + more
