"""A marked route of Flask runs as it was marked, or not at all (H1)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from flask import Flask
from flask.views import MethodView
from werkzeug.middleware.dispatcher import DispatcherMiddleware
from werkzeug.middleware.proxy_fix import ProxyFix
from werkzeug.routing import BaseConverter

from idemconsumer import App
from idemconsumer.http import Idempotency, Route
from idemconsumer.http.wsgi import IdempotencyMiddleware
from tests.http.fake_requests import FakeRequests
from tests.http.site import by_header
from tests.http.wsgi_client import ask


class Shop:
    """A Flask app whose view counts its runs."""

    def __init__(self, store: FakeRequests) -> None:
        self.flask = Flask("shop")
        self.flask.testing = False
        self.door = Idempotency(App("shop"), tenant=by_header, default=None, store=store)
        self.runs = 0

    def view(self, **parameters: object) -> tuple[str, int]:
        self.runs += 1
        return "placed", 201

    def add(self, rule: str, *, mark: bool = True) -> None:
        view: Any = self.door.route(required=True)(self.view) if mark else self.view
        self.flask.add_url_rule(rule, rule, view, methods=["GET", "POST"])

    def is_kept(self, path: str, app: Any = None, **more: Any) -> None:
        """Without a key it does not run, and with one it runs once."""
        app = app or IdempotencyMiddleware(self.flask.wsgi_app, self.door)
        before = self.runs
        assert ask(app, None, PATH_INFO=path, **more).status.startswith("400")
        assert self.runs == before
        assert [ask(app, path, PATH_INFO=path, **more).replayed for _ in range(2)] == [False, True]
        assert self.runs == before + 1


@pytest.fixture
def shop(store: FakeRequests) -> Shop:
    return Shop(store)


@pytest.mark.parametrize(
    ("rule", "path"),
    [
        ("/orders/<int:id>", "/orders/7"),
        ("/orders/<int(signed=True):id>", "/orders/-7"),
        ("/orders/<any(a, b):id>", "/orders/a"),
        ("/orders/<pair:id>", "/orders/1/2"),
        ("/orders/<pair('(x)'):id>", "/orders/1/2"),
        ("/orders/<path:id>", "/orders/a/b"),
        ("/v<int:version>-<id>/orders", "/v1-7/orders"),
    ],
)
def test_its_converters(shop: Shop, rule: str, path: str) -> None:
    class Pair(BaseConverter):
        regex = "[^/]+/[^/]+"
        part_isolating = False

        def __init__(self, url_map: Any, *given: str) -> None:
            super().__init__(url_map)

    shop.flask.url_map.converters["pair"] = Pair
    shop.add(rule)
    shop.is_kept(path)


def test_a_converter_that_does_not_take_a_value_leaves_it_to_the_next_rule(shop: Shop) -> None:
    shop.add("/orders/<int:id>", mark=False)
    shop.add("/orders/<name>")
    shop.is_kept("/orders/abc")
    assert ask(IdempotencyMiddleware(shop.flask.wsgi_app, shop.door), None, PATH_INFO="/orders/9").status[:3] == "201"


def test_a_method_in_small_letters_is_that_method(shop: Shop) -> None:
    shop.add("/orders")
    shop.is_kept("/orders", method="post")


def test_middleware_between_the_door_and_the_app(shop: Shop) -> None:
    shop.add("/orders")
    shop.is_kept("/orders", IdempotencyMiddleware(ProxyFix(shop.flask.wsgi_app, x_prefix=1), shop.door))


def test_a_class_is_marked_or_its_view(shop: Shop) -> None:
    @shop.door.route(required=True)
    class Orders(MethodView):
        def post(self) -> Any:
            return shop.view()

    class Refunds(MethodView):
        decorators = [shop.door.route(required=True)]  # noqa: RUF012 - as Flask has it

        def post(self) -> Any:
            return shop.view()

    shop.flask.add_url_rule("/orders", view_func=Orders.as_view("orders"))
    shop.flask.add_url_rule("/refunds", view_func=Refunds.as_view("refunds"))
    shop.is_kept("/orders")
    shop.is_kept("/refunds")


@pytest.mark.parametrize("method", ["POST", "GET"])
def test_without_the_front_door_nothing_runs(shop: Shop, method: str) -> None:
    shop.add("/orders")
    assert ask(shop.flask, None, method=method).status[:3] == "500"
    assert shop.runs == 0


def test_an_app_that_is_mounted_out_of_sight_is_refused(shop: Shop) -> None:
    shop.add("/orders")
    app = IdempotencyMiddleware(DispatcherMiddleware(Flask("outer").wsgi_app, {"/v1": shop.flask}), shop.door)
    assert ask(app, PATH_INFO="/v1/orders").status[:3] == "500"
    assert shop.runs == 0


def test_a_get_of_a_marked_view_passes(shop: Shop) -> None:
    shop.add("/orders")
    assert ask(IdempotencyMiddleware(shop.flask.wsgi_app, shop.door), None, method="GET").status[:3] == "201"


@pytest.mark.parametrize("stream", [True, False])
def test_a_view_that_is_a_generator_runs_when_its_response_is_sent(shop: Shop, *, stream: bool) -> None:
    """Which is after the front door has let it go, if nothing is kept."""

    def parts() -> Iterator[str]:
        yield "a"
        yield "b"

    shop.flask.add_url_rule("/parts", view_func=shop.door.route(stream=stream)(parts), methods=["GET", "POST"])
    app = IdempotencyMiddleware(shop.flask.wsgi_app, shop.door)
    for key, method in ((None, "GET"), (None, "POST"), ("k", "POST")):
        assert ask(app, key, method=method, PATH_INFO="/parts").body == b"ab"


@pytest.mark.parametrize("path", ["/orders/7", "//orders/7", "/orders/7/"])
def test_what_is_written_down_is_found_however_flask_reads_the_path(store: FakeRequests, path: str) -> None:
    shop = Shop(store)
    shop.flask.url_map.strict_slashes = False
    shop.add("/orders/<int:number>", mark=False)
    routes = {"POST /orders/{id}": Route(required=True)}
    shop.door = Idempotency(App("shop"), tenant=by_header, default=None, routes=routes, store=store)
    shop.is_kept(path)


def test_a_mark_above_the_decorator_of_flask_is_found(shop: Shop) -> None:
    @shop.door.route(required=True)
    @shop.flask.post("/orders")
    def place() -> tuple[str, int]:
        return shop.view()

    shop.is_kept("/orders")
