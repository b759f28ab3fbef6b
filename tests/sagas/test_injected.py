"""Resources reach the functions of a step by their types."""

from __future__ import annotations

import inspect
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import pytest

from idemconsumer import Done, OutcomeKind, Reject, Saga, Step, Tx, idempotent_handler
from idemconsumer.sagas.steps import injected
from tests.support.sagas import Station

if TYPE_CHECKING:
    from decimal import Decimal


class Gateway:
    """A resource."""

    def __init__(self) -> None:
        self.asked: list[str] = []


class Other:
    """A resource that nobody asks for."""


async def test_what_the_arguments_leave_open_is_injected_into_step_and_undo(one: Station) -> None:
    gateway = Gateway()

    async def reserve(tx: Tx, item: str, gateway: Gateway) -> str:
        gateway.asked.append(f"reserve {item}")
        return item

    async def release(tx: Tx, output: str, item: str, *, gateway: Gateway) -> None:
        gateway.asked.append(f"release {output}")

    async def charge(step: Step, *, gateway: Gateway) -> str:
        gateway.asked.append("charge")
        return "charged"

    async def refund(step: Step, output: str, gateway: Gateway) -> None:
        gateway.asked.append("refund")

    @idempotent_handler("memory:orders", key="id")
    async def book(order: dict[str, Any], saga: Saga) -> None:
        steps: Any = saga
        await steps.tx("reserved", reserve, "book", undo=release)
        await steps.call("charged", charge, undo=refund)
        raise Reject("changed my mind")

    outcome = await one.deliver(book.plan.bind("shop", resources={Gateway: gateway, Other: Other()}))

    assert outcome.kind is OutcomeKind.FAILED
    assert gateway.asked == ["reserve book", "charge", "refund", "release book"]


async def all_of_it(tx: Tx, item: str, price: Decimal, gateway: Gateway, *, spare: Gateway) -> None: ...


class Shop:
    async def buy(self, step: Step, item: str, gateway: Gateway) -> None: ...


@pytest.mark.parametrize(
    ("fn", "given", "names"),
    [
        pytest.param(all_of_it, 3, ["gateway", "spare"], id="left open"),
        pytest.param(all_of_it, 4, ["spare"], id="given by place"),
        pytest.param(partial(all_of_it, spare=Gateway()), 3, ["gateway"], id="partial by name"),
        pytest.param(partial(all_of_it, gateway=Gateway()), 3, ["spare"], id="partial by the name of a place"),
        pytest.param(Shop().buy, 2, ["gateway"], id="method, left open"),
        pytest.param(Shop().buy, 3, [], id="method, given by place"),
        pytest.param(len, 1, [], id="builtin"),
    ],
)
def test_only_open_parameters_are_filled(fn: Any, given: int, names: list[str]) -> None:
    gateway = Gateway()
    assert injected(fn, given, {Gateway: gateway}) == dict.fromkeys(names, gateway)
    assert injected(fn, given, {Other: Other()}) == injected(fn, given, {}) == {}


def test_the_parameters_of_a_method_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def buy(self: Shop, step: Step, gateway: Gateway) -> None: ...

    signature = Mock(wraps=inspect.signature)
    monkeypatch.setattr(inspect, "signature", signature)
    for _ in range(2):
        assert list(injected(MethodType(buy, Shop()), 1, {Gateway: Gateway()})) == ["gateway"]
    signature.assert_called_once()


async def test_a_reconcile_gets_resources_too(one: Station) -> None:
    gateway = Gateway()

    async def charge(step: Step, card: str) -> str:
        raise TimeoutError

    async def find(step: Step, card: str, gateway: Gateway) -> Done[str]:
        gateway.asked.append(f"find {card}")
        return Done("found")

    @idempotent_handler("memory:orders", key="id", backoff="1ms, 1ms")
    async def book(order: dict[str, Any], saga: Saga) -> str:
        steps: Any = saga
        return str(await steps.call("charged", charge, "card", reconcile=find))

    handler = book.plan.bind("shop", resources={Gateway: gateway})
    assert (await one.deliver(handler)).kind is OutcomeKind.RETRYING
    assert (await one.resume(handler)).result == b'"found"'
    assert gateway.asked == ["find card"]
