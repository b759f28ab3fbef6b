"""Signals to a handler, or of a name, that there is not (L81)."""

from __future__ import annotations

import json
from typing import Any

import psycopg
import pytest

from idemconsumer import App, Saga, idempotent_handler
from idemconsumer.admin.orphans import find_unawaited
from idemconsumer.admin.saga_admin import SagaAdmin
from idemconsumer.cli.inspect import findings
from idemconsumer.cli.saga_verbs import facts
from idemconsumer.message import keys
from idemconsumer.settings import Settings
from tests.support.sagas import SCHEMA, Bench, Station, saga

BOOK = {("shop", "book"): None}


def runs(bench: Bench, *handlers: str, app: str = "shop") -> None:
    """A worker that has run these, and has left."""
    said = json.dumps([{"app": app, "handler": handler, "version": None} for handler in handlers])
    bench.run(
        "insert into idemconsumer.worker (name, lease, until, runs)"
        " values ('gone', '1 s', clock_timestamp() - interval '1 h', %s::jsonb)",
        (said,),
    )


def signal(bench: Bench, handler: str, name: str = "approved", key: str = "k", tenant: str | None = None) -> str:
    rows = bench.run("select idemconsumer.signal('shop', %s, %s, %s, tenant => %s)", (handler, key, name, tenant))
    return str(rows[0][0])


async def approved(order: dict[str, Any], saga: Saga) -> None:
    await saga.wait("approved")


@pytest.mark.parametrize(
    ("handler", "hint"),
    [("bookride", "Is it 'book_ride'? For a new one"), ("pay", "Known are book_ride, mail. For a new one, start")],
)
def test_sql_sends_no_signal_to_a_handler_that_does_not_exist(bench: Bench, handler: str, hint: str) -> None:
    """It answered early, and waited for a saga that never began."""
    bench.run("delete from idemconsumer.scope")
    runs(bench, "book_ride", "mail")
    with pytest.raises(
        psycopg.Error, match=f"a signal for saga '{handler}' of app 'shop': no worker has run"
    ) as refused:
        signal(bench, handler)
    assert refused.value.diag.message_hint is not None
    assert hint in refused.value.diag.message_hint
    assert bench.run("select 1 from idemconsumer.signal") == bench.run("select 1 from idemconsumer.scope") == []


@pytest.mark.parametrize("known", ["nothing", "another app", "the handler", "a saga of it", "one of another tenant"])
async def test_a_signal_that_may_be_for_one_yet_to_begin_is_kept(bench: Bench, one: Station, known: str) -> None:
    bench.run("delete from idemconsumer.scope")  # of the tests before
    if known == "another app":
        runs(bench, "mail", app="post")
    if known == "the handler":
        runs(bench, "book", "mail")
    if known == "a saga of it":
        await one.deliver(saga(approved))
        runs(bench, "mail")
    if known == "one of another tenant":
        await one.deliver(saga(approved, tenant="id"))
        runs(bench, "mail")
    assert signal(bench, "book", key="other") == "early"


async def test_signals_of_a_name_that_no_saga_waits_for_are_told(bench: Bench, one: Station) -> None:
    await one.deliver(saga(approved))
    assert signal(bench, "book", "aproved") == "stored"
    (found,) = await find_unawaited(bench.dsn, SCHEMA, "shop", BOOK)
    assert (found.handler, found.name, found.signals, found.wrong) == ("book", "aproved", 1, True)
    assert found.text == "but no running saga waits for 'aproved'; is it 'approved'?"
    detail = await SagaAdmin(bench.dsn, SCHEMA).saga(keys.digest("shop", None, "book", "k"))
    ((_, said),) = [fact for fact in facts(detail) if fact[0] == "signal"]
    assert said.startswith("aproved: 1 since ")
    assert said.endswith(", no wait has asked for it")


async def test_signals_that_somebody_waits_for_are_not_told(bench: Bench, one: Station) -> None:
    """Neither what will be taken, nor what came before its saga, nor what came too late for one that has ended."""
    await one.deliver(saga(approved))
    assert signal(bench, "book", key="early") == "early"
    assert signal(bench, "book") == "stored"
    assert await find_unawaited(bench.dsn, SCHEMA, "shop", BOOK) == []
    detail = await SagaAdmin(bench.dsn, SCHEMA).saga(keys.digest("shop", None, "book", "k"))
    assert [each.awaited for each in detail.signals] == [True]
    signal(bench, "book", "more")
    assert (await one.resume(saga(approved))).state is not None
    assert await find_unawaited(bench.dsn, SCHEMA, "shop", BOOK) == []


async def test_signals_to_a_saga_that_has_not_waited_yet_are_no_mistake_so_far(bench: Bench, one: Station) -> None:
    async def later(order: dict[str, Any], saga: Saga) -> None:
        await saga.sleep("nap", "3d")

    await one.deliver(saga(later))
    signal(bench, "book")
    (found,) = await find_unawaited(bench.dsn, SCHEMA, "shop", BOOK)
    assert (found.wrong, found.text) == (False, "but no running saga waits for 'approved'")


async def test_check_tells_of_signals_to_a_handler_that_nobody_has(bench: Bench) -> None:
    """They were sent before anything was known of the app."""
    assert signal(bench, "bok") == "early"
    app = App("shop")
    app.include(idempotent_handler("memory:orders", key="id", name="book")(approved))
    found = [each async for each in findings(app, Settings(dsn=bench.dsn)) if each.subject == "signals of shop/bok"]
    (told,) = found
    assert told.level == "warning"
    assert told.text.startswith("1 named 'approved' have been stored since ")
    assert told.text.endswith(", but no known saga of app 'shop' has this name; is it 'book'?")
