"""What is published with tx= to another broker: stored with its transaction, then relayed (X1 to X8)."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Sequence
from typing import Any
from uuid import UUID

import psycopg
import pytest

from idemconsumer import App, BrokerUnavailable, ConfigurationError, Reject, Saga, Tx
from idemconsumer.admin.doctor import diagnose
from idemconsumer.admin.outgoing_messages import Outbox, OutgoingChoice
from idemconsumer.admin.status import status
from idemconsumer.message.reply_address import MESSAGE_ID
from idemconsumer.ports.broker import Outgoing, Unsent
from idemconsumer.worker.outgoing import OutgoingLane
from idemconsumer.worker.relay_connections import MOST
from tests.support.foreign import FOREIGN
from tests.support.inside import give_settings
from tests.support.logs import LogCapture, entries, times
from tests.support.relaying import Taking
from tests.support.tuning import tuned
from tests.support.workers import SCHEMA, Bench, Item, Running, connected, note

KAFKA = "127.0.0.1:1"  # an address, so that there is somebody to relay


@pytest.fixture
def taking() -> Taking:
    return Taking()


@pytest.fixture
def bench(bench: Bench, taking: Taking, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return connected(bench, monkeypatch, kafka=taking, rabbitmq=taking)


def quiet() -> App:
    """Which has something to consume, and nothing to publish."""
    app = App("quiet")

    @app.idempotent_handler("postgres:nothing", key="id")
    async def handle(item: Item, tx: Tx) -> None:
        await note(tx, item)

    return app


def publish(bench: Bench, *bodies: str, to: str = "kafka:b", key: str | None = None) -> None:
    for each in bodies:
        bench.do("select idemconsumer.publish_bytes(%s, %s, %s)", to, each.encode(), key)


def left(bench: Bench) -> list[bytes]:
    return [bytes(body) for (body,) in bench.do("select body from idemconsumer.outbox order by id")]


async def gone(running: Running, bench: Bench) -> None:
    await running.until(lambda: left(bench) == [])


@pytest.mark.parametrize(("queue", "level"), [("kafka:invoices", "on"), ("emails", "off")])
def test_a_transaction_that_publishes_waits_for_the_disk(bench: Bench, queue: str, level: str) -> None:
    """X9. A queue in the same database goes with its message."""
    asked = "select current_setting('synchronous_commit')"
    with psycopg.connect(bench.dsn, autocommit=True, options="-c synchronous_commit=off") as connection:
        with connection.transaction():
            connection.execute("select idemconsumer.publish(%s, '1')", (queue,))
            assert connection.execute(asked).fetchone() == (level,)
        assert connection.execute(asked).fetchone() == ("off",)


@pytest.mark.parametrize("destination", ["Kafka:invoices", "SQS:invoices", " rabbitmq:invoices", "POSTGRES:invoices"])
def test_a_destination_that_is_almost_a_broker_s_is_no_queue(bench: Bench, destination: str) -> None:
    """X1. Nobody would read it."""
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="names no broker") as refused:
        bench.do("select idemconsumer.publish(%s, '1')", destination)
    assert f"or postgres:{destination} if that is" in str(refused.value)
    bench.do("select idemconsumer.publish(%s, '1')", f"postgres:{destination}")
    bench.do("select idemconsumer.publish('kafka', '1'), idemconsumer.publish('Kafkaesque', '1')")
    assert bench.do("select name from idemconsumer.queue order by id") == [(destination,), ("kafka",), ("Kafkaesque",)]


async def test_it_goes_out_if_and_only_if_its_transaction_commits(bench: Bench, taking: Taking) -> None:
    app = App("shop")

    @app.idempotent_handler("postgres:orders", key="id", group_size=8)
    async def order(item: Item, tx: Tx) -> None:
        await app.publish("kafka:b", {"id": item.id}, key=item.id, headers={"n": "v"}, tx=tx)
        await note(tx, item)
        if item.id == "refused":
            raise Reject("no")

    @app.idempotent_handler("postgres:rides", key="id")
    async def ride(item: Item, saga: Saga) -> None:
        await saga.tx("told", tell, item)

    async def tell(tx: Tx, item: Item) -> None:
        await app.publish("kafka:b", {"id": item.id}, key=item.id, tx=tx)

    bench.enqueue("orders", Item("a"), Item("refused"), Item("b"), Item("a"))
    bench.enqueue("rides", Item("r"))
    with psycopg.connect(bench.dsn) as connection:
        connection.execute("select idemconsumer.publish('kafka:b', '{\"id\": \"sql\"}')")
        connection.execute("savepoint s")
        connection.execute("select idemconsumer.publish('kafka:b', '{\"id\": \"undone\"}')")
        connection.execute("rollback to s")
    give_settings(app, bench.settings())
    async with await psycopg.AsyncConnection.connect(bench.dsn) as connection_of_mine:
        await app.publish("kafka:b", {"id": "rolled back"}, tx=connection_of_mine)  # type: ignore[arg-type]
        await connection_of_mine.rollback()
    await bench.until_empty(app, kafka=KAFKA)
    sent = sorted(taking.bodies)
    assert sent == [b'{"id": "sql"}', b'{"id":"a"}', b'{"id":"b"}', b'{"id":"r"}']
    assert left(bench) == []
    (of_a,) = (message for _, message in taking.sent if message.body == b'{"id":"a"}')
    assert (of_a.key, of_a.headers["n"]) == ("a", "v")
    assert UUID(str(of_a.headers[MESSAGE_ID])).int


async def test_the_message_id_is_the_rows_or_the_key_that_it_was_given(bench: Bench, taking: Taking) -> None:
    publish(bench, "1", "2")
    publish(bench, "3", to="rabbitmq:emails", key="mine")
    publish(bench, "4", to="rabbitmq:emails")
    stored = {bytes(body): str(number) for body, number in bench.do("select body, message_id from idemconsumer.outbox")}
    await bench.until_empty(quiet(), kafka=KAFKA, rabbitmq="amqp://127.0.0.1:1")
    found = {message.body: message for _, message in taking.sent}
    assert [found[body].headers[MESSAGE_ID] for body in (b"1", b"2")] == [stored[b"1"], stored[b"2"]]
    assert (found[b"3"].key, found[b"4"].key) == ("mine", stored[b"4"])
    assert len(set(stored.values())) == 4


async def test_headers_that_are_passed_on_do_not_pass_on_the_id_of_another_message(
    bench: Bench, taking: Taking
) -> None:
    passed_on = f'{{"{MESSAGE_ID}": "of the message that was handled", "n": "v"}}'
    for _ in range(2):
        bench.do("select idemconsumer.publish('kafka:b', '1', headers => %s::jsonb)", passed_on)
    stored = [str(number) for (number,) in bench.do("select message_id from idemconsumer.outbox order by id")]
    await bench.until_empty(quiet(), kafka=KAFKA)
    assert [message.headers for _, message in taking.sent] == [{"n": "v", MESSAGE_ID: each} for each in stored]


async def test_a_queue_may_have_any_name_and_postgres_may_stand_before_it(bench: Bench) -> None:
    app = App("odd")

    @app.idempotent_handler("postgres:kafka:b", "postgres:plain", key="id")
    async def handle(item: Item, tx: Tx) -> None:
        await note(tx, item)
        if item.id == "first":
            await app.publish("postgres:kafka:b", {"id": "second"}, tx=tx)

    give_settings(app, bench.settings())
    await app.publish("postgres:kafka:b", {"id": "first"})
    bench.do("select idemconsumer.publish('postgres:plain', '{\"id\": \"third\"}')")
    await bench.until_empty(app)
    assert sorted(bench.effects()) == ["first", "second", "third"]
    assert left(bench) == []


async def test_with_a_delay_it_goes_out_later(bench: Bench, taking: Taking) -> None:
    bench.do("select idemconsumer.publish('kafka:b', '1', delay => interval '3 days')")
    publish(bench, "2")
    await bench.until_empty(quiet(), kafka=KAFKA)
    assert taking.bodies == [b"2"]
    async with bench.running(quiet(), kafka=KAFKA) as running:
        bench.do("update idemconsumer.outbox set due_at = clock_timestamp()")  # the days until then
        await gone(running, bench)
    assert taking.bodies == [b"2", b"1"]


async def test_what_nothing_announced_is_found_within_seconds(bench: Bench, taking: Taking) -> None:
    publish(bench, "1")
    async with bench.running(quiet(), kafka=KAFKA) as running:
        await gone(running, bench)  # what was there at the start
        bench.do("insert into idemconsumer.outbox (destination, body) values ('kafka:c', '2')")
        await gone(running, bench)
    assert taking.bodies == [b"1", b"2"]


async def test_what_is_not_confirmed_stays(bench: Bench, taking: Taking) -> None:
    taking.held.clear()
    publish(bench, "1")

    async def left_while_it_sends() -> None:
        async with bench.running(quiet(), kafka=KAFKA) as running:
            await running.until(lambda: taking.asked == 1)
            assert left(bench) == [b"1"]
            running.worker.abort()
            await asyncio.gather(running.task, return_exceptions=True)

    with pytest.raises(asyncio.CancelledError):
        await left_while_it_sends()
    assert left(bench) == [b"1"]
    assert taking.sent == []


async def test_one_relay_at_a_time_sends_to_a_destination(
    bench: Bench, taking: Taking, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = list[int | None]()
    its_round = OutgoingLane._round

    async def watched(lane: OutgoingLane, connection: Any) -> int | None:
        rounds.append(found := await its_round(lane, connection))
        return found

    monkeypatch.setattr(OutgoingLane, "_round", watched)
    taking.held.clear()
    publish(bench, *map(str, range(5)))
    async with bench.running(quiet(), kafka=KAFKA) as one:
        await one.until(lambda: taking.asked == 1)
        async with bench.running(quiet(), kafka=KAFKA) as other:
            await other.until(lambda: None in rounds or taking.asked > 1)
            publish(bench, "elsewhere", to="kafka:c")
            await other.until(lambda: taking.asked == 2)
            taking.held.set()
            await gone(other, bench)
    assert sorted(taking.bodies) == [b"0", b"1", b"2", b"3", b"4", b"elsewhere"]


async def test_what_the_last_relay_has_sent_is_not_read_again(bench: Bench, taking: Taking) -> None:
    """The one that comes next looks after it has the lock, not before."""
    publish(bench, "1")
    async with await psycopg.AsyncConnection.connect(bench.dsn) as last:
        lock = "select pg_advisory_xact_lock(hashtextextended('idemconsumer.outbox.idemconsumer.kafka:b', 0))"
        await last.execute(lock)
        await last.execute("delete from idemconsumer.outbox")
        async with bench.running(quiet(), kafka=KAFKA) as running:
            publish(bench, "2", to="kafka:c")
            await running.until(lambda: taking.bodies == [b"2"] and left(bench) == [b"1"])
            await last.commit()
            publish(bench, "3")
            await gone(running, bench)
    assert taking.bodies == [b"2", b"3"]


async def test_a_refused_message_stops_its_key_until_it_is_parked_and_no_other(
    bench: Bench, taking: Taking, logged: LogCapture, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait = {"seconds": 3600.0}
    monkeypatch.setattr("idemconsumer.worker.outgoing.next_try", lambda tries: wait["seconds"] if tries < 3 else None)
    taking.refused = {b"poison"}
    publish(bench, "a1", "poison", "a2", key="a")
    publish(bench, "b1", key="b")
    publish(bench, "none")
    async with bench.running(quiet(), kafka=KAFKA) as running:
        await running.until(lambda: left(bench) == [b"poison", b"a2"])
        publish(bench, "b2", key="b")
        publish(bench, "a3", key="a")
        await running.until(lambda: b"b2" in taking.bodies)
        await running.until(lambda: left(bench) == [b"poison", b"a2", b"a3"])
        wait["seconds"] = 0.0
        bench.do("update idemconsumer.outbox set due_at = clock_timestamp() where due_at is not null")
        await running.until(lambda: left(bench) == [b"poison"])
    assert [each for each in taking.bodies if each.startswith(b"a")] == [b"a1", b"a2", b"a3"]
    assert taking.bodies.index(b"b1") < taking.bodies.index(b"b2")
    (parked,) = await Outbox(bench.dsn, SCHEMA).messages(OutgoingChoice(parked=True))
    assert (parked.key, parked.tries, parked.error) == ("a", 3, "it is not to my taste")
    (said,) = entries(logged, "outgoing message parked, later messages with its key go on")
    assert (said["destination"], said["message"], said["key"]) == ("kafka:b", parked.id, "a")
    assert times(logged, "outgoing message refused, will retry") == 2
    assert [b"poison"] in taking.calls, "alone, the second time"

    # A person has it sent again.
    taking.refused.clear()
    async with bench.running(quiet(), kafka=KAFKA) as running:
        assert await Outbox(bench.dsn, SCHEMA).retry(OutgoingChoice(ids=[parked.id]), by="ann") == 1
        await gone(running, bench)
    (again,) = (message for _, message in taking.sent if message.body == b"poison")
    assert again.headers[MESSAGE_ID] == parked.message_id


async def test_a_refused_message_under_a_key_that_no_index_holds_is_parked_at_once(
    bench: Bench, taking: Taking
) -> None:
    """Else nothing of its destination would be marked as sent, and all be sent again and again."""
    taking.refused = {b"poison"}
    publish(bench, "poison", "a2", key=secrets.token_hex(4_000))
    publish(bench, "b1", key="b")
    async with bench.running(quiet(), kafka=KAFKA) as running:
        await running.until(lambda: left(bench) == [b"poison"])
    assert sorted(taking.bodies) == [b"a2", b"b1"]
    (parked,) = await Outbox(bench.dsn, SCHEMA).messages(OutgoingChoice(parked=True))
    assert (parked.tries, parked.error) == (1, "it is not to my taste")


async def test_a_refusal_that_no_column_holds_marks_what_was_sent(
    bench: Bench, taking: Taking, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broker's error may quote the message that it refuses."""
    monkeypatch.setattr("idemconsumer.worker.outgoing.next_try", lambda tries: None)
    taking.refused, taking.reason = {b"poison"}, "not a\0b\ud800"
    publish(bench, "poison", key="a")
    publish(bench, "b1", key="b")
    async with bench.running(quiet(), kafka=KAFKA) as running:
        await running.until(lambda: left(bench) == [b"poison"])
    assert taking.bodies == [b"b1"]
    (parked,) = await Outbox(bench.dsn, SCHEMA).messages(OutgoingChoice(parked=True))
    assert parked.error == "not a�b?"


async def test_a_destination_that_is_away_delays_its_own_messages_and_is_said_once(
    bench: Bench, taking: Taking, logged: LogCapture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("idemconsumer.worker.outgoing.next_look", lambda failures, jitter: 0.02)
    taking.away = {"b"}
    publish(bench, "1", "2", key="k")
    async with bench.running(quiet(), kafka=KAFKA) as running:
        await running.until(lambda: taking.asked >= 3)
        publish(bench, "c", to="kafka:c")
        await running.until(lambda: taking.bodies == [b"c"] and left(bench) == [b"1", b"2"])
        assert bench.do("select tries from idemconsumer.outbox") == [(0,), (0,)]
        taking.away.clear()
        await gone(running, bench)
    assert taking.bodies == [b"c", b"1", b"2"]
    (said,) = entries(logged, "outgoing messages cannot be relayed, will retry")
    assert (said["destination"], said["error"]) == ("kafka:b", "b is away")
    assert times(logged, "outgoing messages are relayed again") == 1


async def test_an_outage_while_the_one_at_fault_is_looked_for_ends_the_round(
    bench: Bench, taking: Taking, logged: LogCapture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One more of its time-outs for each row, and the transaction was ended beneath it (X4)."""
    calls = list[int]()

    async def relay(name: str, messages: Sequence[Outgoing]) -> list[Unsent | None]:
        calls.append(len(messages))
        if len(messages) > 1:
            raise RuntimeError("one of them is at fault")
        raise BrokerUnavailable("it is away")

    monkeypatch.setattr(taking, "relay", relay)
    monkeypatch.setattr("idemconsumer.worker.outgoing.next_look", lambda failures, jitter: 3600.0)
    publish(bench, "1", "2", "3")
    async with bench.running(quiet(), kafka=KAFKA) as running:
        await running.until(lambda: times(logged, "outgoing messages cannot be relayed, will retry") == 1)
    assert calls == [3, 1]
    assert left(bench) == [b"1", b"2", b"3"]


@pytest.mark.parametrize("error", FOREIGN)
async def test_what_a_client_raises_counts_against_no_message(
    bench: Bench, taking: Taking, logged: LogCapture, monkeypatch: pytest.MonkeyPatch, error: str
) -> None:
    """X10. At each of its first calls, and for ever for one of the messages."""
    monkeypatch.setattr("idemconsumer.worker.outgoing.next_look", lambda failures, jitter: 0.02)
    relay, bad = taking.relay, list[int]([1, 2])

    async def raising(name: str, messages: Sequence[Outgoing]) -> list[Unsent | None]:
        if bad or any(message.body == b"odd" for message in messages):
            if bad:
                bad.pop()
            raise FOREIGN[error]()
        return await relay(name, messages)

    monkeypatch.setattr(taking, "relay", raising)
    publish(bench, "a1", "odd", "a2", key="a")
    publish(bench, "b1", key="b")
    async with bench.running(quiet(), kafka=KAFKA) as running:
        await running.until(lambda: left(bench) == [b"odd", b"a2"])
        assert bench.do("select tries, due_at from idemconsumer.outbox order by id") == [(0, None), (0, None)]
        assert times(logged, "outgoing messages cannot be relayed, will retry") == 1
        monkeypatch.setattr(taking, "relay", relay)
        await gone(running, bench)
    assert [each for each in taking.bodies if each != b"b1"] == [b"a1", b"odd", b"a2"]


async def test_what_is_in_hand_is_bounded_in_rows_and_bytes(
    bench: Bench, taking: Taking, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned(monkeypatch, outgoing_messages=4)
    publish(bench, *map(str, range(10)))
    await bench.until_empty(quiet(), kafka=KAFKA)
    assert max(map(len, taking.calls)) == 4
    tuned(monkeypatch, outgoing_bytes=1_000)
    taking.calls.clear()
    publish(bench, *("x" * 600 for _ in range(8)))
    await bench.until_empty(quiet(), kafka=KAFKA)
    assert (max(map(len, taking.calls)), left(bench)) == (2, [])


async def test_many_destinations_share_few_connections(bench: Bench, taking: Taking) -> None:
    taking.held.clear()
    for number in range(MOST + 4):
        publish(bench, str(number), to=f"kafka:b{number}")
    async with bench.running(quiet(), kafka=KAFKA, rabbitmq="amqp://127.0.0.1:1") as running:
        await running.until(lambda: taking.asked >= MOST)
        publish(bench, "r", to="rabbitmq:emails")
        await running.until(lambda: [b"r"] in taking.calls)
        assert taking.asked == MOST + 1, "and another broker has its own"
        connections = "select count(*) from pg_stat_activity where application_name like '%outbox'"
        assert bench.do(connections) == [(MOST + 1,)]
        taking.held.set()
        await gone(running, bench)
    assert len(taking.sent) == MOST + 5


async def test_what_the_database_refuses_to_the_relay_alone_is_said(
    bench: Bench, taking: Taking, logged: LogCapture
) -> None:
    bench.do("alter table idemconsumer.outbox rename to elsewhere")
    bench.do(
        "create view idemconsumer.outbox as select * from idemconsumer.elsewhere limit 10"
    )  # of which nothing goes
    bench.do("insert into idemconsumer.elsewhere (destination, body) values ('kafka:b', '1')")
    async with bench.running(quiet(), kafka=KAFKA) as running:
        await running.until(lambda: times(logged, "outgoing messages cannot be relayed, will retry") == 1)
    (said,) = entries(logged, "outgoing messages cannot be relayed, will retry")
    assert "outbox" in said["error"]


async def test_what_nobody_can_relay_is_left_to_others_and_said(bench: Bench, taking: Taking) -> None:
    publish(bench, "1", to="rabbitmq:emails")
    publish(bench, "2")
    async with bench.running(quiet(), kafka=KAFKA) as running:
        await running.until(lambda: taking.bodies == [b"2"] and left(bench) == [b"1"])
        await running.until(lambda: bench.do("select 1 from idemconsumer.process") != [])
        found = await status(bench.dsn, SCHEMA)
        (line,) = found.outbox
        assert (line.destination, line.waiting, line.parked, line.relayed) == ("rabbitmq:emails", 1, 0, False)
        (said,) = (each for each in await diagnose(bench.dsn, SCHEMA) if each.subject.startswith("outbox"))
        assert re.search("no live worker on record relays to rabbitmq; .*IDEMCONSUMER_RABBITMQ", said.text)
    assert left(bench) == [b"1"]


async def test_an_impossible_destination_is_said_and_holds_nothing_up(
    bench: Bench, taking: Taking, logged: LogCapture
) -> None:
    bench.do("insert into idemconsumer.outbox (destination, body, headers) values ('kafka:no such topic', '1', '{}')")
    publish(bench, "2")
    await bench.until_empty(quiet(), kafka=KAFKA)
    assert (taking.bodies, left(bench)) == ([b"2"], [b"1"])
    assert times(logged, "outgoing messages cannot be relayed by this worker") == 1


async def test_a_name_that_no_index_holds_is_refused_in_words(bench: Bench) -> None:
    app, long = quiet(), secrets.token_hex(1_000)
    give_settings(app, bench.settings())
    for destination in ("kafka:" + long, "rabbitmq:" + long, long):
        with pytest.raises(psycopg.errors.InvalidParameterValue, match=rf"has {len(destination)} bytes") as refused:
            bench.do("select idemconsumer.publish(%s, '1')", destination)
        assert "Write one of at most 1000" in str(refused.value)
    async with await psycopg.AsyncConnection.connect(bench.dsn) as connection:
        for tx in (None, connection):
            with pytest.raises(ConfigurationError, match="has 2009 bytes; write a name of at most 1000"):
                await app.publish("postgres:" + long, 1, tx=tx)  # type: ignore[arg-type]
    longest = "ä" * 495 + "q"
    bench.do("select idemconsumer.publish(%s, '1')", f"postgres:{longest}")
    await app.publish(f"postgres:{longest}", 1)
    await app.close()
    assert bench.do("select count(*) from idemconsumer.queue where name = %s", longest) == [(2,)]


async def test_what_is_in_memory_is_in_no_transaction(bench: Bench) -> None:
    app = quiet()
    give_settings(app, bench.settings())
    async with await psycopg.AsyncConnection.connect(bench.dsn) as connection:
        with pytest.raises(ConfigurationError, match="memory: has no transactions"):
            await app.publish("memory:b", 1, tx=connection)  # type: ignore[arg-type]


async def test_few_messages_of_each_of_many_destinations_raise_its_low_water(bench: Bench) -> None:
    """P9. What is gone is counted by the process, for all lanes together, and these end meanwhile."""
    async with bench.running(quiet(), kafka=KAFKA) as running:
        for user in ["a", "b"]:
            publish(bench, *["x"] * 110, to=f"kafka:{user}")
            await gone(running, bench)
        await running.until(
            lambda: bench.do("select name from idemconsumer.low_water where line = 'outbox'") == [("",)]
        )
