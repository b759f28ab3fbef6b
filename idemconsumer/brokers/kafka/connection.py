"""How each client of aiokafka connects: addresses, TLS and credentials, from the settings."""

from __future__ import annotations

import ssl
from typing import Any, Final

from idemconsumer.brokers.kafka.tokens import msk_tokens, oauth_tokens
from idemconsumer.certificates import RenewedContext
from idemconsumer.errors import ConfigurationError
from idemconsumer.settings import Settings

PROTOCOLS: Final = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")
MECHANISMS: Final = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER", "AWS_MSK_IAM")
_OAUTH: Final = "OAUTHBEARER"


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
    files = settings.kafka_ca_file, settings.kafka_cert_file, settings.kafka_key_file
    return RenewedContext(lambda: _made(settings), files)


def _made(settings: Settings) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=settings.kafka_ca_file)
        if settings.kafka_cert_file is not None:
            context.load_cert_chain(settings.kafka_cert_file, settings.kafka_key_file)
    except OSError as error:
        raise ConfigurationError(
            f"kafka: a certificate file cannot be used ({error}); IDEMCONSUMER_KAFKA_CA_FILE, _CERT_FILE "
            "and _KEY_FILE name PEM files"
        ) from error
    return context
