"""Addresses of servers: what is taken, and that a mistake in one never shows its password."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from idemconsumer.addresses import is_local, kafka_hosts, rabbitmq_urls
from idemconsumer.brokers.adapters import connect
from idemconsumer.cli.main import main
from idemconsumer.errors import ConfigurationError
from idemconsumer.settings import PREFIX, Settings, load

UNENCODED = [
    "{scheme}://u:s3cret/x@h/v",
    "{scheme}://u:s3cret#x@h/v",
    "{scheme}://u:s3cret?x@h/v",
    "{scheme}://u:s3cret[x@h/v",
    "{scheme}://u:12/s3cret@h/v",
    "{scheme}://u:12#s3cret@h/v",
    "{scheme}://u:12?s3cret@h/v",
    "s3cret",
]


@pytest.mark.parametrize("form", UNENCODED)
@pytest.mark.parametrize(
    ("setting", "scheme"), [("rabbitmq", "amqp"), ("rabbitmq_management", "http"), ("sqs", "http")]
)
def test_a_url_that_cannot_be_read_is_never_quoted(setting: str, scheme: str, form: str) -> None:
    given: dict[str, Any] = {"rabbitmq": "amqp://h", setting: form.format(scheme=scheme)}
    with pytest.raises(ConfigurationError) as caught:
        connect("sqs" if setting == "sqs" else "rabbitmq", Settings(**given))
    assert "s3cret" not in str(caught.value)
    assert f"`{setting}` is not an address; write {scheme}" in str(caught.value)
    assert "percent-encoded" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is caught.value.__context__ is None, "a traceback would quote it"


@pytest.mark.parametrize("dsn", ["postgresql://u:s3cret/x@h/v", "postgresql://u:12/s3cret@h/v"])
def test_a_password_that_libpq_takes_for_a_port_or_a_database_is_never_quoted(tmp_path: Path, dsn: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        load({f"{PREFIX}DSN": dsn}, tmp_path)
    assert "s3cret" not in str(caught.value)
    assert "percent-encoded" in str(caught.value)


@pytest.mark.parametrize("character", "#?[]")
def test_characters_that_libpq_takes_in_a_password_need_no_encoding(tmp_path: Path, character: str) -> None:
    dsn = f"postgresql://u:s3{character}cret@h/v?application_name=a@b"
    assert load({f"{PREFIX}DSN": dsn}, tmp_path).dsn == dsn


@pytest.mark.parametrize(
    ("dsn", "says"),
    [
        ("postgresql://u:s3cret@h:99999/d", "invalid port number"),
        ("host=h,i password=s3cret port=1,2,3", "could not match 3 port numbers to 2 hosts"),
        ("postgresql://u:s3cret@h/d?sslmode=s3cret", "invalid sslmode value"),
        ("postgresql://u:s3cret@h/d?target_session_attrs=s3cret", "invalid target_session_attrs value"),
    ],
)
def test_what_libpq_refuses_before_it_connects_is_no_outage(tmp_path: Path, dsn: str, says: str) -> None:
    with pytest.raises(ConfigurationError, match=f"IDEMCONSUMER_DSN: {says}; write ") as caught:
        load({f"{PREFIX}DSN": dsn}, tmp_path)
    assert "s3cret" not in str(caught.value)


def test_ports_of_a_service_that_names_the_hosts_are_left_to_libpq(tmp_path: Path) -> None:
    assert load({f"{PREFIX}DSN": "service=shop port=1,2"}, tmp_path).dsn == "service=shop port=1,2"


@pytest.mark.parametrize(
    "servers",
    ["u:s3cret@h:9092", "h:9092,SASL_SSL://u:s3cret@h:9092", "kafka://h:9092", "h:s3cret", "h:9092,", "h/s:1"],
)
def test_kafka_takes_hosts_and_no_credentials(servers: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        connect("kafka", Settings(kafka=servers))
    assert "s3cret" not in str(caught.value)
    assert "IDEMCONSUMER_KAFKA_SASL_USERNAME" in str(caught.value)


@pytest.mark.parametrize(
    ("setting", "address"),
    [
        ("kafka", "h:99999"), ("kafka", "h:abc"), ("kafka", "u:s3cret@h"), ("rabbitmq", "amqp://u:s3#cret@h"),
        ("rabbitmq", "amqp://u:s3cret@h:99999"), ("rabbitmq", "amqp://u:s3cret@h:abc"), ("sqs", "http://h:abc"),
        ("rabbitmq_management", "http://u:s3#cret@h"), ("dsn", "postgresql://u:s3cret@h:99999x/d"),
        ("kafka", "h..i:9092"), ("kafka", f"{'h' * 64}:9092"), ("kafka", "h i:9092"), ("rabbitmq", "amqp://u:s3cret@h..i"),
        ("rabbitmq", f"amqp://g,{'h' * 64}"), ("sqs", "http://h..i"), ("redis", "redis://u:s3cret@h..i"),
        ("dsn", "postgresql://u:s3cret@h..i/d"), ("dsn", f"host=g,{'h' * 64}"), ("dsn", "postgresql://u:s3cret@%FF/d"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("verb", ["run", "check"])
def test_a_wrong_address_ends_every_verb_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str, setting: str, address: str
) -> None:
    monkeypatch.chdir(tmp_path)
    variable = f"{PREFIX}{setting.upper()}"
    done = CliRunner().invoke(main, [verb, "json:App"], env={variable: address, f"{PREFIX}LOG_FORMAT": "console"})
    assert done.exit_code == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"error: {variable} ")
    assert "s3" not in done.stderr.removeprefix(f"error: {variable} ")


@pytest.mark.parametrize(
    ("endpoint", "queue"), [("http://h_i", "q"), ("http://-h", "q"), (None, "http://-h/0/q"), (None, "http://h..i/q")]
)
async def test_an_endpoint_that_the_client_of_sqs_refuses_is_no_outage(
    monkeypatch: pytest.MonkeyPatch, endpoint: str | None, queue: str
) -> None:
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    broker = connect("sqs", Settings(sqs=endpoint))
    with pytest.raises(ConfigurationError, match=r"Invalid endpoint: .*; write http\(s\)://host:port"):
        await broker.check_destination(queue)


@pytest.mark.parametrize(
    ("rest", "says"),
    [
        ("v?heartbeat=s3", "`heartbeat` cannot be used; write a number of seconds"),
        ("v?heartbeat=65535", "`heartbeat` cannot be used"), ("v?heartbeat=", "`heartbeat` cannot be used"),
        ("v?heartbeat=5&heartbeat=9", "`heartbeat` cannot be used; write .*, once"),
        ("v?auth=s3", "`auth` cannot be used; write plain or external"), ("v?cafile=", "`cafile` cannot be used"),
        ("v?no_verify_ssl=false", "`no_verify_ssl` cannot be used; write 0 or 1"),
        ("v?verify=s3", "no parameter 'verify'"), ("v?connection_timeout=s3", "no parameter 'connection_timeout'"),
        ("v%zz", "the vhost is not one"), ("v%f", "the vhost is not one"), ("v%FF", "the vhost is not one"),
        ("v#w", "the vhost is not one"), ("%C3%A4" * 128, "the vhost is not one"),
    ],
)  # fmt: skip
def test_a_url_of_rabbitmq_has_a_vhost_and_parameters_that_the_client_obeys(
    tmp_path: Path, rest: str, says: str
) -> None:
    with pytest.raises(ConfigurationError, match=says) as caught:
        load({f"{PREFIX}RABBITMQ": f"amqp://u:s3cret@g,h/{rest}"}, tmp_path)
    assert str(caught.value).startswith(f"{PREFIX}RABBITMQ: ")
    assert "; write " in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "s3" not in str(caught.value)


def test_every_form_of_an_address_is_taken() -> None:
    assert kafka_hosts("a:1, b-c.d:2,[::1]:3,::1,10.0.0.1,e") == [
        "a", "b-c.d", "::1", "::1", "10.0.0.1", "e",
    ]  # fmt: skip
    parameters = "heartbeat=5&auth=EXTERNAL&no_verify_ssl=1"
    for url in ("amqp://h", f"amqps://u:p%2F%40@[::1]:5/v%2Fw?{parameters}", "amqp://h/%2F", f"amqp://h/{'v' * 255}"):
        assert rabbitmq_urls(url)[0].hostname in ("h", "::1")


@pytest.mark.parametrize(
    ("host", "local"),
    [("", True), ("/run/postgresql", True), ("localhost", True), ("127.0.0.2", True), ("::1", True),
     ("10.0.0.1", False), ("db.example", False), ("::", False)],
)  # fmt: skip
def test_a_host_is_this_machine_only_where_that_is_certain(host: str, local: bool) -> None:
    assert is_local(host) is local
