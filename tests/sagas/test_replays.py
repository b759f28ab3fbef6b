"""A handler as it is now, against what sagas have recorded: without a database, and without calling any step."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Unpack

import msgspec
import pytest

from idemconsumer import App, Done, NotDone, Reject, Saga, Step, Tx, Unknown
from idemconsumer.admin.histories import MessageHistory, Octets, StepHistory
from idemconsumer.errors import ConfigurationError
from idemconsumer.handlers.options import Options
from idemconsumer.testing import Replay, SagaHistory, read_histories, replay

Book = Callable[[dict[str, Any], Saga], Awaitable[object]]
Word = type("Word", (str,), {})


async def never(at: Tx | Step, *args: object) -> str:
    raise AssertionError("a replay calls no function of a step")


async def number(at: Tx | Step, *args: object) -> int:
    raise AssertionError("a replay calls no function of a step")


async def undo(at: Tx | Step, *args: object) -> None:
    raise AssertionError("a replay calls no undo")


async def found(step: Step, *args: object) -> Done[str] | NotDone | Unknown:
    raise AssertionError("a replay calls no reconcile")


def done(name: str, at: int, kind: str = "tx", output: str = '"out"', **more: Any) -> StepHistory:
    return StepHistory(
        name=name, kind=kind, state="done", position=at, output=output, content_type="application/json", **more
    )


def called(name: str, **more: Any) -> StepHistory:
    return StepHistory(name=name, kind="call", state="intent", **more)


def history(*steps: StepHistory, state: str = "processing", version: str | None = None, body: str = "") -> SagaHistory:
    return SagaHistory(
        key="ab" * 32,
        scope="shop/-/book",
        handler="book",
        version=version,
        state=state,
        rejection='{"code":"full","body":null}' if state == "undoing" else None,
        started_at=datetime(2026, 1, 1, tzinfo=UTC),
        message=MessageHistory(source="memory:orders", position="here", body=body or '{"id":"k"}'),
        steps=list(steps),
    )


async def replayed(book: Book, its: SagaHistory, **options: Unpack[Options]) -> Replay:
    app = App("shop")
    given: Options = {"name": "book", **options}
    app.idempotent_handler("memory:orders", key="id", **given)(book)
    return await replay(app, its, patience=0.2)


async def a_b_c(order: dict[str, Any], saga: Saga) -> str:
    await saga.tx("a", never, undo=undo)
    out = await saga.call("b", never, undo=undo, reconcile=found)
    assert out == "out"
    await saga.tx("c", never)
    return out


A, B, C = done("a", 1, has_undo=True), done("b", 2, "call", has_undo=True), done("c", 3)


# ----------------------------------------------------------------------------------------------------------- it goes on
@pytest.mark.parametrize(
    ("its", "then"),
    [
        (history(), "step 'a'"),
        (history(A), "step 'b'"),
        (history(A, called("b")), "reconcile found"),
        (history(A, B), "step 'c'"),
        (history(A, B, C), "COMPLETED"),
        (history(A, B, state="undoing"), "undo of 'b'"),
        (history(state="undoing"), "FAILED"),
    ],
    ids=str,
)
async def test_a_handler_that_fits_goes_on_where_the_saga_is(its: SagaHistory, then: str) -> None:
    assert await replayed(a_b_c, its) == Replay(True, then)


async def test_a_step_behind_the_recorded_ones_and_a_patch_may_be_new() -> None:
    async def book(order: dict[str, Any], saga: Saga) -> None:
        if await saga.patched("first"):
            await saga.tx("first", never)
        await saga.tx("a", never, undo=undo)
        await saga.tx("d", never)

    assert await replayed(book, history(A)) == Replay(True, "step 'd'")
    assert await replayed(book, history()) == Replay(True, "step 'first'")


async def test_branches_may_come_in_any_order() -> None:
    async def late(saga: Saga) -> None:
        for _ in range(20):
            await asyncio.sleep(0)
        await saga.tx("b", never)

    async def book(order: dict[str, Any], saga: Saga) -> None:
        await asyncio.gather(saga.tx("new", never), saga.tx("a", never), late(saga))

    its = history(done("a", 1, overlapped=True), done("b", 2, overlapped=True))
    assert await replayed(book, its) == Replay(True, "step 'new'")


async def test_a_child_is_started_and_waited_for_by_nobody() -> None:
    app = App("shop")

    @app.idempotent_handler("memory:rides", key="id")
    async def ride(order: dict[str, Any], saga: Saga) -> list[str]:
        return []

    async def stop(tx: Tx, child: object, order: object) -> None:
        raise AssertionError("a replay calls no undo")

    @app.idempotent_handler("memory:orders", key="id")
    async def book(order: dict[str, Any], saga: Saga) -> None:
        child = await saga.start("ride", ride, order, undo=stop)
        assert await saga.result("ended", child) == ["Ann"]
        await saga.tx("a", never)

    its = done("ride", 1, output=f'{{"key":"r","tenant":null,"id":"{"cd" * 32}"}}', has_undo=True)
    ended = done("ended", 2, "wait", '["Ann"]')
    assert await replay(app, history()) == Replay(True, "step 'ride'")
    assert await replay(app, history(its)) == Replay(True, "step 'ended'")
    assert await replay(app, history(its, ended)) == Replay(True, "step 'a'")
    assert (await replay(app, history(its, ended, state="undoing"))).then == "undo of the start of a child"
    other = await replay(app, history(done("ride", 1)))
    assert (other.then, str(other.why).partition(";")[0]) == (
        "saga_changed", "step 'ride' was recorded as something else than the start of a saga"
    )  # fmt: skip


async def test_what_waits_is_where_the_saga_is_and_what_is_over_is_recorded() -> None:
    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.sleep("cooling", "3d")
        assert await saga.wait("approved", into=dict[str, str]) == {"by": "Ann"}
        await saga.tx("a", never)

    cooling = StepHistory(name="cooling", kind="sleep", state="done")
    over = msgspec.structs.replace(cooling, position=1)
    approved = done("approved", 2, "wait", '{"by":"Ann"}')
    assert await replayed(book, history()) == Replay(True, "step 'cooling'")
    assert await replayed(book, history(cooling)) == Replay(True, "step 'cooling'")
    assert await replayed(book, history(over)) == Replay(True, "step 'approved'")
    assert await replayed(book, history(over, approved)) == Replay(True, "step 'a'")
    assert (await replayed(a_b_c, history(cooling))).then == "saga_changed"
    late = await replayed(book, history(over, done("approved", 2, "wait", "[1]")))
    assert str(late.why).startswith("the stored output of step 'approved' no longer decodes")


@pytest.mark.parametrize(
    ("cancel", "steps", "then"),
    [
        (True, [A, B], "undo of 'b'"),
        (False, [A, B], "FAILED"),
        (True, [A, called("b")], "reconcile found"),
        (False, [A, called("b")], "reconcile found"),
    ],
)
async def test_what_is_to_be_cancelled_goes_no_further(cancel: bool, steps: list[StepHistory], then: str) -> None:
    its = msgspec.structs.replace(history(*steps), cancel=cancel)
    assert await replayed(a_b_c, its) == Replay(True, then)


async def test_a_rejection_beside_a_call_of_unknown_outcome_asks_for_it_first() -> None:
    async def book(order: dict[str, Any], saga: Saga) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(saga.call("b", never, reconcile=found))
            raise Reject("full")

    assert await replayed(book, history(called("b", overlapped=True))) == Replay(True, "reconcile found")


async def test_what_a_person_has_accepted_is_not_compared() -> None:
    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.tx("d", never)

    assert await replayed(book, history(A, version="*")) == Replay(False, "saga_changed", MISSING_UNDO)


MISSING_UNDO = "step 'a' has to be undone, and the handler no longer has its `undo=`; recorded: a; requested: d"


# --------------------------------------------------------------------------------------- it would be put aside, and why
async def renamed(order: dict[str, Any], saga: Saga) -> None:
    await saga.tx("aa", never, undo=undo)


async def reordered(order: dict[str, Any], saga: Saga) -> None:
    await saga.call("b", never, undo=undo)
    await saga.tx("c", never)
    await saga.tx("a", never, undo=undo)


async def other_kind(order: dict[str, Any], saga: Saga) -> None:
    await saga.call("a", never, undo=undo)


async def other_output(order: dict[str, Any], saga: Saga) -> None:
    await saga.tx("a", number, undo=undo)


async def no_undo(order: dict[str, Any], saga: Saga) -> None:
    await saga.tx("a", never)
    await saga.tx("c", never)


async def ends_at_once(order: dict[str, Any], saga: Saga) -> None:
    return


async def other_call(order: dict[str, Any], saga: Saga) -> None:
    await saga.tx("a", never, undo=undo)
    await saga.call("bb", never)


@pytest.mark.parametrize(
    ("book", "its", "why"),
    [
        (
            renamed,
            history(A),
            "step 'a' is recorded, and the handler no longer requests it; recorded: a; requested: aa",
        ),
        (reordered, history(A), "step 'a' is recorded, and the handler no longer requests it"),
        (other_kind, history(A), "step 'a' was recorded as tx, and is now call"),
        (other_output, history(A), "the stored output of step 'a' no longer decodes"),
        (no_undo, history(A), "step 'a' has to be undone, and the handler no longer has its `undo=`"),
        (no_undo, history(A, state="undoing"), "step 'a' has to be undone, and the handler no longer has its `undo=`"),
        (ends_at_once, history(A), "step 'a' is recorded, and the handler no longer requests it"),
        (other_call, history(A, called("b")), "step 'b' is recorded, and the handler no longer requests it"),
        (other_call, history(A, called("b", overlapped=True)), "the outcome of step 'b' is unknown, and the handler "),
        (a_b_c, history(A, version="2"), "it began with version '2', and the handler now has version None"),
        (a_b_c, history(A, body="[]"), "undecodable"),
    ],
)
async def test_a_handler_that_does_not_fit_is_told_as_the_dead_letter_would(
    book: Book, its: SagaHistory, why: str
) -> None:
    verdict = await replayed(book, its)
    assert (verdict.goes_on, verdict.then) == (False, "saga_changed")
    assert verdict.why is not None
    assert verdict.why.startswith(why)


async def test_a_step_of_a_branch_that_is_gone_is_missed_before_anything_new() -> None:
    async def book(order: dict[str, Any], saga: Saga) -> None:
        await asyncio.gather(saga.tx("new", never), saga.tx("a", never))

    verdict = await replayed(book, history(done("a", 1, overlapped=True), done("b", 2, overlapped=True)))
    assert verdict.why is not None
    assert verdict.why.startswith("step 'b' is recorded, and the handler no longer requests it; recorded: a, b")


async def test_a_branch_that_does_not_fit_is_found_beside_one_that_goes_on() -> None:
    async def second(saga: Saga) -> None:
        await asyncio.sleep(0)
        await saga.call("a", never)

    async def book(order: dict[str, Any], saga: Saga) -> None:
        await asyncio.gather(saga.tx("new", never), second(saga))

    verdict = await replayed(book, history(done("a", 1, overlapped=True)))
    assert verdict == Replay(
        False, "saga_changed", "step 'a' was recorded as tx, and is now call; recorded: a; requested: new, a"
    )


# --------------------------------------------------------------------------------------------------- it fails by itself
async def test_a_handler_that_fails_between_its_steps_is_told() -> None:
    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.tx("a", never)
        raise ValueError("no such seat")

    verdict = await replayed(book, history(done("a", 1)))
    assert (verdict.goes_on, verdict.then) == (False, "another attempt")
    assert "ValueError: no such seat" in str(verdict.why)


async def test_a_handler_that_rejects_goes_on_to_its_undos() -> None:
    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.tx("a", never, undo=undo)
        raise Reject("full")

    assert await replayed(book, history(A)) == Replay(True, "undo of 'a'")


async def test_a_handler_that_waits_for_what_never_comes_is_told() -> None:
    async def book(order: dict[str, Any], saga: Saga) -> None:
        await asyncio.Event().wait()

    verdict = await replayed(book, history())
    assert (verdict.goes_on, verdict.then) == (False, "another attempt")
    assert "did not reach its next step" in str(verdict.why)


# -------------------------------------------------------------------------------------------------------- what is given
async def test_an_app_without_this_saga_and_a_missing_resource_are_refused() -> None:
    app = App("shop")

    @app.idempotent_handler("memory:orders", key="id")
    async def book(order: dict[str, Any], saga: Saga, word: Word) -> str:  # type: ignore[valid-type]
        return str(word)

    with pytest.raises(ConfigurationError, match="app 'shop' has no saga 'other'; its sagas: book"):
        await replay(app, msgspec.structs.replace(history(), handler="other"))
    with pytest.raises(ConfigurationError, match=r"takes `word`; pass resources=\{Word: …\}"):
        await replay(app, history())
    assert await replay(app, history(), resources={Word: "w"}) == Replay(True, "COMPLETED")


def test_a_file_of_histories_is_read_again_and_another_is_refused(tmp_path: Path) -> None:
    its = [history(A, called("b")), history(done("x", 1, output=""), state="undoing")]
    its[0] = msgspec.structs.replace(
        its[0], message=MessageHistory(source="memory:orders", position="", body=Octets(b"\xff\x00"))
    )
    file = tmp_path / "histories.jsonl"
    file.write_bytes(msgspec.json.Encoder().encode_lines(its))
    assert read_histories(file) == its
    assert its[0].leased().message.body == b"\xff\x00"
    assert str(its[0]) == f"book-{'ab' * 6}-2"
    file.write_text('{"key": 1}\n')
    with pytest.raises(ConfigurationError, match="is not what `idemconsumer sagas export` writes"):
        read_histories(file)
