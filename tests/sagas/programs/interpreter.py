"""The handler that runs a random program. It notes what it is given, so that its replays can be compared."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Collection, Coroutine
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Protocol, Unpack
from uuid import UUID

from idemconsumer import App, Child, Handler, Reject, Retry, Saga, Step, Tx
from idemconsumer.handlers.options import Options
from tests.sagas.programs.source import Program
from tests.support.inside import is_interrupted, token_of

QUEUE = "programs"
Branch = Coroutine[Any, Any, None]
Way = Callable[[list[Branch]], Awaitable[None]]
_numbers = count()


class CardDeclined(Reject):
    """What a step is refused with."""


@dataclass
class Seen:
    """What one run saw. `given`: the steps in the order in which the handler got what they return or raise; `done`:
    what its branches have put into a list."""

    token: int  # under which it ran
    number: int  # of the runs of its process
    given: list[str] = field(default_factory=list)
    done: list[str] = field(default_factory=list)

    def got(self, name: str, entry: str | None) -> None:
        self.given.append(name)
        if entry is not None:
            self.done.append(entry)


class World(Protocol):
    """What a saga acts on, and what outlives its runs."""

    async def note(self, key: UUID, name: str) -> None:
        """The remote was called."""
        ...

    async def first_time(self, name: str) -> bool: ...

    def begins(self, saga: str, seen: Seen) -> None:
        """A run, which has seen nothing yet."""
        ...

    def got(self, saga: str, seen: Seen, name: str, entry: str | None) -> None:
        """That run has been given this."""
        ...


class Run:
    def __init__(self, world: World, ride: Handler[..., Any], order: dict[str, Any], saga: Saga) -> None:
        self._world, self._ride, self._saga = world, ride, saga
        self._key = self.id = str(order["id"])
        self._chosen = random.Random()
        self.seen = Seen(token_of(saga), next(_numbers))
        world.begins(self._key, self.seen)

    async def sequence(self, program: Program) -> None:
        for kind, *its in program:
            await getattr(self, kind)(*its)

    def _got(self, name: str, entry: str | None = None) -> None:
        if is_interrupted(self._saga):
            return
        self.seen.got(name, entry)
        self._world.got(self._key, self.seen, name, entry)

    # ----------------------------------------------------------------------------------------------------- what it does
    async def _pause(self) -> None:
        await asyncio.sleep(self._chosen.choice([0, 0, 0.0005, 0.002, 0.004]))

    async def _put(self, tx: Tx, entry: str) -> str:
        await self._pause()
        await tx.execute("insert into effect (name) values (%s)", (f"{self.id}/{entry}",))
        await self._pause()
        return entry

    async def _take_back(self, tx: Tx, output: str, entry: str) -> None:
        await tx.execute("insert into effect (name) values (%s)", (f"undo {self.id}/{output}",))

    async def _charge(self, step: Step, entry: str) -> str:
        await self._pause()
        await self._world.note(step.key, f"{self.id}/{entry}")
        await self._pause()
        return entry

    async def _refund(self, step: Step, output: str, entry: str) -> None:
        await self._world.note(step.key, f"undo {self.id}/{output}")

    def _step(self, kind: str, name: str, entry: str, undo: bool) -> Awaitable[str]:
        if kind == "tx":
            return self._saga.tx(name, self._put, entry, undo=self._take_back if undo else None)
        return self._saga.call(name, self._charge, entry, undo=self._refund if undo else None)

    async def tx(self, name: str, undo: bool) -> None:
        self._got(name, await self._step("tx", name, name, undo))

    async def call(self, name: str, undo: bool) -> None:
        self._got(name, await self._step("call", name, name, undo))

    async def refuse(self, name: str, kind: str, caught: bool) -> None:
        async def refuse(given: Any, entry: str) -> str:
            await self._pause()
            raise CardDeclined(entry)

        try:
            await (self._saga.tx if kind == "tx" else self._saga.call)(name, refuse, name)
        except CardDeclined as refused:
            self._got(name, f"{refused.code} refused")
            if not caught:
                raise

    async def flaky(self, name: str, kind: str, how: str) -> None:
        async def fail() -> None:
            if await self._world.first_time(f"{self.id}/{name}"):
                await self._pause()
                raise Retry("1ms") if how == "retry" else ValueError("once")

        async def put(tx: Tx, entry: str) -> str:
            await fail()
            return await self._put(tx, entry)

        async def charge(step: Step, entry: str) -> str:
            await fail()
            return await self._charge(step, entry)

        if kind == "tx":
            self._got(name, await self._saga.tx(name, put, name))
        else:
            self._got(name, await self._saga.call(name, charge, name))

    async def sleep(self, name: str) -> None:
        await self._saga.sleep(name, "3ms")
        self._got(name)

    async def wait(self, name: str, sent: bool) -> None:
        try:
            entry = await self._saga.wait(name, into=str, timeout="1h" if sent else "3ms")
        except Reject:
            entry = f"{name} never"
        self._got(name, entry)

    async def first(self, name: str, sent: str) -> None:
        saga = self._saga
        which, _ = await saga.first(
            a=saga.wait(f"{name}_a"), b=saga.wait(f"{name}_b"), c=saga.sleep(f"{name}_c", "1h" if sent else "3ms")
        )
        self._got(f"{name}_{which}", name)

    async def child(self, name: str, drives: bool, undo: bool) -> None:
        async def compensate(tx: Tx, child: Child[Any], payload: dict[str, Any]) -> None:
            await tx.execute("insert into effect (name) values (%s)", (f"undo {self.id}/{name}",))

        payload = {"id": f"{self.id}.{name}", "name": name, "of": self.id, "drives": drives}
        child = await self._saga.start(name, self._ride, payload, undo=compensate if undo else None)
        self._got(name)
        try:
            entry = await self._saga.result(f"{name}_done", child)
        except Reject as refused:
            entry = f"{name} {refused.code}"
        self._got(f"{name}_done", entry)

    async def items(self, name: str, items: list[str]) -> None:
        for item in sorted(set(items)):
            await self.tx(f"{name}_{item}", False)

    async def turns(self, turns: int) -> None:
        for _ in range(turns):
            await asyncio.sleep(0)

    async def patched(self, name: str) -> None:
        if await self._saga.patched(name):
            await self.tx(f"{name}_new", True)

    async def reject(self) -> None:
        raise Reject("rejected")

    async def loop(self, name: str, kind: str, undo: bool) -> None:
        """Over what is in the list by now."""
        for place, entry in enumerate(list(self.seen.done)):
            await self._step(kind, f"{name}_{place}", f"{name}:{entry}", undo)
            self._got(f"{name}_{place}")

    # --------------------------------------------------------------------------------------------------------- branches
    async def _ways(
        self, way: Callable[[list[Branch]], Awaitable[None]], branches: list[Program], caught: bool
    ) -> None:
        try:
            await way([self.sequence(branch) for branch in branches])
        except Reject:
            if not caught:
                raise
        except ExceptionGroup as group:
            rejects, others = group.split(Reject)
            if others is not None or rejects is None:
                raise
            if not caught:
                raise _first(rejects) from None

    async def all(self, branches: list[Program], caught: bool, limit: int) -> None:
        async def way(each: list[Branch]) -> None:
            await self._saga.all(each, limit=limit)

        await self._ways(way, branches, caught)

    async def gather(self, branches: list[Program], caught: bool, limit: int) -> None:
        async def way(each: list[Branch]) -> None:
            _raise_first(await asyncio.gather(*each, return_exceptions=True))

        await self._ways(way, branches, caught)

    async def group(self, branches: list[Program], caught: bool, limit: int) -> None:
        async def way(each: list[Branch]) -> None:
            async with asyncio.TaskGroup() as group:
                for branch in each:
                    group.create_task(branch)

        await self._ways(way, branches, caught)

    async def as_completed(self, branches: list[Program], caught: bool, limit: int) -> None:
        async def way(each: list[Branch]) -> None:
            errors, tasks = list[BaseException | None](), [asyncio.create_task(branch) for branch in each]
            try:
                for ended in asyncio.as_completed(tasks):
                    try:
                        await ended
                    except Exception as error:  # raised when the others have ended
                        errors.append(error)
            finally:
                await _end(tasks)
            _raise_first(errors)

        await self._ways(way, branches, caught)

    async def first_completed(self, branches: list[Program], caught: bool, limit: int) -> None:
        async def way(each: list[Branch]) -> None:
            tasks, errors = {asyncio.create_task(branch) for branch in each}, list[BaseException | None]()
            try:
                while tasks:
                    ended, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                    errors.extend(task.exception() for task in ended)
            finally:
                await _end(tasks)
            _raise_first(errors)

        await self._ways(way, branches, caught)

    async def limited(self, branches: list[Program], caught: bool, limit: int) -> None:
        """Two or more at a time, by a semaphore of the handler's."""

        async def way(each: list[Branch]) -> None:
            places = asyncio.Semaphore(max(2, limit))

            async def one(branch: Branch) -> None:
                async with places:
                    await branch

            _raise_first(await asyncio.gather(*map(one, each), return_exceptions=True))

        await self._ways(way, branches, caught)

    async def beside(self, branches: list[Program], caught: bool, limit: int) -> None:
        """One branch beside the handler's own steps."""

        async def way(each: list[Branch]) -> None:
            task = asyncio.create_task(each[0])
            try:
                try:
                    await each[1]
                finally:
                    await asyncio.wait([task])
            except asyncio.CancelledError:
                await _end([task])
                raise
            await task

        await self._ways(way, branches, caught)


async def _end(tasks: Collection[asyncio.Task[None]]) -> None:
    """Where they have not ended, whoever waits for them was cancelled."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _raise_first(errors: Any) -> None:
    """What interrupts the run before what is refused."""
    found = [error for error in errors if isinstance(error, BaseException)]
    for error in sorted(found, key=lambda error: isinstance(error, Reject)):
        raise error


def _first(group: ExceptionGroup[Reject]) -> Reject:
    error: Any = group
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, Reject)
    return error


def app_of(world: World, **options: Unpack[Options]) -> App:
    app = App("programs")
    given: Options = {"backoff": "1ms, 1ms", "max_attempts": 30, "timeout": "2s", **options}

    @app.idempotent_handler("postgres:rides", key="id", **given)
    async def ride(order: dict[str, Any], saga: Saga) -> str:
        run = Run(world, ride, order, saga)
        run.id = order["of"]  # of its effects
        await run.sequence([["tx", f"{order['name']}_driven", True], ["sleep", "nap"]])
        if not order["drives"]:
            raise Reject("no_driver")
        return f"{order['name']} driven"

    @app.idempotent_handler(f"postgres:{QUEUE}", key="id", **given)
    async def book(order: dict[str, Any], saga: Saga) -> list[str]:
        run = Run(world, ride, order, saga)
        await run.sequence(order["program"])
        return run.seen.done

    return app
