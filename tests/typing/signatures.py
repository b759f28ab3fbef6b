"""How handlers look to a type checker. Checked by mypy --strict for each Python; never run."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from datetime import datetime, timedelta
from typing import Any, assert_type

import msgspec
from sqlalchemy.ext.asyncio import AsyncSession

from idemconsumer import (
    Accepted,
    App,
    Backoff,
    BadMessage,
    Batch,
    BrokerUnavailable,
    Cancellation,
    Child,
    ConfigurationError,
    Done,
    First,
    Handler,
    HandlerError,
    IdemConsumerError,
    Key,
    Message,
    NotDone,
    Outcome,
    OutcomeKind,
    Progress,
    Reject,
    Result,
    Retry,
    Rows,
    Saga,
    SagaStatus,
    SagaStep,
    Signalled,
    SignalTimeout,
    Step,
    StoreUnavailable,
    Tx,
    Unknown,
    idempotent_handler,
)
from idemconsumer.http import (
    AcceptLater,
    Idempotency,
    IdempotencyMiddleware,
    LostRequest,
    Request,
    Response,
    Route,
    SyncRows,
    SyncTx,
    current_key,
    current_sync_tx,
    current_tx,
)
from idemconsumer.settings import Settings
from idemconsumer.sqlalchemy import session
from idemconsumer.testing import (
    BrokerContract,
    BrokerHarness,
    CrashAt,
    EmbeddedPostgres,
    EmbeddedUnavailable,
    FakeSaga,
    FakeTx,
    Handled,
    Idem,
    Kit,
    Left,
    MatrixDelivery,
    MatrixReport,
    NotQuiet,
    Point,
    Published,
    Replay,
    RequestHarness,
    RequestProcess,
    RequestStoreContract,
    SagaHistory,
    SagaPoint,
    SagaSeen,
    WrongRun,
    crash_matrix,
    migrate,
    read_histories,
    replay,
)


class Transfer(msgspec.Struct):
    id: str
    source: int
    target: int
    amount: int


class Balance(msgspec.Struct):
    amount: int


@idempotent_handler("kafka:transfers", key="id", retain="30d", backoff=Backoff(first=0.1), fail_on=(ValueError,))
async def transfer(order: Transfer, tx: Tx) -> Balance:
    await tx.execute("update account set balance = balance - %s where id = %s", (order.amount, order.source))
    rows = await tx.execute(
        "update account set balance = balance + %(n)s where id = %(id)s returning balance",
        {"n": order.amount, "id": order.target},
        into=Balance,
    )
    return await rows.one()


@idempotent_handler("rabbitmq:mails", "postgres:mails", key=Key.first(Key.header("Id"), Key.payload()))
def send(mail: dict[str, str]) -> None:
    print(mail["to"])


@idempotent_handler(
    "memory:orders",
    key=lambda message: message.message_id,
    tenant=Key.header("tenant"),
    order_by="partition",
    fingerprint=None,
)
async def multi_tenant(order: Transfer, message: Message, tx: Tx) -> str | None:
    return message.tenant


@idempotent_handler("kafka:mapped", key="id")
async def mapped(order: Transfer, tx: Tx) -> None:
    async with session(tx) as db:
        assert_type(db, AsyncSession)


@idempotent_handler("kafka:batches", key="id", group_size=64)
async def many(orders: Batch[Transfer], tx: Tx) -> None:
    assert_type(orders[0], Transfer)
    assert_type(orders.message(0), Message)
    for i, order in enumerate(orders):
        assert_type(order, Transfer)
        if order.amount < 0:
            orders.reject(i, "negative", {"amount": order.amount})
        elif len(orders) > 1:
            orders.retry(i, after="5s")
        else:
            orders.result(i, Balance(order.amount))

    orders.reject(0)  # type: ignore[call-arg]
    orders.result("a", 1)  # type: ignore[arg-type]
    orders[0] = order  # type: ignore[index]
    await orders.retry(0)  # type: ignore[func-returns-value, misc]


@idempotent_handler("kafka:users", key=Key.all(Key.record_key(), Key.offset()))
async def kept(user: Balance | None, message: Message, tx: Tx) -> None:
    assert_type(message.timestamp, datetime | None)
    assert_type(message.partition, int | None)
    assert_type(message.offset, int | None)
    assert_type(message.record_key, bytes | None)
    assert_type(message.all_headers, tuple[tuple[str, str | bytes], ...])
    assert_type(message.tombstone, bool)


@idempotent_handler("rabbitmq:answers", key=Key.property("correlation_id"))
async def answer(body: bytes | None, message: Message, tx: Tx) -> None:
    assert_type(message.properties.get("routing_key"), str | int | None)


def transfer_of(body: bytes, message: Message) -> Transfer:
    return Transfer(body.decode(), 1, 2, message.offset or 0)


@idempotent_handler("kafka:avro", key="id", envelope="cloudevents", decode=transfer_of)
async def decoded(order: Transfer, tx: Tx) -> None: ...


idempotent_handler("kafka:avro", key="id", fingerprint="raw bytes")
idempotent_handler("kafka:avro", key="id", envelope="soap")  # type: ignore[arg-type]


async def transfer_by_registry(body: bytes, message: Message) -> Transfer:
    return transfer_of(body, message)


@idempotent_handler("kafka:avro", key="id", decode=transfer_by_registry)
async def decoded_by_registry(order: Transfer, tx: Tx) -> None: ...


idempotent_handler("kafka:avro", key="id", decode=len)  # type: ignore[arg-type]


class Recorded:
    """What a unit test may give to a batch handler."""

    def __init__(self, *orders: Transfer) -> None:
        self.orders = orders
        self.rejected: list[int] = []

    def __len__(self) -> int:
        return len(self.orders)

    def __iter__(self) -> Iterator[Transfer]:
        return iter(self.orders)

    def __getitem__(self, i: int, /) -> Transfer:
        return self.orders[i]

    def message(self, i: int, /) -> Message:
        return Message("kafka:batches", b"")

    def result(self, i: int, value: object, /) -> None: ...
    def reject(self, i: int, /, code: str, body: object = None) -> None:
        self.rejected.append(i)

    def retry(self, i: int, /, after: str | float | timedelta | None = None) -> None: ...


async def unit_test(order: Transfer, tx: Tx) -> None:
    await many(Recorded(order), tx)
    await many([order], tx)  # type: ignore[arg-type]


# --------------------------------------------------------------------------------------------------------------- sagas
class Gateway:
    async def charge(self, key: str, amount: int) -> str:
        return key


app = App("shop", publishes=["kafka:orders.paid", "rabbitmq:billing/paid"])


@app.resource
async def gateway() -> AsyncIterator[Gateway]:
    yield Gateway()


async def reserve(tx: Tx, order: Transfer) -> int:
    return order.amount


async def unreserve(tx: Tx, reserved: int, order: Transfer) -> None: ...


async def charge(step: Step, client: Gateway, amount: int) -> str:
    assert_type(step.headers, Mapping[str, str])
    return await client.charge(str(step.key), amount)


async def refund(step: Step, charged: str, client: Gateway, amount: int) -> None: ...


async def find(step: Step, client: Gateway, amount: int) -> Done[str] | NotDone | Unknown:
    return Done("a") if step.attempt > 1 else NotDone()


@app.idempotent_handler("rabbitmq:settlements", key="id")
async def settle(order: Transfer, saga: Saga) -> int:
    return order.amount


async def unsettle(tx: Tx, child: Child[int], order: Transfer) -> None: ...


@app.idempotent_handler("rabbitmq:rides", key="id", lease="10s", settle="finished", version="2")
async def book(order: Transfer, saga: Saga, client: Gateway) -> str:
    assert_type(await saga.tx("reserved", reserve, order, undo=unreserve), int)
    charged = await saga.call("charged", charge, client, order.amount, undo=refund, reconcile=find)
    assert_type(charged, str)
    slow = await saga.call("slow", charge, client, 1, timeout="5m", max_attempts=20, backoff=Backoff(1.0, cap=60.0))
    assert_type(slow, str)
    assert_type(await saga.tx("once", reserve, order, timeout=2.5, max_attempts=1, backoff=("1s", "1m")), int)
    lines = (saga.call(f"line_{n}", charge, client, n, undo=refund) for n in range(3))
    assert_type(await saga.all(lines, limit=2), list[str])
    assert_type(await saga.all([saga.tx("reserved", reserve, order)]), list[int])
    assert_type(saga.recovery_point, str | None)
    child = await saga.start("other", settle, order, undo=unsettle)
    assert_type(child, Child[int])
    assert_type(await saga.result("other_done", child, timeout="7d"), int)
    await saga.start("other", settle, order.id)  # type: ignore[arg-type]
    await saga.start("other", settle, order, on_existing="ignore")  # type: ignore[arg-type]
    await saga.start("other", settle, order, undo=unreserve)  # type: ignore[arg-type]
    await saga.sleep("cooling_off", "3d")
    try:
        assert_type(await saga.wait("approved", into=Transfer, timeout="7d"), Transfer)
    except SignalTimeout as late:
        assert_type(late.signal, str)
    assert_type(await saga.wait("vote 1", signal="vote"), Any)
    assert_type(await saga.first(yes=saga.wait("approved", into=Transfer), late=saga.sleep("patience", "7d")), First)
    await saga.wait("approved", into="Transfer")  # type: ignore[call-overload]

    await saga.call("slow", charge, client, 1, timeout=[1])  # type: ignore[arg-type]

    await saga.tx("reserved", reserve)  # type: ignore[arg-type]
    await saga.tx("reserved", reserve, order.id)  # type: ignore[arg-type]
    await saga.call("charged", reserve, order)  # type: ignore[arg-type]
    await saga.tx("reserved", reserve, order, undo=refund)  # type: ignore[arg-type]
    return charged


@app.signal_handler("kafka:approved", saga=book, name="approved", key="id", concurrency=2)
async def approved(order: Transfer, tx: Tx) -> Transfer:
    assert_type(await app.signal(book, key="k", name="approved", payload=order, tx=tx), Signalled)
    return order


async def look(order: Transfer, tx: Tx, client: Gateway) -> Done[str] | NotDone:
    return NotDone()


async def no_answer(order: Transfer, tx: Tx) -> str:
    return order.id


def not_async(order: Transfer) -> Unknown:
    return Unknown()


app.idempotent_handler("rabbitmq:looked", key="id", name="looked", reconcile=look)(book)
app.idempotent_handler("rabbitmq:a", key="id", reconcile=no_answer)  # type: ignore[arg-type]
app.idempotent_handler("rabbitmq:b", key="id", reconcile=not_async)  # type: ignore[arg-type]


async def begin(order: Transfer, tx: Tx) -> None:
    await app.start(book, order, key=order.id, tx=tx)
    await app.start(book, order, key=order.id, tenant="north")
    assert_type(await app.result(book, key=order.id, wait="10s"), Outcome)
    assert_type(await app.accept(book, order, key=order.id, headers={"n": "v"}), Accepted)
    assert_type((await app.accepted(book, key=order.id, tenant="t")).progress, Progress)
    assert_type(await app.accepted_by_id(book, id=await app.accepted_id(book, key=order.id)), Accepted)
    assert_type(Result({"id": 1}, 201, [("Location", "/")]).status, int)
    seen = await app.saga(book, key=order.id)
    assert_type(seen, SagaStatus | None)
    if seen is not None:
        assert_type(seen.steps, tuple[SagaStep, ...])
    assert_type(await app.cancel(book, key=order.id, undo=True), Cancellation)
    assert_type(await app.pause("book", reason="wrong prices"), bool)
    assert_type(await app.resume("book", by="ann"), bool)
    await app.decide(book, "charged", Done("ch_17"), key=order.id, tenant="north")

    await app.start(book, order)  # type: ignore[call-arg]
    await app.start(book, order.id, key=order.id)  # type: ignore[arg-type]
    await app.start(order, order, key=order.id)  # type: ignore[arg-type]


@app.resource  # type: ignore[arg-type]
async def no_generator() -> Gateway:
    return Gateway()


async def use(tx: Tx, message: Message, order: Transfer) -> None:
    assert_type(await transfer(order, tx), Balance)
    assert_type(await transfer(order, tx=tx), Balance)
    await send({"to": "a@example.org"})
    assert_type(await multi_tenant(order, message, tx), str | None)
    included: Handler[..., Any] = transfer
    assert_type(included.name, str)
    assert_type(await (await tx.execute("select 1")).first(), tuple[Any, ...] | None)

    await transfer(order)  # type: ignore[call-arg]
    await transfer({"id": "a"}, tx)  # type: ignore[arg-type]
    await send(order)  # type: ignore[arg-type]
    await tx.commit()  # type: ignore[attr-defined]


idempotent_handler("kafka:transfers")  # type: ignore[call-arg]
idempotent_handler("kafka:transfers", key=5)  # type: ignore[arg-type]
idempotent_handler("kafka:transfers", key="id", envelope="skip")  # type: ignore[arg-type]
idempotent_handler("kafka:transfers", key="id", retian="1d")  # type: ignore[call-arg]
idempotent_handler("kafka:transfers", key=lambda message: 5)  # type: ignore[arg-type, return-value]


# -------------------------------------------------------------------------------------------------- outcomes and errors
async def settled(message: Message) -> bool:
    try:
        outcome = await app.process(message)
    except (StoreUnavailable, BrokerUnavailable) as away:
        assert_type(away.args, tuple[Any, ...])
        return False
    except BadMessage as bad:
        assert_type((bad.reason, bad.detail), tuple[str, str])
        return True
    except HandlerError as mistake:
        assert_type(mistake.handler, str)
        configuration: ConfigurationError = mistake
        raise configuration from None
    except IdemConsumerError:
        raise
    assert_type(outcome, Outcome)
    assert_type((outcome.kind, outcome.result, outcome.due), tuple[OutcomeKind, bytes | None, float])
    return outcome.kind in (OutcomeKind.APPLIED, "duplicate")


async def asks(tx: Tx, order: Transfer) -> Rows[int]:
    if order.amount < 0:
        raise Reject("negative", {"amount": order.amount})
    rows = await tx.execute("select balance from account where id = %s", (order.source,), into=int)
    if await rows.first() is None:
        raise Retry("no such account yet", after=timedelta(seconds=5))
    assert_type((rows.rowcount, await rows.all()), tuple[int, list[int]])
    return rows


# ------------------------------------------------------------------------------------------------------------- testing
class Brokers(BrokerContract):
    def harness(self, given: BrokerHarness) -> BrokerHarness:
        return given


class Requests(RequestStoreContract):
    async def harness(self, given: RequestHarness) -> RequestProcess:
        return await given.process()


async def consuming(delivery: MatrixDelivery, dsn: str) -> None:
    assert_type(delivery.body, bytes)
    await delivery.ack()


async def matrices() -> None:
    report = await crash_matrix(consuming, {"id": "1"}, dsn="", tables=["stock"], ignore=["stock.updated_at"])
    assert_type(report, MatrixReport)
    assert_type([*report.wrong], list[WrongRun])
    assert_type(report.points, int)
    await crash_matrix(app, Message("kafka:orders", b"{}"), dsn="", tables=["stock"])


def crashing() -> None:
    try:
        with EmbeddedPostgres() as server:
            migrate(server.dsn, "idemconsumer")
            settings = Settings(dsn=server.dsn)
    except EmbeddedUnavailable:
        return
    app.worker(settings, CrashAt(Point.COMMITTED))
    app.worker(settings, CrashAt(SagaPoint.INTENDED, nth=3))
    assert_type(CrashAt.parse("settled:2"), CrashAt)

    CrashAt("committed")  # type: ignore[arg-type]


async def replaying() -> None:
    histories = read_histories("histories.jsonl")
    assert_type(histories, list[SagaHistory])
    assert_type(await replay(app, histories[0], resources={str: "it"}, patience=2), Replay)
    assert_type((await replay(app, histories[0])).goes_on, bool)
    await replay(app, "histories.jsonl")  # type: ignore[arg-type]


async def with_the_kit(idem: Idem, api: object) -> None:
    try:
        kit = await idem(app, app, resources={str: "it"})
    except NotQuiet:
        return
    assert_type(kit, Kit)
    await kit.send("kafka:orders", Transfer("1", 1, 2, 3), key=b"1", headers={"a": "b"})
    await kit.redeliver(2)
    assert_type(await kit.drain(), Left)
    assert_type(await kit.advance("3d", within=5), Left)
    assert_type(kit.outcomes, list[Outcome])
    assert_type(kit.handled, list[Handled])
    assert_type(await kit.published("rabbitmq:mail"), list[Published])
    assert_type(await kit.saga("1"), SagaSeen)
    assert_type([letter.reason for letter in await kit.dead_letters()], list[str])
    assert_type(await kit.rows("select 1"), list[tuple[Any, ...]])
    async with kit.http(api) as client:
        await client.get("/")
    async with kit.assert_commits(1), kit.assert_statements(6), kit.assert_round_trips(2):
        await kit.reset()

    await idem(app, resources=["it"])  # type: ignore[arg-type]
    await kit.send("kafka:orders", {}, key=1)  # type: ignore[arg-type]


async def with_fakes() -> None:
    tx: Tx = FakeTx()
    saga: Saga = FakeSaga(signals={"paid": 1}, tx=FakeTx())
    await tx.send("select 1")
    await saga.sleep("rests", "1d")


async def whose(request: Request) -> str | None:
    return request.header("x-account")


def final(response: Response) -> bool:
    return response.status < 300


async def at_the_front_door(handler: Handler[..., Any]) -> None:
    door = Idempotency(app, tenant=whose, routes={"POST /orders": Route(tx=True, fingerprint=["id"], store=final)})
    Idempotency(app, tenant=lambda request: request.header("x-account"), default=None)
    AcceptLater(app, handler, tenant=whose, path="/later")

    async def service(scope: Any, receive: Any, send: Any) -> None: ...

    IdempotencyMiddleware(service, door)

    @door.route(tx=True, wait="5s")
    async def place(order: int) -> str:
        tx = current_tx()
        assert_type(tx, Tx)
        assert_type(await (await tx.execute("select 1", into=int)).one(), int)
        return "placed"

    assert_type(await place(1), str)
    assert_type(current_sync_tx(), SyncTx)
    assert_type(current_sync_tx().execute("select 1", into=int), SyncRows[int])
    assert_type(current_sync_tx().execute("select 1", into=int).one(), int)

    async def find(lost: LostRequest) -> Done[Response] | NotDone:
        return Done(Response(201, (), b"")) if lost.tenant else NotDone()

    door.route(reconcile=find, on_stale="review")
    for lost in await door.lost():
        assert_type(lost, LostRequest)
        assert_type(await door.settle(lost, Response(200, (), b"")), bool)
        assert_type(await door.release(lost), bool)
    assert_type(current_key(), str)
    door.route(reconcile=lambda lost: None)  # type: ignore[arg-type,return-value]
    Idempotency(app)  # type: ignore[call-arg]
    door.route(tx="yes")  # type: ignore[arg-type]
