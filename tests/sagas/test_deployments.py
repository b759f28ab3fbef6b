"""Two versions of a handler side by side, and two builds of one version (L28 to L30)."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from idemconsumer import App, OutcomeKind, Reject, Saga, idempotent_handler
from idemconsumer.admin.saga_admin import SagaAdmin
from idemconsumer.app import builds
from idemconsumer.app.builds import build_of
from idemconsumer.engine.engine import Engine
from idemconsumer.engine.work import Work
from idemconsumer.handlers.handler import BoundHandler
from idemconsumer.message import keys
from idemconsumer.ports.observer import NullObserver
from idemconsumer.rules.values import State
from idemconsumer.settings import load as load_settings
from idemconsumer.stores.heartbeat import Heartbeat
from idemconsumer.stores.leased_saga import LeasedSaga, Runs
from idemconsumer.stores.leases import PostgresLeases
from idemconsumer.worker.saga_lease import SagaLease
from tests.support.inside import register
from tests.support.sagas import SCHEMA, Bench, Remote, SagaFn, Station, order, put, saga, take_back
from tests.support.waiting import until

GRACE = 600.0  # seconds
LEASE = 3600.0  # of a station


async def book(order: dict[str, Any], saga: Saga) -> None:
    await saga.tx("a", put, "a")
    raise ValueError("to be resumed")


def worker_of(bench: Bench, station: Station, handler: BoundHandler, build: str = "b") -> Station:
    """A process that runs only this handler, from this code, and says so."""
    version = handler.options.version
    station.leases = PostgresLeases(
        station.store.pool, station.lease, {handler.identity: version}, grace=GRACE, build=build
    )
    station.engine._leases = station.leases
    runs = json.dumps([{"app": handler.app, "handler": handler.name, "version": version}])
    bench.run(
        "update idemconsumer.worker set runs = %s::jsonb, build = %s where id = %s", (runs, build, station.lease.worker)
    )
    return station


def later(bench: Bench, seconds: float) -> None:
    """All leases and all that is due, that much earlier."""
    for table, column in (("saga", "due"), ("worker", "until")):
        bench.script(f"update idemconsumer.{table} set {column} = {column} - interval '{seconds} s'")


def alive(bench: Bench, station: Station) -> None:
    bench.run("update idemconsumer.worker set until = clock_timestamp() + lease where id = %s", (station.lease.worker,))


async def resume_own(station: Station, handler: BoundHandler) -> Any:
    """As its source does with what has been left to it: at most a second later, whatever else is due."""
    (taken,) = await station.leases.take("shop", [handler.name], 1, unheld=await station.leases.own())
    return await resume_one(station, handler, taken)


async def resume_one(station: Station, handler: BoundHandler, taken: LeasedSaga) -> Any:
    return await station.run(Work.of(handler, taken.message, leased=taken))


# --------------------------------------------------------------------------------------------------- versions (L28)
async def test_a_worker_takes_only_sagas_of_its_version_while_a_worker_of_theirs_lives(
    bench: Bench, one: Station, two: Station
) -> None:
    """A worker of version 2 put ten waiting sagas of version 1 aside, beside a worker of version 1."""
    old, new = saga(book, version="1"), saga(book, version="2")
    worker_of(bench, one, old)
    worker_of(bench, two, new)
    await one.deliver(old)
    later(bench, 2 * GRACE)
    alive(bench, one)
    alive(bench, two)
    assert await two.take(new) is None
    assert await one.take(old) is not None


@pytest.mark.parametrize(("gone_for", "taken"), [(GRACE - 60, False), (GRACE + 60, True)])
@pytest.mark.parametrize("how", ["drained", "lost"])
async def test_a_saga_whose_version_is_gone_is_put_aside_after_a_while(
    bench: Bench, one: Station, two: Station, gone_for: float, taken: bool, how: str
) -> None:
    old, new = saga(book, version="1"), saga(book, version="2")
    worker_of(bench, one, old)
    worker_of(bench, two, new)
    await one.deliver(old)
    if how == "lost":
        assert await one.take(old) is not None
    bench.expire(one)
    bench.run("update idemconsumer.worker set until = clock_timestamp() where id = %s", (one.lease.worker,))
    later(bench, gone_for)
    alive(bench, two)
    holding = await two.take(new)
    assert (holding is not None) is taken
    if holding is not None:
        outcome = await resume_one(two, new, holding)
        assert (outcome.kind, outcome.reason, bench.effects) == (OutcomeKind.DEAD, "saga_changed", ["a"])
        assert "it began with version '1', and the handler now has version '2'" in bench.letter


async def test_another_handler_or_app_of_that_version_does_not_count(bench: Bench, one: Station, two: Station) -> None:
    old, new = saga(book, version="1"), saga(book, version="2")
    worker_of(bench, two, new)
    await one.deliver(old)
    later(bench, 2 * GRACE)
    alive(bench, one)
    alive(bench, two)
    others = [{"app": "other", "handler": "book", "version": "1"}, {"app": "shop", "handler": "other", "version": "1"}]
    bench.run("update idemconsumer.worker set runs = %s::jsonb where id = %s", (json.dumps(others), one.lease.worker))
    assert await two.take(new) is not None


async def test_a_saga_that_a_person_let_go_on_is_taken_by_any_version(bench: Bench, one: Station, two: Station) -> None:
    old, new = saga(book, version="1"), saga(book, version="2")
    worker_of(bench, one, old)
    worker_of(bench, two, new)
    await one.deliver(old)
    bench.run("update idemconsumer.saga set version = '*', due = clock_timestamp()")
    assert await two.take(new) is not None


async def test_a_worker_says_what_it_runs_and_is_remembered_after_it_left(bench: Bench, one: Station) -> None:
    lease = await SagaLease.open(
        bench.dsn, SCHEMA, Engine(one.store), NullObserver(), connections=2, lease=30.0, longest_run=30.0,
        runs=[Runs("shop", "book", "1"), Runs("shop", "mail", None)], build="b",
    )  # fmt: skip
    said = "select runs from idemconsumer.worker where until {} clock_timestamp() and runs <> '[]'"
    runs = [
        {"app": "shop", "handler": "book", "version": "1"}, {"app": "shop", "handler": "mail", "version": None},
    ]  # fmt: skip
    assert bench.script(said.format(">")) == [(runs,)]
    await lease.close()
    assert bench.script(said.format("<=")) == [(runs,)]


# --------------------------------------------------------------------------- another build of the same version (L29)
def with_a_step_between(remote: Remote) -> SagaFn:
    async def book(order: dict[str, Any], saga: Saga) -> str:
        await saga.tx("a", put, "a")
        await saga.call("between", remote.charge, "between")
        if not remote.calls[1:]:
            remote.calls.append(remote.calls[0])
            raise ValueError("to be resumed")
        await saga.tx("b", put, "b")
        return "done"

    return book


async def before_it(order: dict[str, Any], saga: Saga) -> str:
    await saga.tx("a", put, "a")
    await saga.tx("b", put, "b")
    return "done"


@pytest.mark.parametrize("later", ["old", "new"])
async def test_a_worker_leaves_a_saga_with_steps_that_it_does_not_know_to_one_of_another_build(
    bench: Bench, one: Station, two: Station, remote: Remote, later: str
) -> None:
    """It was put aside where the worker with the older code was the one that had started later: after a canary, each
    old worker that was restarted put the canary's sagas aside. At no cost: it is as it was."""
    old, new = (one, two) if later == "new" else (two, one)
    older, newer = saga(before_it), saga(with_a_step_between(remote))
    worker_of(bench, old, older, "old")
    worker_of(bench, new, newer, "new")
    await new.deliver(newer)
    before = bench.run("select attempt from idemconsumer.saga")
    outcome = await old.resume(older)
    assert (outcome.kind, outcome.state, outcome.due) == (OutcomeKind.RETRYING, State.PROCESSING, 0.0)
    assert bench.run("select attempt - 1, worker, unable from idemconsumer.saga") == [
        (before[0][0], new.lease.worker, ["old"])
    ]
    assert (bench.effects, bench.letters) == (["a"], [])
    assert await old.take(older) is None
    outcome = await resume_own(new, newer)
    assert (outcome.kind, bench.effects) == (OutcomeKind.APPLIED, ["a", "b"])
    ((left,),) = bench.run("select detail from idemconsumer.history where what = 'left'")
    assert left.startswith("to test, build new: idemconsumer.errors.SagaChanged: step 'between' is recorded")


async def test_what_no_build_can_go_on_with_is_put_aside_by_the_last_that_tries(
    bench: Bench, one: Station, two: Station, remote: Remote
) -> None:
    """The step was removed: nobody knows it any more. Each build tries once."""
    worker_of(bench, one, saga(before_it), "old")
    worker_of(bench, two, saga(before_it), "new")
    await one.deliver(saga(with_a_step_between(remote)))
    assert (await one.resume(saga(before_it))).kind is OutcomeKind.RETRYING
    outcome = await resume_own(two, saga(before_it))
    assert (outcome.kind, outcome.reason, bench.effects) == (OutcomeKind.DEAD, "saga_changed", ["a"])
    await SagaAdmin(bench.dsn, SCHEMA).resume(keys.digest("shop", None, "book", "k"), by="ann")
    assert bench.run("select unable from idemconsumer.saga") == [(None,)]


NOT_WAITED_FOR = ["another version", "another handler", "long gone", "of its own build", "takes none by itself"]


@pytest.mark.parametrize("why", NOT_WAITED_FOR)
async def test_who_cannot_go_on_with_a_saga_is_not_waited_for(
    bench: Bench, one: Station, two: Station, remote: Remote, why: str
) -> None:
    older, newer = saga(before_it), saga(with_a_step_between(remote))
    worker_of(bench, one, older, "old")
    worker_of(bench, two, saga(before_it, version="2") if why == "another version" else newer, "new")
    await two.deliver(newer)
    if why == "long gone":
        later(bench, LEASE + 2 * GRACE)
        alive(bench, one)
    changed = {
        "of its own build": "build = 'old'",
        "takes none by itself": "build = null",
        "another handler": "runs = replace(runs::text, 'book', 'look')::jsonb",
    }
    if why in changed:
        bench.script(f"update idemconsumer.worker set {changed[why]} where id = {two.lease.worker}")
    outcome = await one.resume(older)
    assert (outcome.kind, outcome.reason) == (OutcomeKind.DEAD, "saga_changed")


@pytest.mark.parametrize("why", ["it has just left", "it is draining"])
async def test_a_worker_that_may_come_back_is_waited_for(
    bench: Bench, one: Station, two: Station, remote: Remote, why: str
) -> None:
    older, newer = saga(before_it), saga(with_a_step_between(remote))
    worker_of(bench, one, older, "old")
    worker_of(bench, two, newer, "new")
    await two.deliver(newer)
    if why == "it has just left":
        bench.expire(two)
    else:
        bench.run("update idemconsumer.worker set name = 'here:7' where id = %s", (two.lease.worker,))
        bench.run(
            "insert into idemconsumer.process (app, host, pid, place, version, state, handlers, started_at, seen_at)"
            " values ('shop', 'here', 7, 0, '1', 'draining', '{}', now(), now())"
        )
    before = bench.run("select attempt from idemconsumer.saga")
    outcome = await one.resume(older)
    assert outcome.kind is OutcomeKind.RETRYING
    assert outcome.due > 0
    assert bench.run("select attempt, worker, due > clock_timestamp() from idemconsumer.saga") == [
        (before[0][0], None, True)
    ]
    assert bench.letters == []


async def test_a_lease_that_is_registered_again_is_of_the_same_build(bench: Bench) -> None:
    heartbeat = Heartbeat(bench.dsn, SCHEMA, lease=30.0, patience=30.0, build="b")
    await asyncio.to_thread(register, heartbeat)
    await asyncio.to_thread(register, heartbeat)
    assert bench.run("select build from idemconsumer.worker") == [("b",), ("b",)]


def test_a_build_is_the_source_of_the_modules_of_its_handlers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "shopping").mkdir()
    (tmp_path / "shopping/__init__.py").touch()
    (tmp_path / "shopping/steps.py").write_text("PRICE = 1")
    source = (
        "from idemconsumer import Saga, idempotent_handler\nfrom shopping import steps\n"
        "@idempotent_handler('memory:o', key='id')\nasync def book(order: dict, saga: Saga) -> None: ...\n"
    )
    (tmp_path / "shopping/app.py").write_text(source)
    handlers = [import_module("shopping.app").book]
    first = build_of(handlers)
    assert build_of(handlers) == first
    assert build_of([]) != first
    (tmp_path / "shopping/steps.py").write_text("PRICE = 2")
    assert build_of(handlers) != first


class Growing(dict[str, ModuleType]):
    """Another thread imports a module at each look."""

    def __iter__(self) -> Iterator[str]:
        for name in super().__iter__():
            self[f"imported {len(self)}"] = ModuleType("late")
            yield name

    def items(self) -> Any:
        return ((name, self[name]) for name in self)


class Lazy(ModuleType):
    """As a module whose names are imported when they are looked up, and of which one is missing."""

    def __getattribute__(self, name: str) -> Any:
        raise ImportError(name)


def test_a_build_is_found_whatever_other_modules_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    handlers = [idempotent_handler("memory:orders", key="id")(before_it)]
    modules = Growing(sys.modules | {"lazy": Lazy("lazy")})
    expected = build_of(handlers)
    monkeypatch.setattr(builds, "sys", SimpleNamespace(modules=modules))
    assert build_of(handlers) == expected


@pytest.mark.parametrize("given", [None, "4f2a"])
async def test_a_worker_is_of_the_build_of_its_code(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, given: str | None
) -> None:
    if given is not None:
        monkeypatch.setenv("IDEMCONSUMER_BUILD", given)
    app = App("shop")
    handler = idempotent_handler("memory:orders", key="id", name="book")(before_it)
    app.include(handler)
    worker = app.worker(load_settings(dsn=bench.dsn))
    running = asyncio.create_task(worker.run())
    of = "select build from idemconsumer.worker where runs <> '[]'"
    await until(lambda: bench.run(of), "it has a lease")
    worker.drain()
    await running
    assert bench.run(of) == [(given or build_of([handler]),)]


async def test_a_process_that_takes_no_sagas_is_of_no_build(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left to it would wait until it has ended."""
    monkeypatch.setenv("IDEMCONSUMER_DSN", bench.dsn)
    monkeypatch.setenv("IDEMCONSUMER_BUILD", "4f2a")
    async with App("shop") as app:
        app.include(idempotent_handler("memory:orders", key="id", name="book")(before_it))
        assert (await app.process(order())).kind is OutcomeKind.APPLIED
    assert bench.run("select build from idemconsumer.worker where runs <> '[]'") == [(None,)]


# ---------------------------------------------------------------------------------------------------- patches (L30)
def patched(decided: list[bool], *, fails: bool = False) -> SagaFn:
    async def book(order: dict[str, Any], saga: Saga) -> str:
        await saga.tx("a", put, "a")
        if await saga.patched("check"):
            decided.append(True)
            await saga.tx("check", put, "check")
        else:
            decided.append(False)
        if fails:
            raise ValueError("to be resumed")
        await saga.tx("b", put, "b")
        return "done"

    return book


async def unpatched(order: dict[str, Any], saga: Saga) -> str:
    await saga.tx("a", put, "a")
    await saga.tx("b", put, "b")
    raise ValueError("to be resumed")


async def test_a_saga_that_was_not_beyond_a_patch_takes_it(bench: Bench, one: Station, two: Station) -> None:
    decided: list[bool] = []
    await one.deliver(saga(book))
    assert (await two.resume(saga(patched(decided, fails=True)))).kind is OutcomeKind.RETRYING
    assert (await one.resume(saga(patched(decided)))).kind is OutcomeKind.APPLIED
    assert (decided, bench.effects) == ([True, True], ["a", "check", "b"])


async def test_a_saga_that_was_beyond_a_patch_goes_on_as_it_began(bench: Bench, one: Station, two: Station) -> None:
    decided: list[bool] = []
    await one.deliver(saga(unpatched))
    assert (await two.resume(saga(patched(decided)))).kind is OutcomeKind.APPLIED
    assert (decided, bench.effects) == ([False], ["a", "b"])


async def test_which_way_a_saga_goes_is_recorded_once(bench: Bench, one: Station, two: Station) -> None:
    """Decided anew it would change its way: the branch has been replayed by then."""
    decided: list[bool] = []
    held = asyncio.Event()

    def at(patch: bool) -> SagaFn:
        async def branch(saga: Saga) -> None:
            await held.wait()
            await saga.tx("branch", put, "branch")

        async def book(order: dict[str, Any], saga: Saga) -> str:
            task = asyncio.create_task(branch(saga))
            if not patch:
                held.set()
                await task
                raise ValueError("before the deployment")
            if decided:  # only in the second run: the branch is replayed before the patch is reached
                held.set()
                await task
            decided.append(await saga.patched("check"))
            held.set()
            await task
            if len(decided) < 2:
                raise ValueError("to be resumed")
            return "done"

        return book

    await one.deliver(saga(at(False)))
    held.clear()
    await two.resume(saga(at(True)))
    held.clear()
    assert (await one.resume(saga(at(True)))).kind is OutcomeKind.APPLIED
    assert decided == [False, False]


async def test_a_worker_leaves_a_saga_that_took_a_patch_to_another_build(
    bench: Bench, one: Station, two: Station
) -> None:
    older, newer, decided = saga(unpatched), saga(patched([], fails=True)), [True]
    worker_of(bench, one, older, "old")
    worker_of(bench, two, newer, "new")
    await two.deliver(newer)
    bench.run("delete from idemconsumer.step where name = 'check'")  # as if it had died before that step
    assert (await one.resume(older)).kind is OutcomeKind.RETRYING
    assert bench.effects == ["a", "check"]
    outcome = await resume_own(two, saga(patched(decided)))
    assert outcome.kind is OutcomeKind.APPLIED


async def test_a_patch_may_be_removed_from_the_code_again(bench: Bench, one: Station, two: Station) -> None:
    async def always(order: dict[str, Any], saga: Saga) -> str:
        await saga.tx("a", put, "a")
        await saga.tx("check", put, "check")
        await saga.tx("b", put, "b")
        return "done"

    worker_of(bench, one, saga(always))
    worker_of(bench, two, saga(always))
    await one.deliver(saga(patched([], fails=True)))
    outcome = await two.resume(saga(always))
    assert (outcome.kind, bench.effects) == (OutcomeKind.APPLIED, ["a", "check", "b"])


async def test_a_patch_answers_while_the_saga_is_undone_and_records_nothing(
    bench: Bench, one: Station, two: Station
) -> None:
    fails = [ValueError("once")]

    async def undo(tx: Any, output: str, name: str) -> None:
        if fails:
            raise fails.pop()
        await take_back(tx, output, name)

    def at(patch: bool) -> SagaFn:
        async def book(order: dict[str, Any], saga: Saga) -> None:
            if patch and await saga.patched("check"):
                await saga.tx("check", put, "check")
            await saga.tx("a", put, "a", undo=undo)
            raise Reject("no")

        return book

    assert (await one.deliver(saga(at(False)))).state is State.UNDOING
    assert (await two.resume(saga(at(True)))).kind is OutcomeKind.FAILED
    assert (bench.effects, bench.steps) == (["a", "undo:a:out:a"], ["a"])


async def test_names_of_patches_are_kept_from_steps(bench: Bench, one: Station) -> None:
    async def named(order: dict[str, Any], saga: Saga) -> None:
        await saga.tx("patch:check", put, "a")

    assert (await one.deliver(saga(named, max_attempts=1))).kind is OutcomeKind.DEAD
    assert "names that start with 'patch:' are reserved for saga.patched" in bench.letter


async def test_the_recovery_point_is_a_step_and_no_patch(bench: Bench, one: Station) -> None:
    seen: list[str | None] = []

    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.tx("a", put, "a")
        await saga.patched("check")
        seen.append(saga.recovery_point)
        if len(seen) < 3:
            raise ValueError

    await one.to_the_end(saga(book), await one.deliver(saga(book)))
    assert seen == ["a", "a", "a"]
