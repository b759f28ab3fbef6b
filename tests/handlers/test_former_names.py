"""How a handler says what it was called before, and what that is refused for (L68)."""

from __future__ import annotations

from typing import Any

import pytest

from idemconsumer import App, ConfigurationError, HandlerError, Saga, Tx
from idemconsumer.settings import Settings


@pytest.mark.parametrize(
    ("formerly", "says"),
    [
        ("", "'' has no name; write the name that the handler had"),
        ("shop/", "'shop/' has no handler"),
        ("/pay", "'/pay' has no name"),
        ("~pay", "reserved"),
        (" pay", "is not a printable string"),
        (7, "`formerly` is 7; write"),
        (("pay", 7), "7 is not a printable string"),
        (["pay"], r"`formerly` is \['pay'\]; write"),
        (("pay", "pay"), "has a name twice"),
        ("pay_now", "is the name that it has; leave it out"),
    ],
)
def test_what_names_no_former_handler_is_refused(formerly: Any, says: str) -> None:
    with pytest.raises(HandlerError, match=says):
        handlers(("pay_now", formerly))


def handlers(*named: tuple[str, Any], app: str = "shop") -> App:
    made = App(app)
    for n, (name, formerly) in enumerate(named):

        @made.idempotent_handler(f"kafka:topic{n}", key="id", name=name, formerly=formerly)
        async def handle(item: dict[str, Any], tx: Tx) -> None: ...

    return made


@pytest.mark.parametrize(
    "others", [("book", ()), ("trip", "book"), ("trip", ("tour", "book")), ("trip", "shop/book"), ("trip", "journey")]
)
@pytest.mark.parametrize("turned", [False, True])
def test_two_handlers_with_one_name_are_refused(others: tuple[str, Any], turned: bool) -> None:
    both = [("journey", "book"), others]
    name = "shop/journey" if others[1] == "journey" else "shop/book"
    with pytest.raises(
        ConfigurationError, match=f"'{name}' is a name of .* now or formerly, .* write formerly= on one"
    ):
        handlers(*(reversed(both) if turned else both))


def test_a_handler_of_another_app_has_the_name_to_itself() -> None:
    app = handlers(("book", ()), ("old_book", "fleet/book"))
    assert [each.identity for each in app.bound_handlers(Settings())] == [("shop", "book"), ("fleet", "book")]


def test_what_is_known_by_its_name_elsewhere_keeps_its_name() -> None:
    """The consumer group of Kafka, unless it is given; and the slots of a schedule."""
    (handler,) = handlers(("journey", "fleet/book")).bound_handlers(Settings())
    assert [each.group for each in handler.subscriptions] == ["fleet"]
    app = App("shop")

    @app.every("0 3 * * *")
    @app.idempotent_handler("kafka:reports", key="slot", formerly="report", consumer_group="reports")
    async def nightly(order: dict[str, Any], saga: Saga) -> None: ...

    (handler,) = app.bound_handlers(Settings())
    assert [each.group for each in handler.subscriptions] == ["reports"]
    assert [each.name for each in app.schedules([handler])] == ["report"]
