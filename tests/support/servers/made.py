"""What the fixtures of the servers give: one server for all tests, or a function that makes private ones."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from idemconsumer.embedded.postgres import EmbeddedPostgres
from tests.support.servers.elasticmq import ElasticMQ
from tests.support.servers.kafka import Kafka
from tests.support.servers.pgbouncer import PgBouncer
from tests.support.servers.rabbitmq import RabbitMQ
from tests.support.servers.redis import RedisServer


class Server(Protocol):
    """What tests may do with a shared broker: know where it is."""

    @property
    def address(self) -> str: ...


class PrivatePostgres(Protocol):
    def __call__(
        self, *, binaries: Path | None = None, settings: Mapping[str, str] | None = None
    ) -> EmbeddedPostgres: ...


class PrivatePgBouncer(Protocol):
    def __call__(
        self, dsn: str, pool_mode: str, *, newer: bool = True, settings: Mapping[str, str] | None = None
    ) -> PgBouncer: ...


class PrivateKafka(Protocol):
    def __call__(
        self,
        *,
        listeners: Mapping[str, str] | None = None,
        properties: Mapping[str, str] | None = None,
        joins: Kafka | None = None,
    ) -> Kafka: ...


class PrivateRabbitMQ(Protocol):
    def __call__(self, *, config: Mapping[str, str] | None = None) -> RabbitMQ: ...


class PrivateRedis(Protocol):
    def __call__(self, **settings: str) -> RedisServer: ...


class PrivateElasticMQ(Protocol):
    def __call__(self) -> ElasticMQ: ...


class PostgresServer(Protocol):
    @property
    def dsn(self) -> str: ...
