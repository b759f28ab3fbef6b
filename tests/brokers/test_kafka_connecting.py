"""Connecting to Kafka: TLS and logins, and for each way in which it fails an error that names the cause."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import re
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web
from aiokafka import AIOKafkaConsumer
from aiokafka.coordinator.assignors.range import RangePartitionAssignor

from idemconsumer.brokers.kafka.kafka_broker import KafkaBroker
from idemconsumer.brokers.kafka.kafka_options import connection_options
from idemconsumer.errors import BrokerUnavailable, ConfigurationError, SessionEnded
from idemconsumer.ports.broker import Bounds, BytesInHand, Outgoing, Session
from idemconsumer.settings import Settings
from tests.support.kafka import BOUNDS, World, killing, take, world_of
from tests.support.logs import LogCapture, entries
from tests.support.servers.elasticmq import CREDENTIALS
from tests.support.servers.kafka import Kafka
from tests.support.servers.made import PrivateKafka
from tests.support.servers.tls import issue
from tests.support.tuning import tuned
from tests.support.waiting import PATIENCE


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (Settings(), "IDEMCONSUMER_KAFKA=host:9092"),
        (Settings(kafka="x:1", kafka_security_protocol="TLS"), "write one of PLAINTEXT, SSL"),
        (Settings(kafka="x:1", kafka_security_protocol="SASL_SSL"), "IDEMCONSUMER_KAFKA_SASL_PASSWORD"),
        (
            Settings(kafka="x:1", kafka_security_protocol="SASL_SSL", kafka_sasl_mechanism="OAUTHBEARER"),
            "IDEMCONSUMER_KAFKA_OAUTH_TOKEN_URL",
        ),
        (
            Settings(kafka="x:1", kafka_security_protocol="SASL_SSL", kafka_sasl_mechanism="AWS_MSK_IAM"),
            "AWS_DEFAULT_REGION",
        ),
        (
            Settings(kafka="x:1", kafka_security_protocol="SASL_SSL", kafka_sasl_mechanism="GSSAPI"),
            "SCRAM-SHA-512",
        ),
        (Settings(kafka="x:1", kafka_security_protocol="SSL", kafka_ca_file="/nowhere"), "_CA_FILE"),
    ],
)
async def test_settings_that_cannot_work_are_refused_at_once(
    settings: Settings, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_DEFAULT_REGION", raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")
    with pytest.raises(ConfigurationError, match=words):
        KafkaBroker(settings)


async def test_aiokafka_is_silent_unless_its_logger_was_given_a_level(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = logging.getLogger("aiokafka")
    monkeypatch.setattr(logger, "level", logging.NOTSET)
    KafkaBroker(Settings(kafka="x:1"))
    assert logger.level == logging.CRITICAL
    logger.setLevel(logging.INFO)
    KafkaBroker(Settings(kafka="x:1"))
    assert logger.level == logging.INFO
    logger.setLevel(logging.CRITICAL)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority, and for each of `server` and `client` a key and a certificate that it has signed."""
    folder = tmp_path_factory.mktemp("certificates")

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], check=True, capture_output=True, cwd=folder)

    made = ("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2")
    usage = ("-addext", "keyUsage=critical,keyCertSign")  # from Python 3.13 on an authority has to say so
    openssl(*made, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=ca", *usage)
    for name in ("server", "client"):
        signed = ("-CA", "ca.pem", "-CAkey", "ca.key", "-addext", "basicConstraints=critical,CA:FALSE")
        names = ("-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1")
        openssl(*made, "-keyout", f"{name}.key", "-out", f"{name}.pem", *signed, *names)
    (folder / "both.pem").write_text((folder / "server.key").read_text() + (folder / "server.pem").read_text())
    return folder


@pytest.fixture(scope="module")
def guarded(private_kafka: PrivateKafka, certificates: Path) -> Iterator[Kafka]:
    """A Kafka with a listener that asks for a password and one that asks for a certificate."""
    plain = 'org.apache.kafka.common.security.plain.PlainLoginModule required user_app="secret";'
    server = private_kafka(
        listeners={"SASL": "SASL_PLAINTEXT", "TLS": "SSL"},
        properties={
            "sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-256,SCRAM-SHA-512",
            "listener.name.sasl.plain.sasl.jaas.config": plain,
            "listener.name.sasl.scram-sha-256.sasl.jaas.config": SCRAM,
            "listener.name.sasl.scram-sha-512.sasl.jaas.config": SCRAM,
            "ssl.keystore.type": "PEM",
            "ssl.keystore.location": str(certificates / "both.pem"),
            "ssl.truststore.type": "PEM",
            "ssl.truststore.location": str(certificates / "ca.pem"),
            "ssl.client.auth": "required",
        },
    )
    with killing(server):
        tool = [*server._java(), "kafka.admin.ConfigCommand", "--bootstrap-server", server.address]
        for mechanism in ("SCRAM-SHA-256", "SCRAM-SHA-512"):
            user = ("--entity-type", "users", "--entity-name", "app", "--alter")
            password = ("--add-config", f"{mechanism}=[password=secret]")
            subprocess.run([*tool, *user, *password], check=True, capture_output=True)
        yield server


SCRAM = "org.apache.kafka.common.security.scram.ScramLoginModule required;"


async def round_trip(world: World, settings: Settings) -> None:
    await world.create()
    world.brokers.append(KafkaBroker(settings))
    assert [each.level for each in await world.broker.check(world.subscription())] == ["ok", "ok"]
    await world.broker.publish(world.topic, [Outgoing(b"secret")])
    [delivery] = await take(await world.open(), 1)
    assert delivery.message.body == b"secret"


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"])
async def test_a_password_is_enough_to_publish_check_and_consume(guarded: Kafka, mechanism: str) -> None:
    settings = Settings(
        kafka=guarded.address_of("SASL"),
        kafka_security_protocol="SASL_PLAINTEXT",
        kafka_sasl_mechanism=mechanism,
        kafka_sasl_username="app",
        kafka_sasl_password="secret",
    )
    async with world_of(guarded) as world:
        await round_trip(world, settings)


async def test_a_certificate_is_enough_and_a_stranger_is_refused(guarded: Kafka, certificates: Path) -> None:
    settings = Settings(
        kafka=guarded.address_of("TLS"),
        kafka_security_protocol="SSL",
        kafka_ca_file=str(certificates / "ca.pem"),
        kafka_cert_file=str(certificates / "client.pem"),
        kafka_key_file=str(certificates / "client.key"),
    )
    async with world_of(guarded) as world:
        await round_trip(world, settings)
        for wrong in ({"kafka_cert_file": None, "kafka_key_file": None}, {"kafka_ca_file": None}):
            stranger = KafkaBroker(msgspec.structs.replace(settings, **wrong))
            with pytest.raises(BrokerUnavailable, match="cannot be used"):
                await stranger.open([world.subscription()], BOUNDS)


def shown(guarded: Kafka, certificates: Path, certificate: Path, key: Path) -> Settings:
    """Of a client that shows this certificate."""
    return Settings(
        kafka=guarded.address_of("TLS"),
        kafka_security_protocol="SSL",
        kafka_ca_file=str(certificates / "ca.pem"),
        kafka_cert_file=str(certificate),
        kafka_key_file=str(key),
    )


async def test_a_certificate_that_was_renewed_is_read_and_one_that_has_expired_is_ours(
    guarded: Kafka, certificates: Path
) -> None:
    """K27"""
    certificate, key = issue(certificates, "short", days=-1)
    settings = shown(guarded, certificates, certificate, key)
    async with world_of(guarded) as world:
        await world.create()
        world.brokers.append(KafkaBroker(settings))
        says = rf"refuses the connection: our own certificate, {certificate}, expired on 20.* UTC; renew that file"
        with pytest.raises(BrokerUnavailable, match=says):
            await world.broker.open([world.subscription()], BOUNDS)
        with pytest.raises(BrokerUnavailable, match=says):
            await world.broker.publish(world.topic, [Outgoing(b"x")])
        issue(certificates, "short")
        await world.broker.publish(world.topic, [Outgoing(b"secret")])
        [delivery] = await take(await world.open(), 1)
        assert delivery.message.body == b"secret"


async def fetched_for_ever(session: Session) -> None:
    while True:
        await session.fetch()


async def test_one_that_expires_is_named_at_once_by_who_was_connected_before(
    guarded: Kafka, certificates: Path, logged: LogCapture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """K27: by a publisher, the relay and a member of a group, whose client only says that nobody has answered."""
    certificate, key = issue(certificates, "expiring")
    settings = shown(guarded, certificates, certificate, key)
    # Who waited for an answer as long as for that of a slow broker would not come back before the test is over.
    tuned(monkeypatch, kafka_probe_pause=0.2, kafka_probe_patience=1.0, kafka_confirmed_within=10 * PATIENCE)
    async with world_of(guarded) as world:
        await world.create()
        world.brokers.append(KafkaBroker(settings))
        session = await world.open()
        await world.broker.publish(world.topic, [Outgoing(b"x")])
        assert await world.broker.relay(world.topic, [Outgoing(b"x")]) == [None]
        issue(certificates, "expiring", days=-1)
        await asyncio.to_thread(guarded.stop)
        await asyncio.to_thread(guarded.start)
        says = f"refuses the connection: our own certificate, {certificate}, expired on 20"
        async with asyncio.timeout(PATIENCE):
            published, relayed = await asyncio.gather(
                world.broker.publish(world.topic, [Outgoing(b"x")]),
                world.broker.relay(world.topic, [Outgoing(b"x")]),
                return_exceptions=True,
            )
        assert says in str(published)
        assert says in str(relayed)
        with pytest.raises(SessionEnded, match=re.escape(says)):
            await asyncio.wait_for(fetched_for_ever(session), PATIENCE)
        (line,) = entries(logged, "kafka unreachable")  # before it was back, or behind that
        assert re.search("nothing listens at|refuses the connection", line["error"])


# ------------------------------------------------------------------------------------------- why it cannot be used
LOGIN: dict[str, Any] = {
    "kafka_security_protocol": "SASL_PLAINTEXT",
    "kafka_sasl_mechanism": "SCRAM-SHA-256",
    "kafka_sasl_username": "app",
    "kafka_sasl_password": "s3cret",
}


@pytest.mark.parametrize(
    ("listener", "given", "cause"),
    [
        ("SASL", LOGIN, r"refused the login with SCRAM-SHA-256: wrong IDEMCONSUMER_KAFKA_SASL_USERNAME or _PASSWORD"),
        ("SASL", LOGIN | {"kafka_sasl_mechanism": "PLAIN"}, "refused the login with PLAIN"),
        (
            "SASL",
            {},
            r"requires a login with PLAIN or SCRAM-SHA-256 or SCRAM-SHA-512; set .*_PROTOCOL to SASL_PLAINTEXT",
        ),
        ("PLAINTEXT", LOGIN, r"accepts no login; set .*_SECURITY_PROTOCOL to PLAINTEXT"),
        ("PLAINTEXT", {"kafka_security_protocol": "SSL"}, r"speaks no TLS; set .*_SECURITY_PROTOCOL to PLAINTEXT"),
        ("TLS", {}, r"speaks TLS; set .*_SECURITY_PROTOCOL to SSL"),
        ("TLS", {"kafka_security_protocol": "SSL"}, r"certificate of .* is not accepted: .*; set .*_KAFKA_CA_FILE"),
    ],
)
async def test_a_listener_of_another_kind_is_named(
    guarded: Kafka, listener: str, given: dict[str, Any], cause: str
) -> None:
    async with world_of(guarded) as world:
        await world.create()
        world.brokers.append(KafkaBroker(Settings(kafka=guarded.address_of(listener), **given)))
        with pytest.raises(BrokerUnavailable, match=cause) as opening:
            await world.broker.open([world.subscription()], BOUNDS)
        with pytest.raises(BrokerUnavailable, match=cause):
            await world.broker.publish(world.topic, [Outgoing(b"x")])
        [*_, finding] = await world.broker.check(world.subscription())
        assert (finding.level, finding.text) == ("error", str(opening.value))
        assert "s3cret" not in finding.text


async def test_a_mechanism_that_the_listener_does_not_take_is_named(narrow: Kafka) -> None:
    async with world_of(narrow) as world:
        world.brokers.append(KafkaBroker(Settings(kafka=narrow.address_of("SASL"), **LOGIN)))
        with pytest.raises(
            BrokerUnavailable, match=r"accepts no logins with SCRAM-SHA-256; set .*_MECHANISM to PLAIN$"
        ):
            await world.broker.open([world.subscription()], BOUNDS)


async def test_a_dead_port_and_an_unknown_name_are_told_apart(world: World) -> None:
    for address, cause in (("127.0.0.1:1", "nothing listens"), ("no.such.invalid:1", "name of .* cannot be resolved")):
        with pytest.raises(BrokerUnavailable, match=cause):
            await KafkaBroker(Settings(kafka=address)).open([world.subscription()], BOUNDS)


@pytest.mark.long
async def test_brokers_that_advertise_what_nobody_reaches_are_named(private_kafka: PrivateKafka) -> None:
    with killing(private_kafka(properties={"advertised.listeners": "PLAINTEXT://127.0.0.1:1"})) as server:
        broker = KafkaBroker(Settings(kafka=server.address))
        with pytest.raises(
            BrokerUnavailable, match=r"advertises a broker 127.0.0.1:1 .*; correct advertised.listeners"
        ):
            await broker.publish("orders", [Outgoing(b"x")])
        await broker.close()


async def test_a_group_that_shares_by_another_protocol_is_named(world: World) -> None:
    await world.create()
    async with AIOKafkaConsumer(
        world.topic,
        bootstrap_servers=world.server.address,
        group_id=world.group,
        partition_assignment_strategy=[RangePartitionAssignor],
    ):
        found = [finding for finding in await world.broker.check(world.subscription()) if finding.level == "error"]
        assert ["'range', and workers by 'roundrobin'" in finding.text for finding in found] == [True]
        assert "another partition assignor than idemconsumer (roundrobin)" in await ended(world)


async def test_a_session_timeout_that_the_brokers_refuse_is_named(world: World) -> None:
    await world.create()
    world.brokers.append(KafkaBroker(Settings(kafka=world.server.address, kafka_session_timeout=1)))
    found = [finding for finding in await world.broker.check(world.subscription()) if finding.level == "error"]
    assert ["kafka_session_timeout is 1 s, but the brokers allow 6 to 1800 s" in each.text for each in found] == [True]
    assert "set IDEMCONSUMER_KAFKA_SESSION_TIMEOUT to a value between" in await ended(world)


async def ended(world: World) -> str:
    """Why a session ended."""
    session = await world.open()
    async with asyncio.timeout(20):
        while True:
            try:
                await session.fetch()
            except SessionEnded as error:
                return str(error)


@pytest.fixture(scope="module")
def narrow(private_kafka: PrivateKafka) -> Iterator[Kafka]:
    """A Kafka with listeners that take one mechanism each. It believes tokens that nobody has signed."""
    package = "org.apache.kafka.common.security"
    properties = {
        "listener.name.sasl.sasl.enabled.mechanisms": "PLAIN",
        "listener.name.sasl.plain.sasl.jaas.config": f'{package}.plain.PlainLoginModule required user_app="secret";',
        "listener.name.oauth.sasl.enabled.mechanisms": "OAUTHBEARER",
        "listener.name.oauth.oauthbearer.sasl.jaas.config": (
            f'{package}.oauthbearer.OAuthBearerLoginModule required unsecuredLoginStringClaim_sub="broker";'
        ),
    }
    listeners = {"SASL": "SASL_PLAINTEXT", "OAUTH": "SASL_PLAINTEXT"}
    with killing(private_kafka(listeners=listeners, properties=properties)) as server:
        yield server


# ------------------------------------------------------------------------------------------------------------- tokens
@dataclass
class TokenServer:
    """Gives unsigned tokens to one client, for so many seconds."""

    life: float = 3600
    asked: list[dict[str, str]] = field(default_factory=list)
    url: str = ""

    async def _answer(self, request: web.Request) -> web.Response:
        if request.headers["Authorization"] != f"Basic {base64.b64encode(b'app%3A1:s3%25cret').decode()}":
            return web.Response(status=401)
        self.asked.append({name: str(value) for name, value in (await request.post()).items()})
        now = int(time.time())
        parts = [{"alg": "none"}, {"sub": "app", "iat": now - 5, "exp": now + 60}]
        encoded = [base64.urlsafe_b64encode(msgspec.json.encode(part)).decode().rstrip("=") for part in parts]
        return web.json_response({"access_token": f"{'.'.join(encoded)}.", "expires_in": self.life})

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[TokenServer]:
        app = web.Application()
        app.router.add_post("/token", self._answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}/token"
        try:
            yield self
        finally:
            await runner.cleanup()


def by_oauth(server: Kafka, url: str, **changed: Any) -> Settings:
    given = {
        "kafka_security_protocol": "SASL_PLAINTEXT",
        "kafka_sasl_mechanism": "OAUTHBEARER",
        "kafka_oauth_token_url": url,
        "kafka_sasl_username": "app:1",
        "kafka_sasl_password": "s3%cret",
        "kafka_oauth_scope": "kafka",
    }
    return Settings(kafka=server.address_of("OAUTH"), **(given | changed))


async def test_a_token_of_an_oauth_server_is_enough_and_kept_for_its_life(narrow: Kafka) -> None:
    async with TokenServer().serving() as tokens, world_of(narrow) as world:
        await round_trip(world, by_oauth(narrow, tokens.url))
        assert tokens.asked == [{"grant_type": "client_credentials", "scope": "kafka"}]
        provider = connection_options(by_oauth(narrow, tokens.url))["sasl_oauth_token_provider"]
        tokens.life = 0
        assert await provider.token()
        assert await provider.token()
        assert len(tokens.asked) == 3


async def test_a_server_of_tokens_that_gives_none_is_named(narrow: Kafka) -> None:
    async with TokenServer().serving() as tokens, world_of(narrow) as world:
        for changed, cause in (
            (
                {"kafka_sasl_password": "s3cret"},
                "refused a token with status 401; correct the client.s id and secret",
            ),
            ({"kafka_oauth_token_url": "http://127.0.0.1:1/"}, "http://127.0.0.1:1/ gave no token: URLError"),
        ):
            broker = KafkaBroker(by_oauth(narrow, tokens.url, **changed))
            with pytest.raises(BrokerUnavailable, match=cause) as caught:
                await broker.open([world.subscription()], BOUNDS)
            assert "s3" not in str(caught.value)


async def test_a_token_for_msk_is_signed_for_its_region(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "ap-south-1")
    settings = Settings(kafka="b-1.x:9098", kafka_security_protocol="SASL_SSL", kafka_sasl_mechanism="aws_msk_iam")
    options = connection_options(settings)
    assert options["sasl_mechanism"] == "OAUTHBEARER"
    token = await options["sasl_oauth_token_provider"].token()
    signed = base64.urlsafe_b64decode(token + "=" * (-len(token) % 4)).decode()
    assert signed.startswith("https://kafka.ap-south-1.amazonaws.com/?Action=kafka-cluster%3AConnect")


async def test_what_the_client_holds_ready_follows_the_bound_in_bytes(world: World) -> None:
    await world.create()
    for _ in range(60):  # a batch each
        await world.broker.publish(world.topic, [Outgoing(b"x" * 700)])
    session = await world.open(Bounds(lanes=4, group=32, memory=BytesInHand(16_384)))
    fetched: list[int] = []
    while sum(fetched) < 60:
        deliveries = await session.fetch()
        fetched.append(len(deliveries))
        await session.settle(deliveries)
    assert max(fetched) <= 6, "what one answer of a quarter of the bound has, although twice as many may be in hand"
