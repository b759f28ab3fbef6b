"""saga.all: as many branches at a time as its limit says, and a replay that asks for the same steps (L46)."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from idemconsumer import OutcomeKind, Reject, Saga, Step, Tx
from idemconsumer.admin.saga_admin import SagaAdmin
from idemconsumer.rules.values import State
from tests.support.inside import when_stopped
from tests.support.sagas import SCHEMA, Bench, Remote, Station, order, put, saga, take_back
from tests.support.waiting import until


@pytest.fixture(autouse=True)
def all_awaited(recwarn: pytest.WarningsRecorder) -> Iterator[None]:
    """No branch is dropped that was never awaited."""
    gc.collect()
    recwarn.clear()  # what other tests have left
    yield
    gc.collect()
    told = [str(each.message) for each in recwarn if "never awaited" in str(each.message)]
    assert [each for each in told if "Connection.close" not in each] == []  # aio_pika's, of a broker that was not there


async def refuse(tx: Tx, code: str = "no") -> None:
    raise Reject(code)


class Busy:
    """How many calls were made at a time, at most."""

    def __init__(self) -> None:
        self.now = self.most = 0

    async def call(self, step: Step, n: int) -> int:
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0.001 * (n % 3))
        self.now -= 1
        return n


@pytest.mark.parametrize("limit", [1, 3, 50])
async def test_outputs_come_in_order_and_no_more_run_at_a_time_than_the_limit(
    bench: Bench, one: Station, limit: int
) -> None:
    busy, tasks, made = Busy(), [0], [0]

    async def book(order: dict[str, Any], saga: Saga) -> list[int]:
        before = len(asyncio.all_tasks())

        def lines() -> Iterator[Any]:
            for n in range(20):
                made.append(n)
                tasks.append(len(asyncio.all_tasks()) - before)
                yield saga.call(f"line_{n}", busy.call, n)

        return await saga.all(lines(), limit=limit)

    outcome = await one.deliver(saga(book))
    assert outcome.result == str(list(range(20))).replace(" ", "").encode()
    assert busy.most <= limit
    assert busy.most > 1 or limit == 1
    assert max(tasks) <= 2 * limit, "a branch and its running function"
    assert bench.run("select count(*) from idemconsumer.step where overlapped") == [(20,)]


async def test_what_ran_before_a_failure_is_not_run_again(bench: Bench, one: Station, two: Station) -> None:
    fails, began = [ValueError("once")], asyncio.Event()

    async def flaky(tx: Tx, name: str) -> str:
        if name == "3" and fails:
            await began.wait()
            raise fails.pop()
        if name == "4" and fails:
            began.set()
            await asyncio.Event().wait()  # it is cancelled, and no other one begins in its place
        return await put(tx, name)

    async def book(order: dict[str, Any], saga: Saga) -> list[str]:
        return await saga.all([saga.tx(f"line_{n}", flaky, str(n)) for n in range(6)], limit=2)

    assert (await one.deliver(saga(book))).kind is OutcomeKind.RETRYING
    assert "5" not in bench.effects
    assert (await two.resume(saga(book))).kind is OutcomeKind.APPLIED
    assert sorted(bench.effects) == list("012345")


async def test_after_a_rejection_those_in_flight_finish_and_the_others_do_not_begin(
    bench: Bench, one: Station, remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    rejected = asyncio.Event()
    when_stopped(monkeypatch, rejected.set)

    async def charge(step: Step, name: str) -> str:
        await rejected.wait()
        return await remote.charge(step, name)

    async def refused(tx: Tx) -> None:
        raise Reject("full")

    async def book(order: dict[str, Any], saga: Saga) -> None:
        steps: list[Any] = [saga.call("a", charge, "a", undo=remote.refund), saga.tx("full", refused)]
        steps += [saga.tx(f"later_{n}", put, "later") for n in range(50)]
        await saga.all(steps, limit=2)

    outcome = await one.deliver(saga(book))
    assert (outcome.kind, outcome.result) == (OutcomeKind.FAILED, b'{"code":"full","body":null}')
    assert remote.effects == ["a", "refund:a:charged:a"]
    assert (bench.effects, bench.letters) == ([], [])
    gc.collect()  # what was never begun is closed: it would warn now


async def test_a_branch_of_several_steps_takes_no_new_one_after_a_rejection(
    bench: Bench, one: Station, monkeypatch: pytest.MonkeyPatch
) -> None:
    rejected = asyncio.Event()
    when_stopped(monkeypatch, rejected.set)

    async def slow(tx: Tx, name: str) -> str:
        await rejected.wait()
        return await put(tx, name)

    async def refused(tx: Tx) -> None:
        raise Reject("full")

    async def two_steps(saga: Saga) -> None:
        await saga.tx("slow", slow, "slow", undo=take_back)
        await saga.tx("next", put, "next")

    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.all([two_steps(saga), saga.tx("full", refused)])

    assert (await one.deliver(saga(book))).kind is OutcomeKind.FAILED
    assert bench.effects == ["slow", "undo:slow:out:slow"]


@pytest.mark.parametrize("limit", [1, 2, 5])
async def test_a_handler_that_catches_the_rejection_goes_the_same_way_again(
    bench: Bench, one: Station, two: Station, limit: int
) -> None:
    """The steps that began before it are asked for in the replay, and those that never did are not."""
    fails = [ValueError("once")]
    caught: list[str] = []

    async def last(tx: Tx) -> None:
        if fails:
            raise fails.pop()

    async def book(order: dict[str, Any], saga: Saga) -> None:
        steps: list[Any] = [saga.tx("a", put, "a"), saga.tx("x", refuse, "x"), saga.tx("b", put, "b")]
        steps += [saga.tx("y", refuse, "y"), *(saga.tx(f"c{n}", put, "c") for n in range(5))]
        try:
            await saga.all(steps, limit=limit)
        except Reject as rejected:
            caught.append(rejected.code)
        await saga.tx("instead", put, "instead")
        await saga.tx("last", last)

    assert (await one.deliver(saga(book))).kind is OutcomeKind.RETRYING
    steps = bench.steps
    assert (await two.resume(saga(book))).kind is OutcomeKind.APPLIED
    assert bench.steps == [*steps, "last"]
    assert bench.effects.count("instead") == 1
    assert caught == ["x", "x"], "the first in their order, whichever came first in time"


async def test_a_replay_that_meets_the_rejection_first_asks_for_what_ran_beside_it(
    bench: Bench, one: Station, two: Station
) -> None:
    """It was the first to begin and the last to end: what the other place ran meanwhile must be undone."""
    third = asyncio.Event()
    fails = [ValueError("once")]

    async def slow(tx: Tx) -> None:
        await third.wait()
        raise Reject("no")

    async def mark(tx: Tx, name: str) -> str:
        if name == "3":
            asyncio.get_running_loop().call_later(0.05, third.set)
        return await put(tx, name)

    async def undo(tx: Tx, output: str, name: str) -> None:
        if fails:
            raise fails.pop()
        await take_back(tx, output, name)

    async def book(order: dict[str, Any], saga: Saga) -> None:
        lines = (saga.tx(f"line_{n}", mark, str(n), undo=undo) for n in range(1, 4))
        await saga.all([saga.tx("slow", slow), *lines, saga.tx("held", forever)], limit=2)

    async def forever(tx: Tx) -> None:
        await third.wait()

    handler = saga(book)
    assert (await one.deliver(handler)).kind is OutcomeKind.RETRYING
    assert bench.state is State.UNDOING
    assert (await two.resume(handler)).kind is OutcomeKind.FAILED
    assert bench.effects == ["1", "2", "3", "undo:3:out:3", "undo:2:out:2", "undo:1:out:1"]


@pytest.mark.parametrize("limit", [1, 2])
async def test_an_undo_asks_for_every_recorded_branch_whatever_the_limit_is_now(
    bench: Bench, one: Station, two: Station, limit: int
) -> None:
    """Exhausted with the first ones unfinished; a deployment lowers the limit, and the unfinished ones come first."""
    fails = [ValueError("once")]

    async def broken(tx: Tx) -> None:
        await until(lambda: "line_2" in bench.steps)
        raise ValueError

    async def undo(tx: Tx, output: str, name: str) -> None:
        if fails:
            raise fails.pop()
        await take_back(tx, output, name)

    def handler(limit: int) -> Any:
        async def book(order: dict[str, Any], saga: Saga) -> None:
            steps: list[Any] = [saga.tx(f"broken_{n}", broken, max_attempts=1) for n in range(2)]
            steps += [saga.tx(f"line_{n}", put, str(n), undo=undo) for n in range(3)]
            await saga.all(steps, limit=limit)

        return saga(book)

    assert (await one.deliver(handler(3))).kind is OutcomeKind.RETRYING
    assert bench.state is State.UNDOING
    assert (await two.resume(handler(limit))).kind is OutcomeKind.FAILED
    assert bench.effects == ["0", "1", "2", "undo:2:out:2", "undo:1:out:1", "undo:0:out:0"]


async def test_calls_that_were_cut_off_are_made_again_with_their_keys(
    bench: Bench, one: Station, two: Station, remote: Remote
) -> None:
    fails = [ValueError("once")]

    async def charge(step: Step, name: str) -> str:
        output = await remote.charge(step, name)
        if fails and name != "2":
            await asyncio.Event().wait()
        elif fails:
            raise fails.pop()
        return output

    async def book(order: dict[str, Any], saga: Saga) -> list[str]:
        return await saga.all([saga.call(f"line_{n}", charge, str(n)) for n in range(4)], limit=3)

    assert (await one.deliver(saga(book))).kind is OutcomeKind.RETRYING
    assert (await two.resume(saga(book))).result == b'["charged:0","charged:1","charged:2","charged:3"]'
    assert [name for name, _ in remote.calls] == ["0", "1", "2", "0", "1", "2", "3"]
    assert sorted(remote.effects) == ["0", "1", "2", "3"]


@pytest.mark.parametrize("limit", [1, 4])
async def test_groups_inside_groups_end_with_the_outer_one(
    bench: Bench, one: Station, two: Station, limit: int
) -> None:
    fails = [ValueError("once")]

    async def undo(tx: Tx, output: str, name: str) -> None:
        if fails:
            raise fails.pop()
        await take_back(tx, output, name)

    async def book(order: dict[str, Any], saga: Saga) -> None:
        async def inner(room: str) -> None:
            await saga.all([saga.tx(f"{room}{n}", put, f"{room}{n}", undo=undo) for n in range(3)], limit=1)
            if room == "b":
                await saga.tx("no", refuse)

        await saga.all([inner(room) for room in "abcdef"], limit=limit)

    handler = saga(book, timeout="20s")
    assert (await one.deliver(handler)).kind is OutcomeKind.RETRYING
    assert (await two.resume(handler)).kind is OutcomeKind.FAILED
    done = [name for name in bench.effects if not name.startswith("undo")]
    assert {"a0", "a1", "a2", "b0", "b1", "b2"} <= set(done)
    assert limit > 1 or "c0" not in done
    assert sorted(bench.effects) == sorted([*done, *(f"undo:{name}:out:{name}" for name in done)])


async def test_a_time_limit_around_it_ends_the_run(bench: Bench, one: Station, two: Station) -> None:
    hangs = [asyncio.Event()]

    async def slow(tx: Tx, name: str) -> str:
        if hangs:
            await hangs[0].wait()
        return await put(tx, name)

    async def book(order: dict[str, Any], saga: Saga) -> None:
        async with asyncio.timeout(0.2 if hangs else None):
            await saga.all([saga.tx(f"line_{n}", slow, str(n)) for n in range(4)], limit=2)

    assert (await one.deliver(saga(book))).kind is OutcomeKind.RETRYING
    hangs.clear()
    assert (await two.resume(saga(book))).kind is OutcomeKind.APPLIED
    assert sorted(bench.effects) == ["0", "1", "2", "3"]


async def test_an_error_beside_the_steps_lets_them_finish_first(bench: Bench, one: Station, two: Station) -> None:
    fails = [ValueError("between two steps")]
    go = asyncio.Event()

    async def slow(tx: Tx, name: str) -> str:
        await go.wait()
        return await put(tx, name)

    async def raises() -> None:
        if fails:
            asyncio.get_running_loop().call_later(0.05, go.set)
            raise fails.pop()

    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.all([saga.tx("slow", slow, "slow"), raises(), saga.tx("later", put, "later")], limit=2)

    assert (await one.deliver(saga(book))).kind is OutcomeKind.RETRYING
    assert bench.effects == ["slow"]
    assert (await two.resume(saga(book))).kind is OutcomeKind.APPLIED
    assert bench.effects == ["slow", "later"]


async def test_none_is_none_and_what_is_no_coroutine_is_refused(bench: Bench, one: Station) -> None:
    async def book(order: dict[str, Any], saga: Saga) -> list[object]:
        nothing: list[object] = await saga.all([])
        for wrong in (0, True, "2"):
            with pytest.raises(Exception, match=f"`limit` is {wrong!r}; write how many"):
                await saga.all([], limit=wrong)  # type: ignore[arg-type]
        with pytest.raises(Exception, match="was given a int; give it coroutines"):
            await saga.all([1])  # type: ignore[arg-type]
        return nothing

    assert (await one.deliver(saga(book), order("none"))).result == b"[]"


async def test_a_cancelled_saga_learns_first_how_the_calls_of_its_branches_ended(
    bench: Bench, one: Station, two: Station, remote: Remote
) -> None:
    fails = [ValueError("once")]

    async def charge(step: Step, name: str) -> str:
        output = await remote.charge(step, name)
        if fails and name == "1":
            raise fails.pop()
        return output

    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.all([saga.call(f"line_{n}", charge, str(n), undo=remote.refund) for n in range(4)], limit=1)

    assert (await one.deliver(saga(book))).kind is OutcomeKind.RETRYING
    ((key,),) = bench.run("select key from idemconsumer.saga")
    await SagaAdmin(bench.dsn, SCHEMA).cancel(key, undo=True, by="ann")
    assert (await two.resume(saga(book, timeout="20s"))).kind is OutcomeKind.FAILED
    assert remote.effects == ["0", "1", "refund:1:charged:1", "refund:0:charged:0"]


async def test_branches_that_wait_give_the_saga_up_though_others_have_not_begun(
    bench: Bench, one: Station, two: Station
) -> None:
    async def book(order: dict[str, Any], saga: Saga) -> list[Any]:
        waits: list[Any] = [saga.wait(f"ready_{n}") for n in range(2)]
        return await saga.all([*waits, *(saga.tx(f"line_{n}", put, str(n)) for n in range(3))], limit=2)

    started = asyncio.get_running_loop().time()
    outcome = await one.deliver(saga(book, timeout="60s"))
    assert (outcome.kind, bench.effects) == (OutcomeKind.BUSY, [])
    assert asyncio.get_running_loop().time() - started < 30, "it does not wait for what cannot begin"
    for n in range(2):
        bench.run("select idemconsumer.signal('shop', 'book', 'k', %s)", (f"ready_{n}",))
    outcome = await two.resume(saga(book, timeout="60s"))
    assert (outcome.kind, sorted(bench.effects)) == (OutcomeKind.APPLIED, ["0", "1", "2"])


async def test_a_rejection_does_not_wait_for_what_only_waits(bench: Bench, one: Station) -> None:
    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.all([saga.sleep("long", "3d"), saga.tx("no", refuse), saga.tx("later", put, "later")], limit=2)

    assert (await one.deliver(saga(book))).kind is OutcomeKind.FAILED
    assert bench.effects == []


async def test_a_replay_begins_nothing_that_the_rejection_had_kept_from_beginning(
    bench: Bench, one: Station, two: Station, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first place has a recorded step, and could take the next one before the second has come to the rejection."""
    refused = asyncio.Event()
    when_stopped(monkeypatch, refused.set)
    fails = [ValueError("once")]

    async def slow(tx: Tx) -> None:
        await refused.wait()

    async def no(tx: Tx) -> None:
        raise Reject("no")

    async def book(order: dict[str, Any], saga: Saga) -> None:
        with pytest.raises(Reject):
            await saga.all([saga.tx("slow", slow), saga.tx("no", no), saga.tx("later", put, "later")], limit=2)
        if fails:
            raise fails.pop()

    assert (await one.deliver(saga(book))).kind is OutcomeKind.RETRYING
    assert (await two.resume(saga(book))).kind is OutcomeKind.APPLIED
    assert bench.effects == []


async def test_a_call_that_was_cut_off_beside_a_rejection_is_made_again_before_the_handler_goes_on(
    bench: Bench, one: Station, two: Station, remote: Remote
) -> None:
    began = asyncio.Event()
    fails = [ValueError("once")]

    async def no(tx: Tx) -> None:
        await began.wait()
        raise Reject("no")

    async def charge(step: Step, name: str) -> str:
        output = await remote.charge(step, name)
        began.set()
        if fails:
            await until(lambda: "no" in bench.steps, "the rejection is recorded")
            raise fails.pop()
        return output

    async def book(order: dict[str, Any], saga: Saga) -> None:
        with pytest.raises(Reject):
            await saga.all([saga.tx("no", no), saga.call("charged", charge, "a")], limit=2)
        await saga.tx("instead", put, "instead")

    assert (await one.deliver(saga(book))).kind is OutcomeKind.RETRYING
    assert bench.run("select state from idemconsumer.step where name = 'no'") == [(3,)]
    assert (await two.resume(saga(book))).kind is OutcomeKind.APPLIED
    assert (remote.effects, len(remote.calls), bench.effects) == (["a"], 2, ["instead"])


async def test_a_wait_of_a_stopped_all_that_is_over_by_now_holds_up_nothing(
    bench: Bench, one: Station, two: Station
) -> None:
    """It came after what follows the `all`, which came after it: the saga was put aside as changed."""
    fails = [ValueError("once"), ValueError("twice")]

    async def refuse(tx: Tx) -> None:
        raise Reject("no")

    async def last(tx: Tx) -> str:
        if fails:
            raise fails.pop()
        return await put(tx, "last")

    async def book(order: dict[str, Any], saga: Saga) -> str:
        with suppress(Reject):
            await saga.all([saga.sleep("nap", "0.3s"), saga.tx("refused", refuse)])
        await saga.tx("next", put, "next")
        await asyncio.sleep(0.4 if len(fails) == 2 else 0)
        return await saga.tx("last", last)

    handler = saga(book, timeout=20)
    async with asyncio.timeout(10):
        outcomes = await two.to_the_end(handler, await one.deliver(handler))
    assert [each.kind for each in outcomes] == [OutcomeKind.RETRYING, OutcomeKind.RETRYING, OutcomeKind.APPLIED]
    assert bench.effects == ["next", "last"]


async def test_a_task_group_in_a_branch_ends_with_its_steps_that_do_not_begin(
    bench: Bench, one: Station, two: Station
) -> None:
    fails = [ValueError("once")]

    async def beside(tx: Tx) -> None:
        if fails:
            await until(lambda: "no" in bench.steps)
            raise fails.pop()

    async def book(order: dict[str, Any], saga: Saga) -> None:
        async def branch() -> None:
            async with asyncio.TaskGroup() as group:
                group.create_task(saga.tx("beside", beside))

        with pytest.raises(Reject):
            await saga.all([saga.tx("no", refuse), branch()])
        await saga.tx("instead", put, "instead")

    assert (await one.deliver(saga(book))).kind is OutcomeKind.RETRYING
    assert (await two.resume(saga(book))).kind is OutcomeKind.APPLIED
    assert (bench.steps, bench.effects) == (["no", "instead"], ["instead"])


async def refused(saga: Saga, stopped: asyncio.Event) -> None:
    try:
        await saga.tx("no", refuse)
    finally:
        stopped.set()  # whoever waits for it goes on behind this branch's end


async def test_what_an_error_beside_a_step_that_does_not_begin_means_stays(bench: Bench, one: Station) -> None:
    async def book(order: dict[str, Any], saga: Saga) -> None:
        stopped = asyncio.Event()

        async def branch() -> None:
            async def fail() -> None:
                await asyncio.sleep(0)
                raise ZeroDivisionError

            await saga.tx("first", put, "first")
            await stopped.wait()
            async with asyncio.TaskGroup() as group:
                group.create_task(fail())
                group.create_task(saga.tx("later", put, "later"))

        with pytest.raises(ExceptionGroup) as raised:
            await saga.all([branch(), refused(saga, stopped)])
        assert [type(each) for each in raised.value.exceptions] == [ZeroDivisionError]

    assert (await one.deliver(saga(book))).kind is OutcomeKind.APPLIED
    assert bench.effects == ["first"]


async def test_a_call_beside_a_step_that_does_not_begin_is_learnt_in_a_replay(
    bench: Bench, one: Station, two: Station, remote: Remote
) -> None:
    """A TaskGroup around both cuts it off."""

    async def charge(step: Step, name: str) -> str:
        if not remote.calls:
            await remote.charge(step, name)
            await asyncio.Event().wait()
        await asyncio.sleep(0.05)  # the step beside it is requested meanwhile
        return await remote.charge(step, name)

    async def book(order: dict[str, Any], saga: Saga) -> None:
        stopped = asyncio.Event()

        async def later() -> None:
            await stopped.wait()
            await until(lambda: remote.calls)
            await saga.tx("later", put, "later")

        async def branch() -> None:
            async with asyncio.TaskGroup() as group:
                group.create_task(saga.call("charged", charge, "a"))
                group.create_task(later())

        with pytest.raises(Reject):
            await saga.all([refused(saga, stopped), branch()])
        await saga.tx("instead", put, "instead")

    assert (await one.deliver(saga(book))).kind is OutcomeKind.RETRYING
    assert (await two.resume(saga(book))).kind is OutcomeKind.APPLIED
    assert (remote.effects, len(remote.calls), bench.effects) == (["a"], 2, ["instead"])
