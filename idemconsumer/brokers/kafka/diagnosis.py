"""Why Kafka cannot be used, in our words. Of a failed start the client reports only that it failed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final

from aiokafka import errors
from aiokafka.conn import AIOKafkaConnection, collect_hosts, create_conn
from aiokafka.protocol.admin import SaslHandShakeRequest
from aiokafka.protocol.metadata import MetadataRequest

from idemconsumer.brokers.kafka.kafka_client import words
from idemconsumer.brokers.kafka.kafka_options import NoToken
from idemconsumer.brokers.reaching import ANSWER, speaks_tls, unreached
from idemconsumer.certificates import expired
from idemconsumer.errors import BrokerUnavailable
from idemconsumer.redaction import error_text

_ALL: Final = 12.0  # seconds for all servers together
_PROTOCOL: Final = "IDEMCONSUMER_KAFKA_SECURITY_PROTOCOL"

# Why a group refuses a member although the server can be used.
_REFUSALS: Final[Mapping[type[errors.KafkaError], str]] = {
    errors.InvalidSessionTimeoutError: (
        "the broker refuses this session timeout; set IDEMCONSUMER_KAFKA_SESSION_TIMEOUT to a value between its "
        "group.min.session.timeout.ms and group.max.session.timeout.ms (6 s and 1800 s by default)"
    ),
    errors.InconsistentGroupProtocolError: (
        "live members of the group, perhaps of another program, use another partition assignor than idemconsumer "
        '(roundrobin); stop them, or give the handlers a consumer_group="…" of their own'
    ),
    errors.GroupAuthorizationFailedError: (
        "this user may not join the group; allow it to READ the group, and to READ and DESCRIBE its topics"
    ),
    errors.TopicAuthorizationFailedError: "this user may not read a topic; allow it to READ and DESCRIBE it",
}


def refusal(error: BaseException) -> str:
    """Why a running Kafka refused a request, and what to do about it."""
    return _REFUSALS.get(type(error), words(error)) if isinstance(error, errors.KafkaError) else words(error)


async def unusable(options: Mapping[str, Any]) -> str | None:
    """Connect to each server as the client with these options does; returns what is wrong with the last one that fails.

    Returns None as soon as one server can be used. The text quotes addresses and no credentials. Bounded in time.
    """
    options = dict(options)
    found = None
    try:
        async with asyncio.timeout(_ALL):
            for host, port, _ in collect_hosts(options.pop("bootstrap_servers"), randomize=False):
                found = await _server(host, port, options)
                if found is None:
                    return None
    except TimeoutError:
        pass
    return found


async def unavailable(
    options: Mapping[str, Any], error: BaseException, undone: str = "cannot be used"
) -> BrokerUnavailable:
    """The exception to raise for an error of the client, with the cause that the client leaves out, also for a
    connection that worked before."""
    servers = options["bootstrap_servers"]
    return BrokerUnavailable(f"Kafka at {servers} {undone}: {await unusable(options) or words(error)}")


def has_expired(options: Mapping[str, Any]) -> str | None:
    """A text that says that our certificate has expired; None if it has not."""
    return expired(getattr(options.get("ssl_context"), "certificate", None))


@asynccontextmanager
async def answered(options: Mapping[str, Any], within: float) -> AsyncIterator[None]:
    """A block that waits for the servers, at most `within` seconds. Raises TimeoutError. Once our certificate has
    expired it waits for some seconds only: the client would retry without reporting anything."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(within) as limit:
        asked = loop.call_later(ANSWER, lambda: limit.reschedule(loop.time()) if has_expired(options) else None)
        try:
            yield
        finally:
            asked.cancel()


async def _server(host: str, port: int, options: Mapping[str, Any]) -> str | None:
    at = f"{host}:{port}"
    try:
        connection = await _connect(host, port, options)
    except NoToken as error:
        return error_text(error)
    except errors.SaslAuthenticationFailed:
        how = options["sasl_mechanism"]
        if "sasl_oauth_token_provider" in options:
            return f"{at} refused the token; correct the client's id, scope and rights, or those of the AWS credentials"
        return (
            f"{at} refused the login with {how}: wrong IDEMCONSUMER_KAFKA_SASL_USERNAME or _PASSWORD, or a user "
            f"without credentials for {how}"
        )
    except (errors.KafkaError, OSError, TimeoutError, EOFError) as error:
        unreachable = unreached(error, at, "IDEMCONSUMER_KAFKA", "IDEMCONSUMER_KAFKA_CA_FILE")
        return unreachable or await _other_protocol(host, port, options, error)
    try:
        metadata = await connection.send(MetadataRequest([]))
    except (errors.KafkaError, TimeoutError) as error:
        return await _other_protocol(host, port, options, error)
    finally:
        connection.close()
    for _, advertised, its_port, *_ in metadata.brokers:
        try:
            _, writer = await asyncio.wait_for(asyncio.open_connection(advertised, its_port), ANSWER)
        except (OSError, TimeoutError) as error:
            return (
                f"{at} answers, but advertises a broker {advertised}:{its_port} that cannot be reached from here "
                f"({words(error)}); correct advertised.listeners of that broker"
            )
        writer.close()
    return None


async def _other_protocol(host: str, port: int, options: Mapping[str, Any], error: BaseException) -> str:
    """Why our protocol failed, by finding out which one the server speaks."""
    if (why := has_expired(options)) is not None:
        return f"{host}:{port} refuses the connection: {why}"
    at, ours = f"{host}:{port}", options["security_protocol"]
    if isinstance(error, TimeoutError):
        return f"{at} does not answer ({words(error)})"
    if (tls := await speaks_tls(host, port)) is None:
        return f"{at} does not answer ({words(error)})"
    if tls is not ours.endswith("SSL"):
        instead = "SSL or SASL_SSL" if tls else "PLAINTEXT or SASL_PLAINTEXT"
        return f"{at} speaks {'TLS' if tls else 'no TLS'}; set {_PROTOCOL} to {instead} (it is {ours})"
    if (mechanisms := await _mechanisms(host, port, options)) is None:
        return f"{at} does not speak Kafka's protocol, or requires a client certificate ({words(error)})"
    if not mechanisms and ours.startswith("SASL"):
        return f"{at} accepts no login; set {_PROTOCOL} to {ours.removeprefix('SASL_')} (it is {ours})"
    if mechanisms and not ours.startswith("SASL"):
        return f"{at} requires a login with {' or '.join(mechanisms)}; set {_PROTOCOL} to SASL_{ours}"
    if mechanisms and (asked := options["sasl_mechanism"]) not in mechanisms:
        allowed = " or ".join(mechanisms)
        return f"{at} accepts no logins with {asked}; set IDEMCONSUMER_KAFKA_SASL_MECHANISM to {allowed}"
    return f"{at} failed: {words(error)}"


async def _connect(host: str, port: int, options: Mapping[str, Any]) -> AIOKafkaConnection:
    async with asyncio.timeout(ANSWER):
        return await create_conn(host, port, request_timeout_ms=int(ANSWER * 1000), **options)


async def _mechanisms(host: str, port: int, options: Mapping[str, Any]) -> list[str] | None:
    """The login mechanisms that this server accepts; empty where it takes no login, None where it is no Kafka."""
    plain = options["security_protocol"].replace("SASL_", "")
    tls = {"ssl_context": options["ssl_context"]} if "ssl_context" in options else {}
    try:
        connection = await _connect(host, port, {"security_protocol": plain, **tls})
    except (errors.KafkaError, OSError, TimeoutError, EOFError):
        return None
    try:
        answer = await connection.send(SaslHandShakeRequest("?"))
    except (errors.KafkaError, TimeoutError):
        return []
    finally:
        connection.close()
    return sorted(answer.enabled_mechanisms)
