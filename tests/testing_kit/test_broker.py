"""The kit's brokers keep the rules that the worker relies on with any broker."""

from __future__ import annotations

from uuid import uuid4

import pytest

from idemconsumer.message.message import Subscription
from idemconsumer.testing import BrokerContract
from idemconsumer.testing.kit.hub import Hub
from idemconsumer.testing.kit.kit_broker import KitBroker


class Harness:
    names_are_free = True

    def __init__(self, scheme: str) -> None:
        self._scheme, self._hub = scheme, Hub()
        self.keeps_message_id = scheme != "kafka"

    def broker(self) -> KitBroker:
        return KitBroker(self._scheme, self._hub)

    async def destination(self) -> str:
        return f"contract-{uuid4().hex}"

    def subscription(self, name: str) -> Subscription:
        return Subscription(f"{self._scheme}:{name}", "handler", "group")


class TestKitBroker(BrokerContract):
    @pytest.fixture(params=["kafka", "rabbitmq"])
    def harness(self, request: pytest.FixtureRequest) -> Harness:
        return Harness(request.param)
