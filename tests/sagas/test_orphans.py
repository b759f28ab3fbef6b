"""Sagas that nobody continues: they are told, and can be given to another handler (L31)."""

from __future__ import annotations

from typing import Any

import pytest

from idemconsumer import OutcomeKind, Saga, idempotent_handler
from idemconsumer.admin.orphans import WaitingSagas, orphans
from idemconsumer.admin.saga_admin import SagaAdmin
from idemconsumer.message import keys
from idemconsumer.rules.values import Signalled
from idemconsumer.worker.source_findings import warn_of_orphans
from tests.support.logs import capture_logs
from tests.support.sagas import SCHEMA, Bench, Remote, Station, put, saga


def waiting(app: str = "shop", handler: str = "book", version: str | None = "1", *, begun: bool = True) -> WaitingSagas:
    return WaitingSagas(app=app, handler=handler, version=version, sagas=3, begun=begun)


def started(app: str = "shop", handler: str = "book") -> WaitingSagas:
    return waiting(app, handler, None, begun=False)


RUNS = {"app": "shop", "handler": "book", "version": "1"}


@pytest.mark.parametrize(
    ("group", "alive", "says"),
    [
        (waiting(), [], "began with version '1', which no worker runs"),
        (waiting(), [[]], "began with version '1'"),
        (waiting(), [[RUNS]], None),
        (waiting(version="2"), [], None),
        (waiting(version="*"), [], None),
        (
            waiting(handler="gone"),
            [[RUNS]],
            "app 'shop' has no such handler of sagas; if it was renamed, restore its name with name=\"gone\"",
        ),
        (waiting(handler="gone", version=None), [[RUNS]], "3 sagas wait for it"),
        (waiting(app="other"), [[RUNS]], "3 sagas of app 'other' wait for it, but no worker runs it"),
        (waiting(app="other"), [[{**RUNS, "app": "other"}]], None),
        (started(), [], None),
        (started(handler="gone"), [[RUNS]], "3 sagas of app 'shop', started by other sagas, wait to begin"),
        (started(handler="gone"), [[{**RUNS, "handler": "gone"}]], None),  # of a deployment that is not over
        (started(app="other"), [[RUNS]], "3 sagas of app 'other', started by other sagas"),
        (started(app="other"), [[{**RUNS, "app": "other"}]], None),
    ],
)
def test_sagas_that_nobody_continues_are_told(group: WaitingSagas, alive: list[Any], says: str | None) -> None:
    found = orphans([group], alive, "shop", {("shop", "book"): "2"})
    assert bool(found) is (says is not None)
    if says is not None:
        assert says in found[0].text


async def test_a_worker_says_at_its_start_which_sagas_nobody_continues(bench: Bench, one: Station) -> None:
    await one.deliver(saga(failing))
    with capture_logs() as said:
        await warn_of_orphans(bench.dsn, SCHEMA, "shop", {("shop", "renamed"): None})
        await warn_of_orphans(bench.dsn, SCHEMA, "shop", {("shop", "book"): None})
        await warn_of_orphans(bench.dsn, SCHEMA, "other", {})
    assert [(line["event"], line["handler"]) for line in said] == [("orphaned sagas", "book")]
    assert "1 sagas wait for it" in said[0]["finding"]


async def failing(order: dict[str, Any], saga: Saga) -> str:
    raise ValueError("to be resumed")


@pytest.mark.parametrize("app", ["shop", "other app/x"])
async def test_a_moved_saga_goes_on_with_its_keys(
    bench: Bench, one: Station, two: Station, remote: Remote, app: str
) -> None:
    fails = [TimeoutError("no answer")]

    async def charge(step: Any, name: str) -> str:
        charged = await remote.charge(step, name)
        if fails:
            raise fails.pop()
        return charged

    async def book(order: dict[str, Any], saga: Saga) -> str:
        await saga.tx("a", put, "a")
        return await saga.call("b", charge, "b")

    renamed = idempotent_handler("memory:orders", key="id", name="journey")(book).plan.bind(app)
    await one.deliver(saga(book))
    assert await two.take(renamed) is None
    assert await SagaAdmin(bench.dsn, SCHEMA).move(("shop", "book"), (app, "journey"), by="ann") == (1, 0)
    assert await one.take(saga(book)) is None
    outcome = await two.resume(renamed)
    assert (outcome.kind, outcome.result, bench.effects) == (OutcomeKind.APPLIED, b'"charged:b"', ["a"])
    assert (len(remote.calls), len(remote.keys("b"))) == (2, 1)


async def test_a_moved_saga_is_told_under_the_name_that_it_began_under(
    bench: Bench, one: Station, two: Station
) -> None:
    """From SQL, and by its stored key; under its present name it has not begun."""

    async def book(order: dict[str, Any], saga: Saga) -> list[str]:
        return [await saga.wait("first"), await saga.wait("second")]

    await one.deliver(saga(book))
    await SagaAdmin(bench.dsn, SCHEMA).move(("shop", "book"), ("shop", "journey"), by="ann")
    query = "select idemconsumer.signal('shop', %s, 'k', 'first', '\"a\"')"
    assert bench.run(query, ("journey",)) == [("early",)]
    assert bench.run(query, ("book",)) == [("stored",)]
    key = keys.digest("shop", None, "book", "k")
    assert await SagaAdmin(bench.dsn, SCHEMA).signal(key, "second", "b", by="ann") is Signalled.STORED
    renamed = idempotent_handler("memory:orders", key="id", name="journey")(book).plan.bind("shop")
    assert (await two.resume(renamed)).result == b'["a","b"]'


async def test_a_saga_that_was_begun_from_code_is_still_that_when_it_was_moved(
    bench: Bench, one: Station, two: Station
) -> None:
    """Else its key rule would look for a key that is not there."""
    renamed = idempotent_handler("memory:orders", key="id", name="journey")(put_a).plan.bind("shop")
    await one.deliver(saga(failing))
    bench.run("update idemconsumer.saga set source = 'postgres:~shop/book', message_id = 'k', body = '{}'")
    await SagaAdmin(bench.dsn, SCHEMA).move(("shop", "book"), ("shop", "journey"), by="ann")
    assert (await two.resume(renamed)).kind is OutcomeKind.APPLIED


async def put_a(order: dict[str, Any], saga: Saga) -> None:
    await saga.tx("a", put, "a")


async def test_a_saga_that_a_live_worker_holds_is_not_moved(bench: Bench, one: Station) -> None:
    await one.deliver(saga(failing))
    assert await one.take(saga(failing)) is not None
    admin = SagaAdmin(bench.dsn, SCHEMA)
    assert await admin.move(("shop", "book"), ("shop", "journey"), by="ann") == (0, 1)
    bench.expire(one)
    token = bench.token
    assert await admin.move(("shop", "book"), ("shop", "journey"), by="ann") == (1, 0)
    assert bench.token > token
    assert bench.run("select handler, app, worker, stale from idemconsumer.saga") == [("journey", "shop", None, True)]
