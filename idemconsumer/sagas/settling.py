"""What one run of a saga's handler has asked for, why it was interrupted, and how it is closed.

A run may be completed or rejected only when all that is recorded was asked for, nothing is in flight, and each call
has a known outcome (L4, L6, L25, L26).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from idemconsumer.errors import SagaChanged, SagaMisused, SagaParked, UnknownEffect
from idemconsumer.rules import replay
from idemconsumer.rules.replay import Unasked
from idemconsumer.rules.values import StepRow, StepState
from idemconsumer.sagas.body import Body
from idemconsumer.sagas.order import Order
from idemconsumer.sagas.step import StepSpec
from idemconsumer.sagas.waits import OpenWaits


class Settling:
    """The part of a run that the engine closes it by; `SagaRun` runs the steps."""

    def __init__(
        self,
        handler: str,
        rows: Sequence[StepRow],
        order: Order,
        *,
        timeout: float,
        accepted: bool,
        superseded: bool,
    ) -> None:
        """The arguments are those of SagaRun, and the order of its steps."""
        self._rows = {row.name: row for row in rows}
        self._unasked = Unasked(rows)
        self._order = order
        self._timeout = timeout
        self._accepted = accepted
        self._superseded = superseded
        self.body = Body(handler, timeout, self.interrupt)
        self._waits = OpenWaits()
        self._in_flight: dict[str, tuple[asyncio.Task[Any], asyncio.Future[None]]] = {}
        self._unfinished: list[str] = []  # steps asked for, begun or not, that have not ended
        self._open = {row.name for row in rows if row.state is StepState.INTENT}  # calls without a known outcome
        self._ended = False  # the handler has, so that nothing new begins
        self._over = False
        self._wake = asyncio.Event()  # a step is requested, or none will be
        self.asked: dict[str, StepSpec] = {}
        self.interruption: BaseException | None = None
        self.refused = False  # its handler was, before anything had interrupted the run
        self._from: tuple[BaseException, str] | None = None  # an error, and the step that it came from

    def interrupt(self, error: BaseException, step: str | None = None) -> None:
        """End this run. The first cause is kept."""
        if self.interruption is None:
            self.interruption = error
            self._from = None if step is None else (error, step)
            self._wake.set()
            self._waits.moves()
            self._order.close()

    def step_of(self, error: BaseException) -> str | None:
        """The name of the step that `error` came from, unless its text already says so."""
        ours = isinstance(error, SagaMisused | SagaParked)
        return self._from[1] if self._from is not None and self._from[0] is error and not ours else None

    def spec_of(self, error: BaseException) -> StepSpec | None:
        """The step that `error` came from, if it came from one."""
        name: object = self._from[1] if self._from is not None and self._from[0] is error else None
        return self.asked.get(name) if isinstance(name, str) else None  # anything else was refused as a name

    async def settle(self, *, raised: bool = False) -> None:
        """Close the run once the handler has ended. Steps that it left in flight are awaited, so that their outcome is
        known (L75), and cancelled first if it `raised` an error. That it left steps, begun or not, interrupts the run,
        unless it raised one, which says more. Steps asked for from now on are refused."""
        if self._in_flight:
            if not raised:
                names = ", ".join(map(repr, self._in_flight))
                self.interrupt(SagaMisused(f"the handler ended while step {names} was in flight; await every step"))
            for task, _ in self._in_flight.values() if raised else ():
                task.cancel()
            await self._end_of_flight()
        elif self._unfinished and not raised:
            names = ", ".join(map(repr, self._unfinished))
            self.interrupt(
                SagaMisused(f"the handler ended before step {names}, which it had requested; await every step")
            )
        self._over = True
        self._order.close()
        self.body.close()

    async def siblings(self) -> None:
        """The handler is refused: let the steps still in flight finish (L7). None begins any more (L26), but
        recorded ones are still asked for, and with them their undos (L25)."""
        self.refused = self.interruption is None
        await self._end_of_flight()
        await self._await_asked(replay.asked_by_branches(self._rows.values(), None, in_branch=False))

    async def _end_of_flight(self) -> None:
        """Wait for the steps in flight, not for their tasks, which may go on for ever."""
        if self._in_flight:
            await asyncio.wait([ended for _, ended in self._in_flight.values()])

    @property
    def undoable(self) -> list[str]:
        """The steps that the handler has an undo for now."""
        return [name for name, spec in self.asked.items() if spec.has_undo]

    @property
    def asked_for_all(self) -> bool:
        """Whether the handler has asked for all that was recorded before this run."""
        return not self._unasked

    def undos_added(self) -> list[str]:
        """Those of them that were recorded before without one (L25)."""
        return [name for name in self.undoable if (row := self._rows.get(name)) is not None and not row.has_undo]

    async def check_recorded(self) -> None:
        """Let the handler ask for all that is recorded, for `patience` at most, while steps that are not recorded wait
        to be begun. None of what is recorded depends on them. Raises SagaChanged, and what has interrupted the run."""
        await self._until(lambda: not self._unasked or self.interruption is not None)
        if self.interruption is not None:
            raise self.interruption
        self._check_nothing_passed_over(at_end=True)

    def check_complete(self) -> None:
        """Before completion every recorded step must have been asked for, and every call must have a known outcome."""
        self._check_nothing_passed_over(at_end=True)
        if self._open:
            raise UnknownEffect(f"the handler has ended, and the outcome of step {min(self._open)!r} is unknown")

    def _check_nothing_passed_over(self, *, at_end: bool) -> None:
        if self._accepted:
            return
        if (row := self._unasked.passed_over(at_end=at_end)) is not None:
            raise SagaChanged(f"step {row.name!r} is recorded, and the handler no longer requests it")
        if self._superseded and self._unasked.patches:
            raise SagaChanged(f"{min(self._unasked.patches)!r} is recorded, and this handler does not know it")

    async def _await_asked(self, names: set[str]) -> None:
        await self._until(lambda: self.asked.keys() >= names or self.interruption is not None)

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Wait for what other branches do, for `timeout` at most."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._timeout):
                while not condition():
                    self._wake.clear()
                    await self._wake.wait()
