"""Resources reach the functions of a step by their types."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from idemconsumer import OutcomeKind, Reject, Saga, Step, Tx, idempotent_handler
from idemconsumer._injected import injected
from tests.sagas.conftest import Station

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


@pytest.mark.parametrize(
    ("fn", "given", "names"),
    [
        pytest.param(all_of_it, 3, ["gateway", "spare"], id="left open"),
        pytest.param(all_of_it, 4, ["spare"], id="given by place"),
        pytest.param(partial(all_of_it, spare=Gateway()), 3, ["gateway", "spare"], id="partial"),
        pytest.param(len, 1, [], id="builtin"),
    ],
)
def test_only_open_parameters_are_filled(fn: Any, given: int, names: list[str]) -> None:
    gateway = Gateway()
    assert injected(fn, given, {Gateway: gateway}) == dict.fromkeys(names, gateway)
    assert injected(fn, given, {Other: Other()}) == injected(fn, given, {}) == {}
