"""Brokers that all processes of a test run share: the one that started the others has them and says where they are."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from multiprocessing.connection import Client, Connection, Listener
from typing import Final, Protocol

from tests.support.servers.elasticmq import ElasticMQ
from tests.support.servers.kafka import Kafka
from tests.support.servers.processes import ServerMissing
from tests.support.servers.rabbitmq import RabbitMQ


class _Startable(Protocol):
    @property
    def address(self) -> str: ...

    def start(self) -> None: ...

    def close(self) -> None: ...


BROKERS: Final[Mapping[str, Callable[[], _Startable]]] = {"kafka": Kafka, "rabbitmq": RabbitMQ, "sqs": ElasticMQ}


class SharedBrokers:
    """Each is started once, by whoever asks for it first, and stopped by `close()`."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._answers: dict[str, tuple[str, str]] = {}
        self._locks = {name: threading.Lock() for name in BROKERS}
        self._listener = Listener(family="AF_UNIX")
        threading.Thread(target=self._listen, daemon=True).start()

    @property
    def place(self) -> str:
        """What the other processes pass to `address_of`."""
        return str(self._listener.address)

    def start(self, names: Iterable[str]) -> None:
        """Before anybody asks, side by side; it does not wait for them."""
        for name in names:
            threading.Thread(target=self._answer, args=(name,), daemon=True).start()

    def close(self) -> None:
        self._listener.close()
        self._stack.close()

    def _listen(self) -> None:
        while True:
            try:
                connection = self._listener.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        with connection, suppress(EOFError, OSError):
            connection.send(self._answer(connection.recv()))

    def _answer(self, name: str) -> tuple[str, str]:
        with self._locks[name]:
            if name not in self._answers:
                self._answers[name] = self._started(name)
            return self._answers[name]

    def _started(self, name: str) -> tuple[str, str]:
        try:
            server = BROKERS[name]()
            self._stack.callback(server.close)
            server.start()
        except ServerMissing as error:
            return "missing", str(error)
        except Exception as error:
            return "failed", str(error)
        return "ready", server.address


def address_of(name: str, place: str) -> str:
    """Where that broker is, once it takes requests. Raises ServerMissing if it is not installed."""
    with Client(place, family="AF_UNIX") as connection:
        connection.send(name)
        state, text = connection.recv()
    if state == "missing":
        raise ServerMissing(text)
    if state == "failed":
        raise RuntimeError(text)
    return str(text)
