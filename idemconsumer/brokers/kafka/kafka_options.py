"""How each client of aiokafka connects: addresses, TLS and credentials, from the settings.

Tokens for OAUTHBEARER logins come from an OAuth server by client credentials, or are signed for Amazon MSK.
"""

from __future__ import annotations

import asyncio
import base64
import json
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from typing import Any, Final

from aiokafka.abc import AbstractTokenProvider
from aiokafka.errors import KafkaError

from idemconsumer.brokers.reaching import tls_of
from idemconsumer.certificates import RenewedContext
from idemconsumer.errors import ConfigurationError
from idemconsumer.missing import cannot_import
from idemconsumer.redaction import error_text, redact
from idemconsumer.settings import Settings

PROTOCOLS: Final = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")
MECHANISMS: Final = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER", "AWS_MSK_IAM")
_OAUTH: Final = "OAUTHBEARER"
_USED: Final = 0.8  # of a token's lifetime: Kafka closes a connection whose token has expired
_SHORTEST: Final = 60.0  # seconds, where the server does not report a lifetime
_ANSWER: Final = 5.0  # seconds

Fetched = tuple[str, float]  # a token, and its lifetime in seconds


def connection_options(settings: Settings) -> dict[str, Any]:
    """The arguments of every client of aiokafka. Raises ConfigurationError."""
    protocol = settings.kafka_security_protocol.upper()
    if protocol not in PROTOCOLS:
        raise ConfigurationError(f"kafka_security_protocol: {protocol!r}; write one of {', '.join(PROTOCOLS)}")
    options: dict[str, Any] = {"bootstrap_servers": settings.kafka, "security_protocol": protocol}
    if protocol.startswith("SASL"):
        options |= _credentials(settings, protocol)
    if protocol.endswith("SSL"):
        options["ssl_context"] = _tls(settings)
    return options


def _credentials(settings: Settings, protocol: str) -> dict[str, Any]:
    mechanism = settings.kafka_sasl_mechanism.upper()
    if mechanism not in MECHANISMS:
        raise ConfigurationError(f"kafka_sasl_mechanism: {mechanism!r}; write one of {', '.join(MECHANISMS)}")
    if mechanism in (_OAUTH, "AWS_MSK_IAM"):
        if mechanism == _OAUTH:
            tokens = oauth_tokens(settings, _tls(settings) if settings.kafka_ca_file else None)
        else:
            tokens = msk_tokens()
        return {"sasl_mechanism": _OAUTH, "sasl_oauth_token_provider": tokens}
    if settings.kafka_sasl_username is None or settings.kafka_sasl_password is None:
        raise ConfigurationError(
            f"kafka_security_protocol: {protocol} needs credentials; set "
            "IDEMCONSUMER_KAFKA_SASL_USERNAME and IDEMCONSUMER_KAFKA_SASL_PASSWORD"
        )
    return {
        "sasl_mechanism": mechanism,
        "sasl_plain_username": settings.kafka_sasl_username,
        "sasl_plain_password": settings.kafka_sasl_password,
    }


def _tls(settings: Settings) -> RenewedContext:
    certificate = settings.kafka_cert_file
    return tls_of(
        settings.kafka_ca_file,
        certificate,
        None if certificate is None else settings.kafka_key_file,
        lambda error: (
            f"kafka: a certificate file cannot be used ({error}); IDEMCONSUMER_KAFKA_CA_FILE, _CERT_FILE "
            "and _KEY_FILE name PEM files"
        ),
    )


class NoToken(KafkaError):  # type: ignore[misc]
    """The token server cannot be used. The text gives the reason, without secrets."""


class Tokens(AbstractTokenProvider):  # type: ignore[misc]
    """See aiokafka. A token is cached for most of its lifetime. `fetch` may block, and raises NoToken."""

    def __init__(self, fetch: Callable[[], Fetched]) -> None:
        self._fetch = fetch
        self._token = ""
        self._until = 0.0
        self._fetching = asyncio.Lock()

    async def token(self) -> str:
        async with self._fetching:
            if time.monotonic() >= self._until:
                self._token, seconds = await asyncio.to_thread(self._fetch)
                self._until = time.monotonic() + _USED * seconds
            return self._token


def oauth_tokens(settings: Settings, tls: ssl.SSLContext | None) -> Tokens:
    """Tokens by client credentials (RFC 6749, 4.4). Raises ConfigurationError for missing settings."""
    url, scope = settings.kafka_oauth_token_url, settings.kafka_oauth_scope
    user, password = settings.kafka_sasl_username, settings.kafka_sasl_password
    if url is None or user is None or password is None:
        raise ConfigurationError(
            "kafka_sasl_mechanism: OAUTHBEARER needs a token server and a client that is registered there; set "
            "IDEMCONSUMER_KAFKA_OAUTH_TOKEN_URL, IDEMCONSUMER_KAFKA_SASL_USERNAME to the client's id and "
            "IDEMCONSUMER_KAFKA_SASL_PASSWORD to its secret"
        )
    quoted = ":".join(urllib.parse.quote(part, safe="") for part in (user, password))
    form = {"grant_type": "client_credentials", **({} if scope is None else {"scope": scope})}
    request = urllib.request.Request(url, urllib.parse.urlencode(form).encode())
    request.add_header("Authorization", f"Basic {base64.b64encode(quoted.encode()).decode()}")
    request.add_header("Accept", "application/json")

    def fetch() -> Fetched:
        try:
            with urllib.request.urlopen(request, timeout=_ANSWER, context=tls) as response:
                answer = json.load(response)
            return str(answer["access_token"]), float(answer.get("expires_in", _SHORTEST))
        except urllib.error.HTTPError as error:
            raise NoToken(
                f"{redact(url)} refused a token with status {error.code}; correct the client's id and secret, "
                "IDEMCONSUMER_KAFKA_SASL_USERNAME and _PASSWORD"
            ) from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise NoToken(f"{redact(url)} gave no token: {type(error).__name__}: {error_text(error)}") from None

    return Tokens(fetch)


def msk_tokens() -> Tokens:
    """Tokens signed with the AWS environment's region and credentials. ConfigurationError without a region."""
    try:
        from aws_msk_iam_sasl_signer import MSKAuthTokenProvider as Signer
        from botocore.session import Session
    except ImportError as error:
        raise cannot_import("kafka_sasl_mechanism: the signer of AWS_MSK_IAM", error) from error
    if (region := Session().get_config_variable("region")) is None:
        raise ConfigurationError("kafka_sasl_mechanism: AWS_MSK_IAM needs a region; set AWS_DEFAULT_REGION=eu-west-1")

    def fetch() -> Fetched:
        try:
            token, expires_ms = Signer.generate_auth_token(region)
        except Exception as error:  # noqa: BLE001 - whatever botocore finds wrong with credentials
            raise NoToken(f"AWS gave no credentials: {type(error).__name__}: {error_text(error)}") from None
        return str(token), max(0.0, expires_ms / 1000 - time.time())

    return Tokens(fetch)
