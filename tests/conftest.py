"""Real servers as fixtures, started when the first test asks for them.

A shared server lives as long as the test session; tests keep apart by databases, topics and queues of
their own. Who kills or reconfigures a server makes one with a `private_…` factory. An address in
IDEMCONSUMER_DSN, IDEMCONSUMER_KAFKA, IDEMCONSUMER_RABBITMQ or IDEMCONSUMER_SQS is used instead of a server of our own.
"""

from __future__ import annotations

import gc
import importlib
import os
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn, TypeVar

import pytest
from hypothesis import settings

from idemconsumer.embedded import postgres
from idemconsumer.embedded.binaries import EmbeddedUnavailable
from idemconsumer.embedded.postgres import EmbeddedPostgres
from tests.support import ROOT, helm
from tests.support.logs import LogCapture, capturing
from tests.support.missing import Missing
from tests.support.servers.elasticmq import CREDENTIALS, ElasticMQ
from tests.support.servers.kafka import Kafka
from tests.support.servers.kept import keep
from tests.support.servers.made import (
    PostgresServer,
    PrivateElasticMQ,
    PrivateKafka,
    PrivatePgBouncer,
    PrivatePostgres,
    PrivateRabbitMQ,
    PrivateRedis,
    Server,
)
from tests.support.servers.memory import keep_in_memory
from tests.support.servers.pgbouncer import PgBouncer, debian_pgbouncer, newer_pgbouncer
from tests.support.servers.postgres import cheap_passwords, fresh_database, system_binaries
from tests.support.servers.processes import ServerMissing
from tests.support.servers.rabbitmq import RabbitMQ
from tests.support.servers.redis import RedisServer
from tests.support.servers.shared import BROKERS, SharedBrokers, address_of
from tests.support.times import Times, longest_first
from tests.support.tuning import tuned

settings.register_profile("untimed", deadline=None)  # a machine with other work to do is no failure
settings.load_profile("untimed")

S = TypeVar("S")

_BROKERS = pytest.StashKey[SharedBrokers]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--keep-durations", action="store_true", help="write tests/durations.json: `make durations`")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Missing(config))
    keep_in_memory()
    _share_ports(config)
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Times(config.getoption("keep_durations")))
        if config.getoption("tx", None):
            config.stash[_BROKERS] = SharedBrokers()


def pytest_sessionstart(session: pytest.Session) -> None:
    """A whole run needs each broker: they start while the tests are collected."""
    brokers = session.config.stash.get(_BROKERS, None)
    if brokers is not None and _whole(session.config):
        brokers.start(name for name in BROKERS if _named(name) is None)


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """After a checkout, pytest rewrites the assertions of each file, which takes longer than all the rest of a
    collection. Each process of a whole run begins with other files, and finds those of the others in the cache."""
    workerinput = getattr(session.config, "workerinput", None)
    if workerinput is not None and workerinput["whole"]:
        ours, processes = int(workerinput["workerid"].removeprefix("gw")), workerinput["workercount"]
        for file in sorted((ROOT / "tests").rglob("test_*.py"))[ours::processes]:
            with suppress(Exception, pytest.skip.Exception):  # said when it is collected
                importlib.import_module(".".join(file.relative_to(ROOT).with_suffix("").parts))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Called by xdist, for each of its processes."""
    node.workerinput["brokers"] = node.config.stash[_BROKERS].place
    node.workerinput["whole"] = _whole(node.config)


def pytest_unconfigure(config: pytest.Config) -> None:
    if (brokers := config.stash.get(_BROKERS, None)) is not None:
        brokers.close()


def _whole(config: pytest.Config) -> bool:
    """Nothing was named that is to run."""
    return config.args_source is not pytest.Config.ArgsSource.ARGS


def _processes(config: pytest.Config) -> int:
    """That run tests."""
    return len(config.getoption("tx", None) or [None])


def _share_ports(config: pytest.Config) -> None:
    """No two processes of a run give out the same port: not between its choice and its use, nor while its server,
    killed by a test, is down."""
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", _processes(config)))
    ours = int(os.environ.get("PYTEST_XDIST_WORKER", f"gw{processes}").removeprefix("gw"))
    postgres._handed_out.update(port for port in postgres._PORTS if port % (processes + 1) != ours)


def pytest_collection_finish() -> None:
    """What is there now stays to the end, so that no collection need look at it again."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failure is shown by parsing its file, and a collection may log a lost task then: see manual.sources."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(trylast=True)  # when those are gone that do not run
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    longest_first(items, ROOT)


class FromEnvironment:
    """A server that is not ours."""

    def __init__(self, address: str) -> None:
        self.address = self.dsn = address


def _missing(reason: str) -> NoReturn:
    if os.environ.get("CI"):
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


def _have(make: Callable[[], S]) -> S:
    try:
        return make()
    except (ServerMissing, EmbeddedUnavailable) as error:
        _missing(str(error))


def _ours_only(variable: str) -> None:
    if os.environ.get(variable):
        pytest.skip(f"needs a server that it may kill or configure, and {variable} names another one; unset it")


def _started_postgres(stack: ExitStack, binaries: Path | None, settings: Mapping[str, str]) -> EmbeddedPostgres:
    server = EmbeddedPostgres(binaries=binaries, settings=settings)
    stack.callback(server.stop)
    _have(server.start)
    cheap_passwords(server.dsn)
    return server


@pytest.fixture(scope="session")
def postgres18() -> Iterator[PostgresServer]:
    if dsn := os.environ.get("IDEMCONSUMER_DSN"):
        yield FromEnvironment(dsn)
        return
    with ExitStack() as stack:
        server = _started_postgres(stack, None, {})
        stack.enter_context(keep(server.dsn))
        yield server


@pytest.fixture(scope="session")
def postgres15_binaries() -> Path:
    return _have(system_binaries)


@pytest.fixture(scope="session")
def postgres15(postgres15_binaries: Path) -> Iterator[PostgresServer]:
    with ExitStack() as stack:
        server = _started_postgres(stack, postgres15_binaries, {})
        stack.enter_context(keep(server.dsn))
        yield server


def _named(broker: str) -> str | None:
    """Where that one is, if it is to be used instead of a server of our own."""
    return os.environ.get(f"IDEMCONSUMER_{broker.upper()}") or None


def _broker(request: pytest.FixtureRequest, name: str) -> Iterator[Server]:
    """One for the whole run: where several processes run tests, that of the process which started them."""
    if address := _named(name):
        yield FromEnvironment(address)
        return
    workerinput = getattr(request.config, "workerinput", None)
    if workerinput is not None:
        yield FromEnvironment(_have(lambda: address_of(name, workerinput["brokers"])))
        return
    with closing(_have(BROKERS[name])) as server:
        server.start()
        yield server


@pytest.fixture(scope="session")
def kafka(request: pytest.FixtureRequest) -> Iterator[Server]:
    yield from _broker(request, "kafka")


@pytest.fixture(scope="session")
def rabbitmq(request: pytest.FixtureRequest) -> Iterator[Server]:
    yield from _broker(request, "rabbitmq")


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    """Tests empty it."""
    with closing(_have(RedisServer)) as server:
        server.start()
        yield server


@pytest.fixture
def private_redis() -> Iterator[PrivateRedis]:
    """Makes started servers that a test may kill and configure: `private_redis(maxmemory="100mb")`."""
    with ExitStack() as stack:

        def make(**settings: str) -> RedisServer:
            server = _have(lambda: RedisServer({name.replace("_", "-"): value for name, value in settings.items()}))
            stack.callback(server.close)
            server.start()
            return server

        yield make


@pytest.fixture(scope="session")
def sqs(request: pytest.FixtureRequest) -> Iterator[Server]:
    """An SQS, and the variables that every client of AWS reads."""
    if os.environ.get("IDEMCONSUMER_SQS"):
        yield from _broker(request, "sqs")
        return
    with pytest.MonkeyPatch.context() as patch:
        for variable, value in CREDENTIALS.items():
            patch.setenv(variable, value)
        yield from _broker(request, "sqs")


@pytest.fixture(scope="module")
def private_postgres() -> Iterator[PrivatePostgres]:
    """Makes started servers for one test module, which may kill and restart them; stopped when it is over."""
    _ours_only("IDEMCONSUMER_DSN")
    with ExitStack() as stack:

        def make(*, binaries: Path | None = None, settings: Mapping[str, str] | None = None) -> EmbeddedPostgres:
            return _started_postgres(stack, binaries, settings or {})

        yield make


@pytest.fixture
def private_pgbouncer() -> Iterator[PrivatePgBouncer]:
    """Makes started poolers in front of a Postgres of ours, of either version."""
    with ExitStack() as stack:

        def make(
            dsn: str, pool_mode: str, *, newer: bool = True, settings: Mapping[str, str] | None = None
        ) -> PgBouncer:
            program = _have(newer_pgbouncer if newer else debian_pgbouncer)
            pooler = PgBouncer(program, dsn, pool_mode, settings or {})
            stack.callback(pooler.close)
            return pooler

        yield make


@pytest.fixture(scope="module")
def private_kafka() -> Iterator[PrivateKafka]:
    """Makes started servers for one test module; `close()` one to have its memory back earlier."""
    _ours_only("IDEMCONSUMER_KAFKA")
    with ExitStack() as stack:

        def make(
            *,
            listeners: Mapping[str, str] | None = None,
            properties: Mapping[str, str] | None = None,
            joins: Kafka | None = None,
        ) -> Kafka:
            server = _have(lambda: Kafka(listeners=listeners, properties=properties, joins=joins))
            stack.callback(server.close)
            server.start()
            return server

        yield make


@pytest.fixture(scope="module")
def private_rabbitmq() -> Iterator[PrivateRabbitMQ]:
    """Makes started servers for one test module; `close()` one to have its memory back earlier."""
    _ours_only("IDEMCONSUMER_RABBITMQ")
    with ExitStack() as stack:

        def make(*, config: Mapping[str, str] | None = None) -> RabbitMQ:
            server = _have(lambda: RabbitMQ(config=config))
            stack.callback(server.close)
            server.start()
            return server

        yield make


@pytest.fixture(scope="module")
def private_elasticmq() -> Iterator[PrivateElasticMQ]:
    """Makes started servers for one test module, with the variables that every client of AWS reads."""
    _ours_only("IDEMCONSUMER_SQS")
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        for variable, value in CREDENTIALS.items():
            patch.setenv(variable, value)

        def make() -> ElasticMQ:
            server = _have(ElasticMQ)
            stack.callback(server.close)
            server.start()
            return server

        yield make


@pytest.fixture
def database(postgres18: PostgresServer) -> Iterator[str]:
    """The DSN of an empty database, for this test alone."""
    with fresh_database(postgres18.dsn) as dsn:
        yield dsn


@pytest.fixture(params=["postgres18", "postgres15"])
def any_database(request: pytest.FixtureRequest) -> Iterator[str]:
    """As `database`, once in each supported version of Postgres."""
    server: PostgresServer = request.getfixturevalue(request.param)
    with fresh_database(server.dsn) as dsn:
        yield dsn


@pytest.fixture
def logged() -> Iterator[LogCapture]:
    """What was logged, as `entries`."""
    with capturing() as capture:
        yield capture


@pytest.fixture
def folder() -> Iterator[Path]:
    """Open to all, as `tmp_path` is not: for root, Postgres runs as another account."""
    with TemporaryDirectory(prefix="test.") as made:
        Path(made).chmod(0o755)
        yield Path(made)


@pytest.fixture(params=["waits", "ahead"])
def both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each statement is waited for, or it is sent ahead from the first time on (J26)."""
    tuned(monkeypatch, runs_before_ahead=0 if request.param == "ahead" else 1_000_000)


@pytest.fixture(scope="session")
def helm_program() -> str:
    return _have(helm.program)
