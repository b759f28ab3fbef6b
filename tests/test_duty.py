"""What goes on in the background goes on, whatever fails, and ends when it is to."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from idemconsumer.duty import Duty
from idemconsumer.errors import StoreUnavailable
from idemconsumer.rules.session_pause import SOON
from tests.support.waiting import PATIENCE, until

NEVER = 10_000.0  # seconds


class Acts:
    """An act that fails as it is told, and notes what it and its duty have said."""

    def __init__(self, *errors: BaseException | None, returns: float | None = None) -> None:
        self.said: list[str] = []
        self.count = 0
        self._errors = list(errors)
        self._returns = returns

    async def __call__(self) -> float | None:
        self.count += 1
        if self._errors and (error := self._errors.pop(0)) is not None:
            raise error
        return self._returns

    def failed(self, error: BaseException) -> None:
        self.said.append(f"failed: {error}")

    def works(self) -> None:
        self.said.append("works")


@asynccontextmanager
async def going_on(duty: Duty) -> AsyncIterator[asyncio.Task[None]]:
    async with asyncio.timeout(PATIENCE):
        task = asyncio.create_task(duty.run())
        try:
            yield task
        finally:
            task.cancel()
            with suppress(BaseException):
                await task


async def test_it_is_done_again_after_its_pause_or_once_it_is_woken() -> None:
    often, seldom = Acts(), Acts()
    async with going_on(Duty(often, 0.0)):
        await until(lambda: often.count >= 3)
    duty = Duty(seldom, NEVER)
    async with going_on(duty):
        await until(lambda: seldom.count == 1)
        duty.wake()
        await until(lambda: seldom.count == 2)


async def test_it_ends_when_nothing_is_left_and_an_act_says_when_it_is_due_again() -> None:
    nothing, due = Acts(), Acts(returns=NEVER)
    async with asyncio.timeout(PATIENCE):
        await Duty(nothing).run()
    assert nothing.count == 1
    async with going_on(Duty(due, 0.0)) as task:
        await until(lambda: due.count == 1)
        for _ in range(10):
            await asyncio.sleep(0)
        assert (due.count, task.done()) == (1, False)


async def test_what_was_woken_while_it_acts_is_done_again() -> None:
    acts = 0

    async def act() -> None:
        nonlocal acts
        acts += 1
        if acts == 1:
            duty.wake()

    duty = Duty(act, NEVER)
    async with going_on(duty):
        await until(lambda: acts == 2)


async def test_failures_are_said_once_in_a_row_and_once_that_it_works() -> None:
    act = Acts(ValueError("a"), ValueError("b"), None, None, ValueError("c"))
    async with going_on(Duty(act, 0.0, again=lambda _: 0.0, failed=act.failed, works=act.works)):
        await until(lambda: act.count >= 7)
    assert act.said == ["failed: a", "works", "failed: c", "works"]


async def test_where_a_return_proves_nothing_only_what_the_act_says_does() -> None:
    act = Acts(ValueError("a"), None, None)
    duty = Duty(act, 0.0, again=lambda _: 0.0, failed=act.failed, works=act.works, proves=False)
    async with going_on(duty):
        await until(lambda: act.count >= 4)
        assert act.said == ["failed: a"]
        duty.worked()
        assert act.said == ["failed: a", "works"]


async def test_what_proves_nothing_leaves_the_pause_of_its_failures() -> None:
    pauses = [0.0, NEVER]
    act = Acts(ValueError("a"), None)
    async with going_on(Duty(act, 0.0, again=lambda _: pauses.pop(0), failed=act.failed, proves=False)):
        await until(lambda: pauses == [])
        for _ in range(10):
            await asyncio.sleep(0)
        assert act.count == 2


async def test_quiet_failures_are_counted_in_a_row() -> None:
    counted: list[int] = []

    def again(so_many: int) -> float:
        counted.append(so_many)
        return 0.0

    away = StoreUnavailable("away")
    act = Acts(away, away, None, away)
    async with going_on(Duty(act, 0.0, again=again, failed=act.failed, quiet=lambda error: error is away)):
        await until(lambda: act.count >= 5)
    assert (counted, act.said) == ([1, 2, 1], [])


async def test_while_it_fails_its_pauses_are_its_own_and_no_wake_shortens_them() -> None:
    failures: list[int] = []

    def again(so_many: int) -> float:
        failures.append(so_many)
        return 0.0 if so_many < 3 else NEVER

    act = Acts(*[ValueError("a")] * 5)
    duty = Duty(act, 0.0, again=again, failed=act.failed)
    async with going_on(duty) as task:
        await until(lambda: failures == [1, 2, 3])
        duty.wake()
        for _ in range(10):
            await asyncio.sleep(0)
        assert act.count == 3
        duty.stop()
        await task  # and it is not tried once more
    assert act.count == 3


async def test_quiet_failures_are_never_said_and_tried_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    real = asyncio.timeout

    def timeout(seconds: float) -> asyncio.Timeout:
        pauses.append(seconds)
        return real(0)

    act = Acts(*[StoreUnavailable("away")] * 5, None)
    quiet: Callable[[BaseException], bool] = lambda error: isinstance(error, StoreUnavailable)  # noqa: E731
    duty = Duty(act, NEVER, again=lambda so_many: 2.0**so_many, failed=act.failed, works=act.works, quiet=quiet)
    with monkeypatch.context() as patch:
        patch.setattr(asyncio, "timeout", timeout)
        task = asyncio.create_task(duty.run())
        while act.count < 6:
            await asyncio.sleep(0)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
    assert pauses[1:6] == [SOON] * 5
    assert act.said == []


async def test_after_quiet_failures_a_return_that_proves_nothing_can_be_woken_again() -> None:
    act = Acts(StoreUnavailable("away"), None, None)
    duty = Duty(act, NEVER, again=lambda _: 0.0, failed=act.failed, quiet=lambda _: True, proves=False)
    async with going_on(duty):
        await until(lambda: act.count == 2)
        duty.wake()
        await until(lambda: act.count == 3)


async def test_one_that_is_stopped_acts_once_more() -> None:
    act = Acts()
    duty = Duty(act, NEVER)
    async with going_on(duty) as task:
        await until(lambda: act.count == 1)
        duty.stop()
        await task
    assert act.count == 2


async def test_one_that_is_stopped_behind_a_quiet_failure_looks_once_more() -> None:
    act = Acts(StoreUnavailable("away"), None)
    duty = Duty(act, NEVER, again=lambda _: NEVER, failed=act.failed, quiet=lambda _: True)
    async with going_on(duty) as task:
        await until(lambda: act.count == 1)
        duty.wake()
        duty.stop()
        await task
    assert act.count == 2


async def test_without_somebody_to_tell_an_error_ends_it() -> None:
    with pytest.raises(ValueError, match="a"):
        await Duty(Acts(ValueError("a")), 0.0).run()


async def test_a_cancellation_that_is_only_a_librarys_is_a_failure() -> None:
    act = Acts(asyncio.CancelledError("its own"), None)
    async with going_on(Duty(act, 0.0, again=lambda _: 0.0, failed=act.failed, works=act.works)):
        await until(lambda: act.count >= 2)
    assert act.said == ["failed: its own", "works"]


@pytest.mark.parametrize("swallows", [False, True])
async def test_a_cancellation_ends_it_also_one_that_its_act_swallows(swallows: bool) -> None:
    began = asyncio.Event()

    async def act() -> None:
        began.set()
        with suppress(*[asyncio.CancelledError] * swallows):
            await asyncio.Event().wait()

    failed: list[Any] = []
    duty = Duty(act, 0.0, again=lambda _: 0.0, failed=failed.append)
    async with asyncio.timeout(PATIENCE):
        task = asyncio.create_task(duty.run())
        await began.wait()
        task.cancel()
        await asyncio.wait({task})
    assert (task.cancelled(), failed) == (not swallows, [])


async def test_it_runs_in_one_task_is_cut_off_or_finished_and_starts_again() -> None:
    inside, most = 0, 0

    async def act() -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        try:
            await asyncio.Event().wait()
        finally:
            inside -= 1

    async def inside_is(wanted: int) -> None:
        await until(lambda: inside == wanted)

    duty = Duty(act, math.inf)
    steps: list[Callable[[], Awaitable[None]]] = [duty.close, lambda: inside_is(0)]
    async with asyncio.timeout(PATIENCE):
        for _ in range(2):
            duty.start()
            duty.start()
            await inside_is(1)
            for step in steps:
                await step()
        assert most == 1
        done = Acts()
        other = Duty(done, NEVER)
        other.start()
        await until(lambda: done.count == 1)
        await other.finish()
    assert done.count == 2
