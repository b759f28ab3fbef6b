"""A dead letter is run once more, once, and what came of it is on record (O1 to O4)."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
from msgspec.structs import replace

from idemconsumer import App, Message, Reject, Saga, Tx
from idemconsumer.admin import redrives as runs
from idemconsumer.admin.dead_letters import ALL, Admin, DeadLetterDetail, Redrive, Which
from idemconsumer.admin.redrives import Redrives
from idemconsumer.message.delivered import encode_delivered
from idemconsumer.message.headers import decode_headers, encode_headers
from idemconsumer.message.origin import restored
from idemconsumer.ports.broker import Outgoing
from idemconsumer.ports.observer import Point
from idemconsumer.rules.redriven import Redriven
from idemconsumer.rules.values import State
from tests.support.tuning import tuned
from tests.support.workers import SCHEMA, Bench, Item, body, note
from tests.worker.crashes import payment, work
from tests.worker.crashing_worker import PAYMENTS


class Service:
    """A handler with a bug until `mended`, which remembers what it was given."""

    def __init__(self, **options: Any) -> None:
        self.app = App("shop")
        self.act: Callable[[Message], object] = self.buggy
        self.seen: list[Message] = []
        options = {"backoff": "10ms, 10ms", "key": "id", "max_attempts": 2, **options}

        @self.app.idempotent_handler("memory:q", **options)
        async def handle(item: Item, tx: Tx, message: Message) -> None:
            await note(tx, item)
            self.seen.append(message)
            self.act(message)

    def buggy(self, message: Message) -> None:
        raise ValueError("a bug")

    def mend(self) -> None:
        self.seen.clear()
        self.act = lambda _: None


async def redrive(bench: Bench, which: Which = ALL, run: str = "r", **more: Any) -> dict[Redriven, int]:
    return dict((await Redrives(bench.dsn, SCHEMA).redrive(which, by="ann", run=run, **more)).counts)


async def letters(bench: Bench, *, redriven: bool = False) -> list[DeadLetterDetail]:
    return [each async for each in Admin(bench.dsn, SCHEMA).export(Which(redriven=redriven))]


async def traces(bench: Bench, letter: DeadLetterDetail) -> list[Redrive]:
    return await Admin(bench.dsn, SCHEMA).redrives(letter)


def states(bench: Bench) -> list[State]:
    return [State(state) for (state,) in bench.do("select state from idemconsumer.record order by changed_at")]


def rows(bench: Bench) -> tuple[int, int, int]:
    """How many messages are delayed, in queues, but for forwarded letters, and on record as tried."""
    ((delayed,),) = bench.do("select count(*) from idemconsumer.delayed")
    ((queued,),) = bench.do("select count(*) from idemconsumer.queue where name <> 'letters'")
    ((tried,),) = bench.do("select count(*) from idemconsumer.attempt")
    return delayed, queued, tried


async def test_it_runs_once_with_all_that_its_broker_gave_and_attempts_anew(bench: Bench) -> None:
    service = Service()
    await bench.broker.publish("q", [Outgoing(body(Item("a")), {"n": "v"}, "m-1")])
    await bench.until_empty(service.app)
    first = service.seen[0]
    assert (bench.effects(), states(bench)) == ([], [State.DEAD])

    assert await redrive(bench) == {Redriven.REDRIVES: 1}
    assert (states(bench), rows(bench), await letters(bench)) == ([State.PENDING], (0, 1, 0), [])
    (letter,) = await letters(bench, redriven=True)
    assert letter.redriven_at is not None
    assert [each.outcome for each in await traces(bench, letter)] == ["waiting"]
    assert await redrive(bench) == {}, "it is no letter at the moment"

    service.mend()
    assert (await bench.until_empty(service.app)).counts == {"applied": 1}
    assert service.seen == [replace(first, attempt=1)]
    assert (bench.effects(), states(bench), rows(bench)) == (["a"], [State.COMPLETED], (0, 0, 0))
    (trace,) = await traces(bench, letter)
    assert (trace.outcome, trace.by, trace.run, trace.ended_at is not None) == ("applied", "ann", "r", True)

    await bench.publish("q", Item("a"))
    assert (await bench.until_empty(service.app)).counts == {"duplicate": 1}


@pytest.mark.parametrize(
    ("source", "given", "order"),
    [
        ("kafka:orders", {"record_key": b"user-1"}, b"user-1"),
        ("sqs:orders.fifo", {"headers": {"MessageGroupId": "user-1"}}, "user-1"),
        ("sqs:orders", {"headers": {"MessageGroupId": "user-1"}}, None),
    ],
)
async def test_it_stays_behind_its_neighbours_of_the_same_order(
    source: str, given: dict[str, Any], order: str | bytes | None
) -> None:
    """In the same lane as what its broker delivers in that order."""
    letter = Message(source, b"{}", order_hint=order, **given)
    row = {"id": 1, "scope": "shop/-/handle", "source": source, "position": "p", "key": None}
    stored = {"headers": encode_headers(letter.headers), "delivered": encode_delivered(letter)}
    queue, headers = runs.ticket(row | stored)
    back = restored(Message(f"postgres:{queue}", b"{}", decode_headers(headers)))
    assert back is not None
    assert back.order_hint == order


async def test_what_fails_again_is_a_letter_again_that_says_so(bench: Bench) -> None:
    service = Service(fail_on=(), max_attempts=1)
    await bench.publish("q", Item("a"))
    await bench.until_empty(service.app)

    def other_bug(message: Message) -> None:
        raise KeyError("another bug")

    service.act = other_bug
    await redrive(bench)
    await bench.until_empty(service.app)
    (letter,) = await letters(bench)
    assert (letter.reason, letter.error.split(" ")[0], letter.arrivals) == ("attempts_exhausted", "KeyError:", 2)
    assert [each.outcome for each in await traces(bench, letter)] == ["dead"]

    service.mend()
    assert await redrive(bench) == {}, "of the same run each letter is redriven once"
    assert await redrive(bench, run="second") == {Redriven.REDRIVES: 1}
    await bench.until_empty(service.app)
    assert (bench.effects(), states(bench), await letters(bench)) == (["a"], [State.COMPLETED], [])
    assert [each.outcome for each in await traces(bench, letter)] == ["dead", "applied"]


async def test_a_rejection_is_an_outcome_too(bench: Bench) -> None:
    service = Service()
    await bench.publish("q", Item("a"))
    await bench.until_empty(service.app)

    def refuse(message: Message) -> None:
        raise Reject("no")

    service.act = refuse
    await redrive(bench)
    await bench.until_empty(service.app)
    (letter,) = await letters(bench, redriven=True)
    assert ([each.outcome for each in await traces(bench, letter)], states(bench)) == (["rejected"], [State.FAILED])


async def test_it_may_be_put_off_like_any_other(bench: Bench) -> None:
    service = Service(backoff="1h, 1h")
    await bench.publish("q", Item("a"))
    await bench.until_empty(service.app)
    bench.do("update idemconsumer.delayed set due_at = clock_timestamp()")
    await bench.until_empty(service.app)
    await redrive(bench)
    await bench.until_empty(service.app)
    (letter,) = await letters(bench, redriven=True)
    assert (states(bench), rows(bench)) == ([State.PENDING], (1, 0, 1)), "an attempt failed, and another one follows"
    assert [each.outcome for each in await traces(bench, letter)] == ["waiting"]
    bench.do("update idemconsumer.delayed set due_at = clock_timestamp()")
    await bench.until_empty(service.app)
    (letter,) = await letters(bench)
    assert [each.outcome for each in await traces(bench, letter)] == ["dead"]


@pytest.mark.parametrize("in_turn", [False, True])
@pytest.mark.parametrize("payload", [Item("a"), b"{"], ids=["keyed", "unread"])
async def test_two_at_the_same_time_give_one_run(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, payload: Item | bytes, in_turn: bool
) -> None:
    service = Service()
    await bench.publish("q", payload)
    await bench.until_empty(service.app)
    bench.do("update idemconsumer.dead_letter set body = %s, body_size = null", body(Item("a")))
    both, first_done = asyncio.Barrier(2), asyncio.Event()
    act = Redrives._redrive

    async def together(self: Redrives, connection: Any, row: Any, run: str, by: str, **more: Any) -> Redriven:
        await both.wait()  # both have read the letter
        if in_turn and run == "other":
            await first_done.wait()
        verdict = await act(self, connection, row, run, by, **more)
        if not in_turn:
            await both.wait()  # neither has committed
        return verdict

    monkeypatch.setattr(Redrives, "_redrive", together)
    other = asyncio.create_task(redrive(bench, run="other"))
    async with asyncio.timeout(30):
        one = await redrive(bench, run="one")
        first_done.set()
        verdicts = sorted([*one, *await other])
    assert verdicts == sorted([Redriven.REDRIVES, Redriven.REDRIVEN if in_turn else Redriven.BUSY])
    assert rows(bench)[1] == 1
    service.mend()
    await bench.until_empty(service.app)
    assert (bench.effects(), len(service.seen)) == (["a"], 1)


@pytest.mark.parametrize("state", [State.COMPLETED, State.FAILED, State.PENDING])
async def test_a_key_that_is_not_dead_is_left_alone(bench: Bench, state: State) -> None:
    service = Service()
    await bench.publish("q", Item("a"))
    await bench.until_empty(service.app)
    with psycopg.connect(bench.dsn) as connection:
        connection.execute("select set_config('idemconsumer.open', 't', true)")
        connection.execute("update idemconsumer.record set state = %s", [int(state)])
        connection.execute("select idemconsumer.seal('t')")
    assert await redrive(bench) == {Redriven.DECIDED: 1}
    assert (states(bench), rows(bench)[1], len(await letters(bench))) == ([state], 0, 1)


async def test_a_key_that_somebody_claims_is_not_waited_for(bench: Bench) -> None:
    service = Service()
    await bench.publish("q", Item("a"))
    await bench.until_empty(service.app)
    ((key,),) = bench.do("select key from idemconsumer.record")
    with psycopg.connect(bench.dsn) as connection:
        lock = "select pg_advisory_xact_lock(('x' || encode(substring(%s::bytea for 8), 'hex'))::bit(64)::bigint)"
        connection.execute(lock, [key])
        assert await redrive(bench) == {Redriven.BUSY: 1}
    assert await redrive(bench) == {Redriven.REDRIVES: 1}, "the same run: it was not redriven yet"


async def test_a_record_that_is_gone_waits_for_the_ticket_too(bench: Bench) -> None:
    service = Service()
    await bench.publish("q", Item("a"))
    await bench.until_empty(service.app)
    bench.do(
        "insert into idemconsumer.attempt (key, scope_id, count, changed_at) select key, scope_id, 1, now()"
        " from idemconsumer.record"
    )  # as one leaves that arrived since
    bench.do("delete from idemconsumer.record")
    await redrive(bench)

    def fail_once(message: Message) -> None:
        if message.attempt == 1:
            raise ValueError

    service.act = fail_once
    await bench.publish("q", Item("a"))
    await bench.until_empty(service.app)
    assert (bench.effects(), states(bench)) == (["a"], [State.COMPLETED])


async def test_what_had_no_key_is_redriven_as_it_was_delivered(bench: Bench) -> None:
    service = Service()
    service.mend()
    await bench.publish("q", b'{"id": 7}', b'{"id": 8}')
    await bench.until_empty(service.app)
    assert [letter.reason for letter in await letters(bench)] == ["undecodable"] * 2
    await redrive(bench)
    await bench.until_empty(service.app)
    first, second = sorted(await letters(bench), key=lambda letter: letter.position)  # each lane writes its own
    assert (first.arrivals, second.arrivals) == (2, 2), "the same letters again"
    assert [each.outcome for each in await traces(bench, first)] == ["dead"]

    mended = App("shop")

    @mended.idempotent_handler("memory:q", key="id", max_attempts=1)
    async def handle(item: dict[str, int], tx: Tx, message: Message) -> None:
        await note(tx, Item(f"{item['id']} {message.position}"))

    await redrive(bench, Which(ids=[first.id]), run="second")
    await bench.until_empty(mended)
    assert (bench.effects(), states(bench)) == (["7 q#1"], [State.COMPLETED])
    assert [each.outcome for each in await traces(bench, first)] == ["dead", "settled"]
    await bench.publish("q", b'{"id": 7}')
    assert (await bench.until_empty(mended)).counts == {"duplicate": 1}


async def test_what_has_a_key_by_now_fails_under_it(bench: Bench) -> None:
    service = Service()
    await bench.publish("q", b'{"id": 7}')
    await bench.until_empty(service.app)

    def shop(*, wrong: bool) -> App:
        app = App("shop")

        @app.idempotent_handler("memory:q", key="id", max_attempts=1)
        async def handle(item: dict[str, int], tx: Tx) -> None:
            await note(tx, Item("7"))
            if wrong:
                raise ValueError

        return app

    (before,) = await letters(bench)
    await redrive(bench)
    await bench.until_empty(shop(wrong=True))
    (letter,) = await letters(bench)
    assert (letter.reason, letter.key is not None, states(bench)) == ("attempts_exhausted", True, [State.DEAD])
    assert letter.id == before.id
    await redrive(bench, run="second")
    await bench.until_empty(shop(wrong=False))
    assert (bench.effects(), states(bench), await letters(bench)) == (["7"], [State.COMPLETED], [])


async def test_a_handler_of_sagas_gets_what_it_could_not_read(bench: Bench) -> None:
    def shop(payload: Any) -> App:
        app = App("shop")

        async def book(item: Any, saga: Saga) -> None:
            saga_seen.append(item)

        book.__annotations__["item"] = payload
        app.idempotent_handler("memory:q", key="id")(book)
        return app

    saga_seen: list[object] = []
    await bench.publish("q", b'{"id": 7}')
    await bench.until_empty(shop(Item))
    await redrive(bench)
    async with bench.running(shop(dict[str, int])) as running:
        await running.until(lambda: bool(saga_seen))
    assert saga_seen == [{"id": 7}]


async def test_a_saga_that_waits_for_a_person_gets_no_ticket(bench: Bench) -> None:
    app = App("shop")

    @app.idempotent_handler("memory:q", key="id", max_attempts=1)
    async def book(item: Item, saga: Saga) -> None:
        raise ValueError

    await bench.publish("q", Item("a"))
    async with bench.running(app) as running:
        await running.until(lambda: bench.do("select 1 from idemconsumer.dead_letter") != [])
    assert bench.do("select idemconsumer.redrive_letter(id, 'q', '', 'r', 'b') from idemconsumer.dead_letter") == [
        ("saga",)
    ]
    assert await Admin(bench.dsn, SCHEMA).discard(ALL, by="ann") == 0
    assert states(bench) == [State.DEAD]


async def test_what_is_not_whole_is_not_redriven(bench: Bench) -> None:
    service = Service()
    await bench.publish("q", body(Item("a" * 2_000)))
    await bench.until_empty(service.app, max_message_bytes=1_000)
    assert await redrive(bench) == {Redriven.INCOMPLETE: 1}
    assert rows(bench)[1] == 0


async def test_a_run_that_was_killed_goes_on_where_it_was(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned(monkeypatch, letters_of_a_redrive=2)
    service = Service(max_attempts=1)
    await bench.publish("q", *(Item(str(n)) for n in range(5)))
    await bench.until_empty(service.app, concurrency=1)
    assert len(await letters(bench)) == 5

    class Killed(BaseException):
        pass

    def progress(count: int) -> None:
        looked.append(count)
        if len(looked) == 2:
            raise Killed

    looked: list[int] = []
    with pytest.raises(Killed):
        await redrive(bench, progress=progress)
    assert (rows(bench)[1], len(await letters(bench))) == (4, 1)
    await bench.until_empty(service.app)  # they all fail again
    assert len(await letters(bench)) == 5
    assert await redrive(bench) == {Redriven.REDRIVES: 1}
    service.mend()
    await bench.until_empty(service.app)
    assert len(service.seen) == 1
    assert await redrive(bench, run="second") == {Redriven.REDRIVES: 4}


async def test_a_dry_run_changes_nothing_and_a_rate_is_kept(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service(max_attempts=1)
    await bench.publish("q", *(Item(str(n)) for n in range(4)))
    await bench.until_empty(service.app)
    assert await redrive(bench, dry_run=True) == {Redriven.REDRIVES: 4}
    assert (rows(bench)[1], len(await letters(bench))) == (0, 4)
    paused: list[float] = []

    async def sleep(seconds: float) -> None:
        paused.append(seconds)

    monkeypatch.setattr("idemconsumer.admin.redrives.asyncio.sleep", sleep)
    monkeypatch.setattr("idemconsumer.admin.redrives.time", SimpleNamespace(monotonic=lambda: 0.0))
    assert await redrive(bench, rate=5.0) == {Redriven.REDRIVES: 4}
    assert paused == pytest.approx([0.2, 0.4, 0.6, 0.8])


CRASHES = [
    (Point.CLAIMED, 1),
    (Point.SEALING, 1),
    (Point.COMMITTED, 1),
    (Point.SETTLED, 1),
]


@pytest.mark.kill
@pytest.mark.parametrize(("point", "nth"), CRASHES)
def test_a_crash_while_it_runs_at(bench: Bench, point: Point, nth: int) -> None:
    bench.do("drop table effect")
    bench.do("create table effect (id text, amount int)")
    bench.do("select idemconsumer.publish_bytes(%s, %s)", PAYMENTS, b'{"id": "a", "amount": "much"}')
    assert work(bench.dsn) == 0
    bench.do("update idemconsumer.dead_letter set body = %s, body_size = %s", payment("a"), len(payment("a")))
    assert asyncio.run(redrive(bench)) == {Redriven.REDRIVES: 1}
    assert work(bench.dsn, f"{point}:{nth}") == -signal.SIGKILL
    bench.do("update idemconsumer.queue set visible_at = clock_timestamp()")
    assert work(bench.dsn) == 0
    assert bench.do("select id from effect") == [("a",)]
    assert (states(bench), rows(bench)) == ([State.COMPLETED], (0, 0, 0))
