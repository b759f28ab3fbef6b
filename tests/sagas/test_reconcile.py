"""A saga whose worker was lost: its handler's `reconcile` is asked before it runs again (L8)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from idemconsumer import App, Batch, Done, HandlerError, NotDone, OutcomeKind, Reject, Retry, Saga, Tx, Unknown
from idemconsumer import idempotent_handler as decorate
from idemconsumer.engine.work import Work
from idemconsumer.errors import CommitUnknown
from idemconsumer.handlers.handler import BoundHandler
from idemconsumer.message.message import StoredResult
from idemconsumer.rules.values import State
from idemconsumer.settings import Settings
from idemconsumer.stores.leased_saga import LeasedSaga
from tests.support.collisions import a_lock_is_taken, collide
from tests.support.sagas import Bench, FreeLanes, Station, due_sagas, lost, order, put, saga, take_back

Answer = Done[Any] | NotDone | Unknown
DONE = Done("was done")
COLLISION = Done("only once it has not collided")


class Asked:
    """A handler and its reconcile, which notes that it was asked, writes, and answers or raises as told."""

    def __init__(self, *answers: Answer | Exception) -> None:
        self.answers = list(answers)
        self.times = 0

    async def reconcile(self, order: dict[str, Any], tx: Tx) -> Answer:
        self.times += 1
        await put(tx, "asked")
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if answer == COLLISION:
            await collide(tx)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def book(self, order: dict[str, Any], saga: Saga) -> str:
        await saga.tx("a", put, "a", undo=take_back)
        return "ran"

    def handler(self, **options: Any) -> BoundHandler:
        return saga(self.book, reconcile=self.reconcile, **options)


def attempts(bench: Bench) -> int:
    ((attempt,),) = bench.run("select attempt from idemconsumer.saga")
    return int(attempt)


def history(bench: Bench) -> list[tuple[Any, ...]]:
    return bench.run("select what, detail from idemconsumer.history order by id")


# ---------------------------------------------------------------------------------------------------------- the answers
async def test_what_is_done_completes_the_saga_and_its_handler_does_not_run(
    bench: Bench, one: Station, two: Station
) -> None:
    asked = Asked(DONE)
    handler = asked.handler()
    await lost(bench, one, handler)
    outcome = await two.resume(handler)
    assert (outcome.kind, outcome.result, bench.state) == (OutcomeKind.APPLIED, b'"was done"', State.COMPLETED)
    assert (bench.effects, bench.held) == (["asked"], False)
    again = await two.deliver(handler)
    assert (again.kind, again.result) == (OutcomeKind.DUPLICATE, b'"was done"')


async def test_what_is_not_done_runs_and_what_the_question_wrote_is_rolled_back(
    bench: Bench, one: Station, two: Station
) -> None:
    asked = Asked(NotDone())
    handler = asked.handler()
    await lost(bench, one, handler)
    outcome = await two.resume(handler)
    assert (outcome.kind, outcome.result, asked.times) == (OutcomeKind.APPLIED, b'"ran"', 1)
    assert bench.effects == ["a"]
    assert ("reconciled", "not done") in history(bench)


async def test_what_nobody_can_tell_is_left_to_a_person(bench: Bench, one: Station, two: Station) -> None:
    handler = Asked(Unknown()).handler()
    await lost(bench, one, handler)
    outcome = await two.resume(handler)
    assert (outcome.kind, outcome.reason, bench.state) == (OutcomeKind.DEAD, "unknown_effect", State.DEAD)
    assert (bench.effects, bench.letters) == ([], ["unknown_effect"])


# ------------------------------------------------------------------------------------------------------- no answer yet
@pytest.mark.parametrize("error", [ValueError("no table"), Reject("no"), Retry("later")])
async def test_a_failing_question_costs_an_attempt_and_is_asked_again_before_anything_runs(
    bench: Bench, one: Station, two: Station, error: Exception
) -> None:
    asked = Asked(error, NotDone())
    handler = asked.handler()
    await lost(bench, one, handler)
    outcome = await two.resume(handler)
    assert (outcome.kind, bench.effects, attempts(bench)) == (OutcomeKind.RETRYING, [], 1)
    assert (await two.resume(handler)).kind is OutcomeKind.APPLIED
    assert (asked.times, bench.effects) == (2, ["a"])


async def test_a_question_that_keeps_failing_is_left_to_a_person_and_nothing_is_undone(
    bench: Bench, one: Station, two: Station
) -> None:
    asked = Asked(ValueError("no table"))
    handler = asked.handler(max_attempts=3)
    await lost(bench, one, handler)
    *_, outcome = await two.to_the_end(handler, await two.resume(handler))
    assert (outcome.kind, outcome.reason, bench.effects) == (OutcomeKind.DEAD, "unknown_effect", [])
    assert "reconcile: ValueError: no table" in bench.letter
    assert asked.times == 3


async def test_a_wrong_answer_is_a_failure_that_says_what_to_return(bench: Bench, one: Station, two: Station) -> None:
    async def forgetful(order: dict[str, Any], tx: Tx) -> None:
        return

    wrong: Any = forgetful
    handler = saga(Asked(DONE).book, reconcile=wrong, max_attempts=1)
    await lost(bench, one, handler)
    assert (await two.resume(handler)).reason == "unknown_effect"
    assert "reconcile returned NoneType; return Done(result), NotDone() or Unknown()" in bench.letter


async def test_a_collision_costs_no_attempt(bench: Bench, one: Station, two: Station) -> None:
    asked = Asked(COLLISION, DONE)
    handler = asked.handler(max_attempts=2)
    await lost(bench, one, handler)
    with a_lock_is_taken(bench.dsn):
        assert (await two.resume(handler)).kind is OutcomeKind.RETRYING
    assert attempts(bench) == 0
    assert (await two.resume(handler)).kind is OutcomeKind.APPLIED


async def test_a_drain_leaves_the_question_to_the_next_worker(
    bench: Bench, one: Station, two: Station, open_station: Any
) -> None:
    hangs, begun = [True], asyncio.Event()

    async def slow(order: dict[str, Any], tx: Tx) -> Answer:
        if hangs.pop() if hangs else False:
            begun.set()
            await asyncio.Event().wait()
        return DONE

    handler = saga(Asked(DONE).book, reconcile=slow)
    await lost(bench, one, handler)
    run = asyncio.create_task(two.resume(handler))
    await begun.wait()
    two.engine.drain()
    assert (await run).kind is OutcomeKind.CANCELLED
    three = await open_station()
    assert (await three.resume(handler)).result == b'"was done"'


async def test_a_saga_given_back_before_it_ran_is_still_that_of_a_lost_worker(
    bench: Bench, one: Station, two: Station
) -> None:
    handler = Asked(DONE).handler()
    await lost(bench, one, handler)
    session = await due_sagas(two, FreeLanes(1))
    delivered = await session.fetch()
    await session.release(delivered)
    await session.close()
    outcome = await two.resume(handler)
    assert (outcome.reason, outcome.result) == (None, b'"was done"')
    assert "a" not in bench.effects


# ----------------------------------------------------------------------------------------------------------- not asked
async def test_nothing_is_asked_after_an_ordinary_failure(bench: Bench, one: Station, two: Station) -> None:
    asked, fails = Asked(DONE), [ValueError()]

    async def book(order: dict[str, Any], saga: Saga) -> str:
        if fails:
            raise fails.pop()
        return await asked.book(order, saga)

    handler = saga(book, reconcile=asked.reconcile)
    assert (await one.deliver(handler)).kind is OutcomeKind.RETRYING
    assert (await two.resume(handler)).result == b'"ran"'
    assert asked.times == 0


async def test_an_answer_counts_for_the_attempts_that_follow(bench: Bench, one: Station, two: Station) -> None:
    asked, fails = Asked(NotDone()), [ValueError()]

    async def book(order: dict[str, Any], saga: Saga) -> str:
        if fails:
            raise fails.pop()
        return await asked.book(order, saga)

    handler = saga(book, reconcile=asked.reconcile)
    await lost(bench, one, handler)
    assert (await two.resume(handler)).kind is OutcomeKind.RETRYING
    assert (await two.resume(handler)).result == b'"ran"'
    assert asked.times == 1


async def test_an_undoing_saga_is_undone_and_not_asked_about(bench: Bench, one: Station, two: Station) -> None:
    asked = Asked(DONE)

    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.tx("a", put, "a", undo=take_back)
        raise Reject("no")

    handler = saga(book, reconcile=asked.reconcile)
    holding = await lost(bench, one, handler)
    assert await one.leases.undo(holding, StoredResult(b'{"code":"no","body":null}'))
    assert (await two.resume(handler)).kind is OutcomeKind.FAILED
    assert asked.times == 0


# -------------------------------------------------------------------------------------------------------------- fenced
async def test_nobody_takes_the_saga_while_it_is_asked_about(bench: Bench, one: Station, two: Station) -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def slow(order: dict[str, Any], tx: Tx) -> Answer:
        begun.set()
        await go_on.wait()
        return DONE

    handler = saga(Asked(DONE).book, reconcile=slow)
    await lost(bench, one, handler)
    one.register(bench)
    run = asyncio.create_task(one.resume(handler))
    await begun.wait()
    bench.expire(one)
    assert await two.take(handler) is None
    go_on.set()
    assert (await run).result == b'"was done"'


async def test_a_worker_that_was_overtaken_asks_nothing(bench: Bench, one: Station, two: Station) -> None:
    asked = Asked(DONE)
    handler = asked.handler()
    await lost(bench, one, handler)
    one.register(bench)
    overtaken = await one.take(handler)
    assert overtaken is not None
    bench.expire(one)
    assert await two.take(handler) is not None
    outcome = await one.run(Work.of(handler, order(), leased=overtaken))
    assert (outcome.kind, asked.times, bench.effects) == (OutcomeKind.FENCED, 0, [])


async def test_a_commit_inside_the_question_is_refused(bench: Bench, one: Station, two: Station) -> None:
    async def commits(order: dict[str, Any], tx: Tx) -> Answer:
        await put(tx, "escaped")
        await tx.connection.commit()
        return DONE

    handler = saga(Asked(DONE).book, reconcile=commits)
    await lost(bench, one, handler)
    assert (await two.resume(handler)).kind is OutcomeKind.RETRYING
    assert (bench.effects, bench.state) == ([], State.PROCESSING)


@pytest.mark.parametrize("committed", [True, False])
async def test_a_lost_answer_to_its_commit_is_found_out(
    bench: Bench, one: Station, two: Station, committed: bool
) -> None:
    asked = Asked(DONE)
    handler = asked.handler()
    completion: Callable[[LeasedSaga], Any] = two.leases.completion
    loses = [True]

    @asynccontextmanager
    async def losing(saga: LeasedSaga) -> AsyncIterator[Any]:
        async with completion(saga) as opened:
            yield opened
            if loses.pop() if loses else False:
                raise CommitUnknown("lost")

    @asynccontextmanager
    async def dropping(saga: LeasedSaga) -> AsyncIterator[Any]:
        async with completion(saga) as opened:
            if loses.pop() if loses else False:
                raise CommitUnknown("lost")
            yield opened

    two.leases.completion = losing if committed else dropping  # type: ignore[method-assign]
    await lost(bench, one, handler)
    outcome = await two.resume(handler)
    assert (outcome.result, bench.state, bench.effects) == (b'"was done"', State.COMPLETED, ["asked"])


# ----------------------------------------------------------------------------------------------------------- at import
class Client:
    """A resource."""


async def client() -> AsyncIterator[Client]:
    yield Client()


async def with_client(order: dict[str, Any], tx: Tx, client: Client) -> Answer:
    return Done(type(client).__name__)


async def test_it_is_given_what_a_handler_is_given(bench: Bench, one: Station, two: Station) -> None:
    given = decorate("memory:orders", key="id", name="book", reconcile=with_client)(Asked(DONE).book)
    handler = given.plan.bind("shop", resources={Client: Client()})
    await lost(bench, one, handler)
    assert (await two.resume(handler)).result == b'"Client"'


def test_a_resource_that_it_needs_must_be_there() -> None:
    app = App("shop")
    app.idempotent_handler("memory:orders", key="id", reconcile=with_client)(Asked(DONE).book)
    with pytest.raises(HandlerError, match="parameter `client` is of type Client"):
        app.bound_handlers(Settings())
    app.resource(client)
    (bound,) = app.bound_handlers(Settings())
    assert app.handlers[bound.name].plan.resource_parameters == (("client", Client),)


async def joined(order: dict[str, Any], tx: Tx) -> None: ...
async def asks_for_saga(order: dict[str, Any], saga: Saga) -> Answer:
    return DONE


async def other_payload(order: list[int], tx: Tx) -> Answer:
    return DONE


async def batch(orders: Batch[dict[str, Any]], tx: Tx) -> None: ...


@pytest.mark.parametrize(
    ("fn", "reconcile", "says"),
    [
        (joined, with_client, "`reconcile` is only for sagas, and for handlers with `max_age`; remove it"),
        (asks_for_saga, asks_for_saga, "`reconcile` takes Saga; take Tx"),
        (asks_for_saga, other_payload, "`reconcile` takes list; it gets the handler's payload; annotate it as dict"),
        (asks_for_saga, batch, "`reconcile` takes a Batch of dict; it gets the handler's payload; annotate it as dict"),
        (asks_for_saga, "sql", "`reconcile` is 'sql'; write an async function of the payload and Tx"),
    ],
)
def test_one_that_cannot_be_asked_is_refused_at_import(fn: Any, reconcile: Any, says: str) -> None:
    with pytest.raises(HandlerError) as error:
        decorate("memory:orders", key="id", reconcile=reconcile)(fn)
    assert says in str(error.value)
