"""Requests whose keys are hashed under a secret, before and after it is rotated (R38, R39)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from starlette.requests import Request as StarletteRequest
from starlette.responses import Response

from idemconsumer import App, ConfigurationError
from idemconsumer.hashing import HASHING
from idemconsumer.http import Route
from idemconsumer.http.opened_stores import OpenedStores
from idemconsumer.message import keys
from idemconsumer.wrapping import unwrap
from tests.http.fake_requests import FakeRequests
from tests.http.site import MakeDoor, client, place, problem, replayed, service
from tests.support.hashing import OTHER, SECRET, begin, restored
from tests.support.ledger import Ledger

ROUTE = "POST /orders"


@pytest.fixture(autouse=True)
def new() -> Iterator[None]:
    with restored():
        yield


@pytest.mark.parametrize("tx", [True, False])
async def test_a_request_is_answered_once_before_and_after_its_secret_is_rotated(
    ledger: Ledger, make_door: MakeDoor, monkeypatch: pytest.MonkeyPatch, *, tx: bool
) -> None:
    runs = []

    async def endpoint(request: StarletteRequest) -> Response:
        runs.append(1)
        return await place(request) if tx else Response(f"run {len(runs)}", 201)

    answers, told = [], []
    for listed in (SECRET, f"{OTHER},{SECRET}", OTHER):
        monkeypatch.setenv("IDEMCONSUMER_KEY_SECRETS", listed)
        begin()  # as a new process, which reads its settings at the first request
        async with client(service(make_door(routes={ROUTE: Route(tx=tx)}), endpoint)) as shop:
            answers.append(await shop.post())
            told.append(problem(await shop.post(2)))
        ((stored, key),) = ledger.run("select wrapped, key from idemconsumer.hashing, idemconsumer.record")
        assert unwrap(listed.partition(",")[0].encode(), bytes(stored)) is not None
        assert key == keys.digest("shop", "t", ROUTE, "k")
    assert [each.status_code for each in answers] == [201, 201, 201]
    assert [replayed(each) for each in answers] == [False, True, True]
    assert told == ["key-reused"] * 3
    assert len(runs) == 1


async def test_keys_that_are_kept_elsewhere_are_hashed_with_what_the_database_has(
    ledger: Ledger, make_door: MakeDoor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in Redis, which has no data key of its own."""
    monkeypatch.setenv("IDEMCONSUMER_KEY_SECRETS", SECRET)
    begin()
    store = FakeRequests()

    async def endpoint(request: StarletteRequest) -> Response:
        return Response("done")

    async with client(service(make_door(store=store), endpoint)) as shop:
        assert (await shop.post()).status_code == 200
    ((stored,),) = ledger.run("select wrapped from idemconsumer.hashing")
    begin(SECRET)
    HASHING.settle(unwrap(SECRET.encode(), bytes(stored)) or b"")
    assert list(store.records) == [keys.digest("shop", "t", "POST *", keys.joined(["/orders", "k"]))]

    monkeypatch.delenv("IDEMCONSUMER_DSN")
    begin()
    with pytest.raises(ConfigurationError, match="`key_secrets` need a database"):
        await OpenedStores(App("shop"), store, None, lambda point, handler, keys: None).leased()
