"""Whose turn it is at a function that fails in all sagas (D17)."""

from __future__ import annotations

import asyncio

import pytest

from idemconsumer.engine.failing import Failing, Subject
from idemconsumer.message.keys import scope_name
from idemconsumer.message.message import Message
from idemconsumer.rules.breaker import IN_A_ROW
from idemconsumer.rules.values import State
from idemconsumer.sagas.probes import NotCalled, Probes
from idemconsumer.stores.leased_saga import LeasedSaga
from tests.support.tuning import tuned


def charge() -> None: ...


def some(name: str, tenant: str | None = None) -> LeasedSaga:
    scope = scope_name("app", tenant, "book")
    message = Message("memory:q", b"")
    return LeasedSaga(name.encode(), scope, "book", 1, 1, State.PROCESSING, 1, None, None, False, message)


async def fails(probes: Probes, saga: LeasedSaga, *, first: bool = False) -> None:
    """Raises NotCalled if it is not its turn."""
    error = ConnectionError("the service is down")
    try:
        async with probes.trying(charge, saga):
            raise error
    except ConnectionError:
        probes.failed(charge, saga, error, first=first)


async def test_of_those_that_have_failed_one_is_let_in_and_the_others_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    tuned(monkeypatch, next_probe_pause=0.01, failed_probe_pause=10_000.0)
    probes = Probes(Failing(watched=True))
    sagas = [some(f"bad-{n}") for n in range(IN_A_ROW)]
    for saga in sagas:
        await fails(probes, saga, first=True)

    await fails(probes, sagas[0])
    with pytest.raises(NotCalled):
        await fails(probes, sagas[1])
    await fails(probes, some("bad-new"), first=True)  # who has not failed goes first
    with pytest.raises(NotCalled):
        await fails(probes, sagas[0])
    async with probes.trying(charge, some("good")):
        pass
    await fails(probes, sagas[1])  # it works again: nobody waits


async def test_a_saga_whose_tenant_fails_makes_room_for_others_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    tuned(monkeypatch, next_probe_pause=1.0)
    probes = Probes(Failing(watched=True))
    for n in range(IN_A_ROW):
        await fails(probes, some(f"bad-{n}", "a"), first=True)
    with pytest.raises(NotCalled):
        await fails(probes, some("new", "a"), first=True)
    await fails(probes, some("new", "b"), first=True)


async def test_a_tenant_fails_until_one_of_it_has_succeeded() -> None:
    failing, its = Failing(watched=True), Subject.function(charge)
    for n, tenant in enumerate(("a", "a", "b", None)):
        for _ in range(2):
            failing.failed(its, b"%d" % n, ValueError(), first=True, tenant=tenant)
    assert [failing.failed_beside(its, tenant) for tenant in ("a", "b", "c", None)] == [2, 1, 0, 0]
    failing.succeeded(its, [b"new"], ["a"])
    assert [failing.failed_beside(its, tenant) for tenant in ("a", "b", "c", None)] == [0, 1, 0, 0]


async def test_a_call_that_hangs_keeps_none_waiting_that_has_not_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    tuned(monkeypatch, next_probe_pause=0.0, failed_probe_pause=0.0, probe_hangs_after=0.01)
    probes, begun, answers = Probes(Failing(watched=True)), asyncio.Event(), asyncio.Event()
    sagas = [some(f"bad-{n}") for n in range(IN_A_ROW)]
    for saga in sagas:
        await fails(probes, saga, first=True)

    async def hang() -> None:
        async with probes.trying(charge, sagas[0]):
            begun.set()
            await answers.wait()

    async with asyncio.TaskGroup() as group:
        group.create_task(hang())
        await begun.wait()
        await fails(probes, some("bad-new"), first=True)
        with pytest.raises(NotCalled):  # one of them at a time
            await fails(probes, sagas[1])
        answers.set()
