"""R46: an import that fails names the module that is missing, and what installs it."""

from __future__ import annotations

import subprocess
import sys
from textwrap import dedent

import pytest

# Each in a process of its own, since what is imported once stays.
PROGRAM = dedent(
    """
    import importlib, os, sys
    from pathlib import Path
    from idemconsumer.app.following import tracing_of
    from idemconsumer.brokers.adapters import connect
    from idemconsumer.errors import ConfigurationError
    from idemconsumer.settings import Settings

    def imports(name):
        return lambda: importlib.import_module(name)

    def brokers(scheme):
        return lambda: connect(scheme, Settings(kafka="k:1", rabbitmq="amqp://r"))

    CASES = [
        ("aiokafka", brokers("kafka")),
        ("cramjam", brokers("kafka")),
        ("aiokafka.admin", brokers("kafka")),
        ("aio_pika", brokers("rabbitmq")),
        ("aiormq", brokers("rabbitmq")),
        ("aiobotocore", brokers("sqs")),
        ("botocore", brokers("sqs")),
        ("redis", imports("idemconsumer.stores.redis.redis_client")),
        ("greenlet", imports("idemconsumer.sqlalchemy")),
        ("sqlalchemy.ext.asyncio", imports("idemconsumer.sqlalchemy")),
        ("fastapi", imports("idemconsumer.http.fastapi")),
        ("opentelemetry", lambda: tracing_of(Settings(tracing=True))),
    ]
    for name, act in CASES:
        if os.fork() == 0:
            sys.modules[name] = None  # as Python marks what is not there
            try:
                act()
            except ConfigurationError as error:
                print(name, "|", error, flush=True)
            os._exit(0)
        os.wait()
    """
)


@pytest.fixture(scope="module")
def said() -> dict[str, str]:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=100, check=True)
    return dict(line.split(" | ", 1) for line in done.stdout.splitlines())


@pytest.mark.parametrize(
    ("module", "begins", "extra"),
    [
        ("aiokafka", "kafka: its driver", "kafka"),
        ("cramjam", "kafka: its driver", "kafka"),
        ("aio_pika", "rabbitmq: its driver", "rabbitmq"),
        ("aiormq", "rabbitmq: its driver", "rabbitmq"),
        ("aiobotocore", "sqs: its driver", "sqs"),
        ("botocore", "sqs: its driver", "sqs"),
        ("redis", "redis: its client library", "redis"),
        ("greenlet", "idemconsumer.sqlalchemy: SQLAlchemy 2 with asyncio", "sqlalchemy"),
        ("opentelemetry", "tracing is on, and its library", "opentelemetry"),
    ],
)
def test_what_is_missing_is_named_with_what_installs_it(
    said: dict[str, str], module: str, begins: str, extra: str
) -> None:
    assert said[module].startswith(f"{begins} cannot be imported: there is no module '{module}")
    assert f"; pip install 'idemconsumer[{extra}]', for {sys.executable}" in said[module]


def test_what_is_no_extra_of_ours_is_named_too(said: dict[str, str]) -> None:
    assert "FastAPI cannot be imported: there is no module 'fastapi'" in said["fastapi"]


@pytest.mark.parametrize("module", ["aiokafka.admin", "sqlalchemy.ext.asyncio"])
def test_a_part_that_is_missing_is_not_the_whole(said: dict[str, str], module: str) -> None:
    package = module.partition(".")[0]
    assert f"cannot be imported: the {package} that is installed has no module '{module}'" in said[module]
