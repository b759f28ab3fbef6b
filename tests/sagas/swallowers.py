"""Handlers of a saga that do not let the exception of a step pass, each in another way."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from idemconsumer import Reject, Saga, Tx
from tests.support.sagas import put


class Boom(Exception):
    """What a step of these tests fails with."""


async def explode(tx: Tx) -> None:
    await put(tx, "exploded")
    raise Boom


async def hang(tx: Tx) -> None:
    await put(tx, "hung")
    await asyncio.Event().wait()


async def except_base_exception(saga: Saga) -> None:
    try:
        await saga.tx("s", explode)
    except BaseException as error:
        del error


async def return_in_finally(saga: Saga) -> str:
    try:
        await saga.tx("s", explode)
    finally:
        return "fine"  # noqa: B012 - the mistake under test


async def gather_return_exceptions(saga: Saga) -> None:
    await asyncio.gather(saga.tx("s", explode), return_exceptions=True)


async def asyncio_wait(saga: Saga) -> None:
    await asyncio.wait([asyncio.create_task(saga.tx("s", explode))])


async def timeout_around_a_step(saga: Saga) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(0.05):
            await saga.tx("s", hang)


async def wait_for_around_a_step(saga: Saga) -> None:
    with suppress(TimeoutError):
        await asyncio.wait_for(saga.tx("s", hang), 0.05)


async def task_group(saga: Saga) -> None:
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(saga.tx("s", explode))
    except BaseException:
        pass


async def a_forgotten_task(saga: Saga) -> None:
    begun = asyncio.Event()

    async def hung(tx: Tx) -> None:
        begun.set()
        await hang(tx)

    a_forgotten_task.task = asyncio.create_task(saga.tx("s", hung, timeout="0.3s"))  # type: ignore[attr-defined]
    await begun.wait()


async def a_task_forgotten_before_it_began(saga: Saga) -> None:
    a_forgotten_task.task = asyncio.create_task(saga.tx("s", put, "late"))  # type: ignore[attr-defined]


async def a_step_that_nobody_awaits(saga: Saga) -> None:
    _ = saga.tx("s", put, "never")


async def a_cancelled_step(saga: Saga) -> None:
    begun = asyncio.Event()

    async def hung(tx: Tx) -> None:
        begun.set()
        await hang(tx)

    task = asyncio.create_task(saga.tx("s", hung, timeout="0.3s"))
    await begun.wait()
    task.cancel()
    await asyncio.wait([task])


async def a_step_cancelled_before_it_began(saga: Saga) -> None:
    task = asyncio.create_task(saga.tx("s", put, "cancelled"))
    task.cancel()
    await asyncio.wait([task])


async def a_swallowed_exception_turned_into_a_reject(saga: Saga) -> None:
    try:
        await saga.tx("s", explode)
    except BaseException:
        raise Reject("gave_up") from None


async def steps_after_a_swallowed_exception(saga: Saga) -> None:
    for name in ("s", "next"):
        with suppress(BaseException):
            await saga.tx(name, explode if name == "s" else hang)


Swallower = Callable[[Saga], Awaitable[object]]
SWALLOWERS: list[Swallower] = [
    except_base_exception,
    return_in_finally,
    gather_return_exceptions,
    asyncio_wait,
    timeout_around_a_step,
    wait_for_around_a_step,
    task_group,
    a_forgotten_task,
    a_task_forgotten_before_it_began,
    a_step_that_nobody_awaits,
    a_cancelled_step,
    a_step_cancelled_before_it_began,
    a_swallowed_exception_turned_into_a_reject,
    steps_after_a_swallowed_exception,
]
