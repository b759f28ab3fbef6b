"""A request that is done later: 202, where to ask, and then what the worker has answered (H45)."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from datetime import datetime
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from starlette.applications import Starlette
from starlette.routing import Mount, Route

from idemconsumer import App, ConfigurationError, Message, Reject, Result, StoreUnavailable, Tx
from idemconsumer.errors import CommitUnknown
from idemconsumer.http import AcceptLater
from tests.http.site import Client, by_header, client, problem
from tests.support.logs import LogCapture, times
from tests.support.servers.proxy import Proxy
from tests.support.tuning import tuned
from tests.support.waiting import PATIENCE
from tests.support.workers import Bench, Item, connected, note, prepare

TENANT = {"X-Tenant": "t"}


@pytest.fixture
def bench(database: str, monkeypatch: pytest.MonkeyPatch) -> Bench:
    prepare(database)
    monkeypatch.setenv("IDEMCONSUMER_DSN", database)
    return connected(Bench(database), monkeypatch)


class Orders:
    """A handler that does what `act` says, and its clients."""

    http: Client

    def __init__(self) -> None:
        self.app = App("orders")
        self.act: Callable[[Message], object] = lambda message: {"id": message.key}
        self.seen: list[Message] = []

        @self.app.idempotent_handler("memory:orders", key="id", max_attempts=1)
        async def place(item: Item, tx: Tx, message: Message) -> object:
            await note(tx, item)
            self.seen.append(message)
            return self.act(message)

        self.place = place

    async def end(self) -> httpx.Response:
        """What is told of the key `k`."""
        return await self.get(f"/orders/{await self.app.accepted_id(self.place, key='k', tenant='t')}")

    async def get(self, path: str, **headers: str) -> httpx.Response:
        return await self.http.http.get(path, headers=TENANT | headers)


@pytest.fixture
async def orders(bench: Bench) -> AsyncIterator[Orders]:
    orders = Orders()
    later = AcceptLater(orders.app, orders.place, tenant=by_header, path="/orders", headers=["X-Passed"], max_body=100)
    routes = [Route("/orders", later), Route("/orders/{id}", later)]
    async with client(Starlette(routes=[*routes, Mount("/v1", Starlette(routes=routes))])) as orders.http:
        yield orders
    await orders.app.close()


async def test_it_is_202_with_the_same_location_until_it_is_done_and_then_what_the_worker_says(
    bench: Bench, orders: Orders
) -> None:
    orders.act = lambda message: Result({"id": 1}, 201, [("Location", "/orders/1"), ("X", "b"), ("X", "a")])
    headers = {"X-Passed": "yes", "Cookie": "secret"}
    accepted = [await orders.http.post(json={"id": "a"}, key='"a/b c"', headers=headers) for _ in range(2)]
    assert [(each.status_code, each.headers["location"], each.headers["retry-after"]) for each in accepted] == [
        (202, accepted[0].headers["location"], "1")
    ] * 2
    assert accepted[0].json() == {"progress": "pending"}
    location = accepted[0].headers["location"]
    waits = await orders.get(location)
    assert (waits.status_code, waits.json(), waits.headers["retry-after"]) == (202, {"progress": "pending"}, "1")

    await bench.until_empty(orders.app)
    done = await orders.get(location)
    assert (done.status_code, done.content, done.headers["location"]) == (201, b'{"id":1}', "/orders/1")
    assert done.headers.get_list("x") == ["b", "a"]
    head = await orders.http.http.head(location, headers=TENANT)
    assert (head.status_code, head.content, head.headers["content-length"]) == (201, b"", "8")
    again = await orders.http.post(json={"id": "a"}, key='"a/b c"', headers=headers)
    assert (again.status_code, again.content, again.headers) == (201, done.content, done.headers)
    other = await orders.http.post(json={"id": "b"}, key='"a/b c"')
    assert problem(other) == "key-reused"
    assert bench.effects() == ["a"]
    (seen,) = orders.seen
    assert seen.headers["x-passed"] == "yes"
    assert "cookie" not in seen.headers


async def test_where_no_server_listens_a_client_hears_it_at_once(
    bench: Bench, orders: Orders, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Proxy(int(str(conninfo_to_dict(bench.dsn)["port"]))) as proxy:
        monkeypatch.setenv("IDEMCONSUMER_DSN", make_conninfo(bench.dsn, host="127.0.0.1", port=proxy.port))
        assert (await orders.http.post(json={"id": "a"})).status_code == 202
        tuned(monkeypatch, connection_patience=10 * PATIENCE)
        proxy.cut()
        async with asyncio.timeout(PATIENCE):
            away = await orders.http.post(json={"id": "b"}, key="other")
        assert (away.status_code, problem(away)) == (503, "unavailable")


@pytest.mark.parametrize(("given", "told"), [([], "no-store"), ([("Cache-Control", "max-age=9")], "max-age=9")])
async def test_what_is_done_is_kept_by_no_cache_and_has_no_header_of_a_connection(
    bench: Bench, orders: Orders, given: list[tuple[str, str]], told: str
) -> None:
    """A cache does not know tenants; and what the worker says of a connection is not said of this one."""
    never = [("Content-Length", "1"), ("Transfer-Encoding", "chunked"), ("Content-Type", "a/b"), ("Set-Cookie", "a=b")]
    orders.act = lambda message: Result({"id": 1}, 201, [*never, *given])
    await orders.http.post(json={"id": "a"})
    await bench.until_empty(orders.app)
    done = await orders.end()
    assert (done.status_code, done.content, done.headers["cache-control"]) == (201, b'{"id":1}', told)
    assert done.headers.get_list("content-length") == ["8"]
    assert done.headers.get_list("content-type") == ["application/json"]
    assert not {"transfer-encoding", "set-cookie"} & set(done.headers)


async def test_what_returns_nothing_is_204_and_what_is_mounted_says_where(bench: Bench, orders: Orders) -> None:
    orders.act = lambda message: None
    location = (await orders.http.post(json={"id": "a"}, path="/v1/orders")).headers["location"]
    assert location.startswith("/v1/orders/")
    await bench.until_empty(orders.app)
    done = await orders.get(location)
    assert (done.status_code, done.content, "content-length" in done.headers) == (204, b"", False)


async def test_another_tenant_gets_404_as_for_what_never_was(orders: Orders) -> None:
    location = (await orders.http.post(json={"id": "a"})).headers["location"]
    for response in (
        await orders.get(location, **{"X-Tenant": "other"}),
        await orders.get("/orders/other"),
        await orders.http.http.delete(location, headers=TENANT),
    ):
        assert (response.status_code, problem(response)) == (404, "not-found")
    assert problem(await orders.http.http.get("/orders/k")) == "tenant-missing"
    assert problem(await orders.http.post(tenant=None)) == "tenant-missing"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"key": None}, (400, "key-missing")),
        ({"key": "a b"}, (400, "key-malformed")),
        ({"content": b"{"}, (400, "unreadable")),
        ({"content": b"x" * 101}, (413, "body-too-large")),
    ],
)
async def test_what_cannot_be_accepted_stores_nothing(
    bench: Bench, orders: Orders, given: dict[str, Any], says: tuple[int, str]
) -> None:
    response = await orders.http.post(**given)
    assert (response.status_code, problem(response)) == says
    assert bench.do("select from idemconsumer.record") == bench.do("select from idemconsumer.queue") == []


@pytest.mark.parametrize("key", ["ann@example.org", ".", "..", "a/../b", "%2E%2E", "a//b", "?a#b", "~%"])
async def test_a_location_has_no_key_in_it_and_is_of_its_tenant_alone(orders: Orders, key: str) -> None:
    """As a client follows it: httpx takes dots out of a path, as browsers do."""
    location = (await orders.http.post(json={"id": "a"}, key=key)).headers["location"]
    assert re.fullmatch(r"/orders/[0-9a-f]{64}", location)
    assert httpx.URL("http://shop/").join(location).raw_path.decode() == location
    assert (await orders.get(location)).json() == {"progress": "pending"}
    by_key = f"/orders/{quote(key)}"
    for path, tenant in ((location, "other"), (location.upper(), "t"), (f"{location}0", "t"), (by_key, "t")):
        assert (await orders.get(path, **{"X-Tenant": tenant})).status_code == 404


@pytest.mark.parametrize("style", ["ISO", "German"])
async def test_it_is_told_when_it_was_accepted(
    bench: Bench, orders: Orders, monkeypatch: pytest.MonkeyPatch, style: str
) -> None:
    """H49, however sessions write times."""
    monkeypatch.setenv("PGDATESTYLE", style)
    assert "idempotent-created-at" not in (await orders.http.post(json={"id": "a"})).headers
    waits = (await orders.end()).headers["idempotent-created-at"]
    await bench.until_empty(orders.app)
    assert (await orders.end()).headers["idempotent-created-at"] == waits
    ((stored,),) = bench.do("select to_json(created_at)::text from idemconsumer.accepted")
    assert datetime.fromisoformat(waits) == datetime.fromisoformat(stored.strip('"'))


async def test_another_body_under_the_key_is_422_and_no_dead_letter(bench: Bench, orders: Orders) -> None:
    await orders.http.post(json={"id": "a"})
    other = await orders.http.post(json={"id": "b"})
    assert (other.status_code, problem(other)) == (422, "key-reused")
    assert bench.do("select from idemconsumer.dead_letter") == []


@pytest.mark.parametrize(("status", "told"), [(None, 422), (409, 409)])
async def test_a_rejection_is_a_problem_with_its_code(
    bench: Bench, orders: Orders, status: int | None, told: int
) -> None:
    def act(message: Message) -> None:
        raise Reject("taken", {"by": "ann"}, status=status)

    orders.act = act
    await orders.http.post(json={"id": "a"})
    await bench.until_empty(orders.app)
    failed, again = await orders.end(), await orders.http.post(json={"id": "a"})
    assert (again.status_code, again.content) == (failed.status_code, failed.content)
    assert (failed.status_code, failed.headers["content-type"]) == (told, "application/problem+json")
    said = json.loads(failed.content)
    assert (said["type"], said["status"], said["code"], said["body"]) == (
        "urn:idemconsumer:problem:rejected", told, "taken", {"by": "ann"},
    )  # fmt: skip


async def test_what_is_put_aside_is_500_with_its_reason(bench: Bench, orders: Orders) -> None:
    orders.act = lambda message: 1 / 0
    await orders.http.post(json={"id": "a"})
    await bench.until_empty(orders.app)
    dead, again = await orders.end(), await orders.http.post(json={"id": "a"})
    assert (again.status_code, again.content) == (dead.status_code, dead.content)
    assert (dead.status_code, dead.json()["code"]) == (500, "attempts_exhausted")
    assert dead.json()["type"] == "urn:idemconsumer:problem:put-aside"


async def test_without_the_database_all_is_503(orders: Orders, monkeypatch: pytest.MonkeyPatch) -> None:
    async def away(*_: Any, **__: Any) -> None:
        raise StoreUnavailable("away")

    monkeypatch.setattr(orders.app, "accept", away)
    monkeypatch.setattr(orders.app, "accepted_by_id", away)
    for response in (await orders.http.post(json={"id": "a"}), await orders.end()):
        assert (response.status_code, problem(response)) == (503, "unavailable")

    async def lost(*_: Any, **__: Any) -> None:
        raise CommitUnknown("lost")

    monkeypatch.setattr(orders.app, "accept", lost)
    maybe = await orders.http.post(json={"id": "a"})
    assert (maybe.status_code, problem(maybe)) == (503, "outcome-unknown"), "which does not say that nothing was done"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"tenant": None}, "`tenant` is mandatory"),
        ({"path": "orders"}, 'such as "/orders"'),
        ({"headers": "x"}, "write a list"),
    ],
)
def test_what_cannot_be_is_refused_at_once(given: dict[str, Any], says: str) -> None:
    app = App("orders")
    with pytest.raises(ConfigurationError, match=says):
        AcceptLater(app, app, **{"tenant": by_header, "path": "/orders"} | given)  # type: ignore[arg-type]


async def test_a_database_that_is_not_what_it_was_is_503(bench: Bench, orders: Orders, logged: LogCapture) -> None:
    accepted = await orders.http.post(json={"id": "a"})
    bench.do("alter schema idemconsumer rename to another")
    for key in ("k", "another"):
        assert problem(await orders.http.post(json={"id": "a"}, key=key)) == "unavailable"
    assert problem(await orders.get(accepted.headers["location"])) == "unavailable"
    bench.do("alter schema another rename to idemconsumer")
    assert (await orders.get(accepted.headers["location"])).status_code == 202
    assert (await orders.http.post(json={"id": "a"}, key="new")).status_code == 202
    (said,) = [each for each in logged.entries if "answers 503" in each["event"]]
    assert "run `idemconsumer migrate up` first" in said["error"]
    assert times(logged, "the store of the front door works again") == 1
