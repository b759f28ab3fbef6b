"""Addresses of servers: what is taken, and that a mistake in one never shows its password."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from idemconsumer.addresses import is_local, read_hosts, read_url
from idemconsumer.brokers.connecting import connect
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
    "servers",
    ["u:s3cret@h:9092", "h:9092,SASL_SSL://u:s3cret@h:9092", "kafka://h:9092", "h:s3cret", "h:9092,", "h/s:1"],
)
def test_kafka_takes_hosts_and_no_credentials(servers: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        connect("kafka", Settings(kafka=servers))
    assert "s3cret" not in str(caught.value)
    assert "IDEMCONSUMER_KAFKA_SASL_USERNAME" in str(caught.value)


def test_every_form_of_an_address_is_taken() -> None:
    assert read_hosts("a:1, b-c.d:2,[::1]:3,::1,10.0.0.1,e", "kafka", "") == [
        "a", "b-c.d", "::1", "::1", "10.0.0.1", "e",
    ]  # fmt: skip
    for url in ("amqp://h", "amqps://u:p%2F%40@[::1]:5/v%2Fw?heartbeat=5", "amqp://h/%2F"):
        assert read_url(url, "rabbitmq", ("amqp", "amqps"), "").hostname in ("h", "::1")


@pytest.mark.parametrize(
    ("host", "local"),
    [("", True), ("/run/postgresql", True), ("localhost", True), ("127.0.0.2", True), ("::1", True),
     ("10.0.0.1", False), ("db.example", False), ("::", False)],
)  # fmt: skip
def test_a_host_is_this_machine_only_where_that_is_certain(host: str, local: bool) -> None:
    assert is_local(host) is local
