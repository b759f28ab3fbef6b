"""Connecting to SQS: endpoint, credentials, errors in our words. Also reads the attributes of a queue, and reports
those that would lose messages."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol
from urllib.parse import urlsplit

from aiobotocore.config import AioConfig
from aiobotocore.session import get_session
from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError, NoCredentialsError, NoRegionError
from botocore.exceptions import ConnectionError as BotoConnectionError

from idemconsumer.brokers.reaching import silence, text_of, unreached
from idemconsumer.errors import BrokerUnavailable, ConfigurationError
from idemconsumer.message.queues import QueueAddress, queue_address
from idemconsumer.ports.broker import Finding
from idemconsumer.redaction import error_text, redact
from idemconsumer.settings import Settings

# Seconds. A receive is answered after its wait time, everything else at once.
CONNECT_TIMEOUT: Final = 5.0
READ_TIMEOUT: Final = 10.0
CALLS: Final = 3  # tries of one request, with the client's own backoff between them

# What the client raises for a request that failed; TimeoutError and OSError of DNS lookups come through it.
LOSS: Final[tuple[type[Exception], ...]] = (BotoCoreError, ClientError, TimeoutError, OSError)

GONE = ("QueueDoesNotExist", "AWS.SimpleQueueService.NonExistentQueue")
# SQS has its own codes for throttling, KMS has others, and the gateway in front of both sends only a status. OverLimit:
# the queue has its maximum of messages in flight (120,000).
_THROTTLED = ("Throttl", "TooManyRequests", "RequestLimitExceeded", "SlowDown", "OverLimit")
_DENIED = ("AccessDenied", "InvalidClientTokenId", "UnrecognizedClient", "SignatureDoesNotMatch", "ExpiredToken")

# For attributes that a queue does not report; servers other than AWS leave some out.
_DEFAULTS: Final = {"VisibilityTimeout": "30", "MaximumMessageSize": "262144"}
LEAST_VISIBILITY: Final = 10  # seconds: within it the visibility is extended several times, over a network
LONGEST: Final = 1_209_600.0  # seconds, the longest retention of any queue
LONG_VISIBILITY: Final = 900  # seconds of visibility timeout that are reported as long


class SqsClient(Protocol):
    """The part of the client that is used; requests and answers are as in the SQS API reference."""

    async def get_queue_url(self, **request: Any) -> dict[str, Any]: ...
    async def get_queue_attributes(self, **request: Any) -> dict[str, Any]: ...
    async def receive_message(self, **request: Any) -> dict[str, Any]: ...
    async def send_message_batch(self, **request: Any) -> dict[str, Any]: ...
    async def delete_message_batch(self, **request: Any) -> dict[str, Any]: ...
    async def change_message_visibility_batch(self, **request: Any) -> dict[str, Any]: ...
    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Queue:
    """A queue and its attributes, as they were when read."""

    name: str
    url: str
    attributes: Mapping[str, str] = field(default_factory=dict)
    given: str = ""  # the name in the source, if it is not the queue's name

    @property
    def source(self) -> str:
        return f"sqs:{self.given or self.name}"

    @property
    def fifo(self) -> bool:
        return self.name.endswith(".fifo")

    @property
    def content_based(self) -> bool:
        """Whether SQS treats equal bodies as one message if no deduplication id is given."""
        return self.attributes.get("ContentBasedDeduplication") == "true"

    @property
    def visibility(self) -> int:
        """Seconds until the messages of a dead worker are delivered again."""
        return max(LEAST_VISIBILITY, self.number("VisibilityTimeout"))

    @property
    def max_bytes(self) -> int:
        return self.number("MaximumMessageSize")

    def number(self, attribute: str) -> int:
        return int(self.attributes.get(attribute) or _DEFAULTS[attribute])


def limits(subject: str, queue: Queue) -> list[Finding]:
    """Findings on one queue, from its attributes."""
    found = [_visibility(subject, queue)]
    if queue.content_based:
        text = "SQS drops a message if an equal body arrived in the last five minutes, unless the producer sets an id"
        found.append(Finding("warning", subject, text))
    return found


def max_receives(queue: Queue) -> int | None:
    """After how many receives SQS moves a message to its dead-letter queue; None: never."""
    try:
        return int(_redrive(queue)["maxReceiveCount"])
    except (ValueError, KeyError, TypeError):
        return None


def dead_letters(queue: Queue) -> str | None:
    """The ARN of the dead-letter queue, if there is one."""
    arn = _redrive(queue).get("deadLetterTargetArn")
    return arn if isinstance(arn, str) else None


def _redrive(queue: Queue) -> dict[str, Any]:
    with contextlib.suppress(ValueError):
        policy = json.loads(queue.attributes.get("RedrivePolicy") or "{}")
        return policy if isinstance(policy, dict) else {}
    return {}


def retention(queue: Queue) -> float | None:
    """Seconds that SQS keeps a message; None if it is not reported."""
    kept = queue.attributes.get("MessageRetentionPeriod", "")
    return float(kept) if kept.isdecimal() else None


def _visibility(subject: str, queue: Queue) -> Finding:
    seconds = queue.number("VisibilityTimeout")
    said = f"visibility timeout {seconds} s"
    if seconds < LEAST_VISIBILITY:
        return Finding("ok", subject, f"{said}; workers request {LEAST_VISIBILITY} s and extend that")
    if seconds > LONG_VISIBILITY:
        return Finding(
            "warning",
            subject,
            f"{said}: the messages of a killed worker, and their FIFO groups, wait that long; workers extend it "
            "while they work, so 30 s is enough",
        )
    return Finding("ok", subject, f"{said}, extended while a message is processed")


class SqsLink:
    """The endpoint and credentials of SQS. Raises ConfigurationError for an invalid endpoint."""

    def __init__(self, settings: Settings) -> None:
        self.where = f"SQS at {redact(settings.sqs)}" if settings.sqs else "SQS"
        self._endpoint = settings.sqs
        self._session = get_session()
        silence("aiobotocore", "botocore")

    async def connect(self, requests: int, at: QueueAddress) -> SqsClient:
        """A client for `requests` concurrent requests, in the queue's region. It connects with the first request.

        Raises ConfigurationError when no region is configured.
        """
        config = AioConfig(
            connect_timeout=CONNECT_TIMEOUT,
            read_timeout=READ_TIMEOUT,
            retries={"mode": "standard", "total_max_attempts": CALLS},
            max_pool_connections=requests,
        )
        try:
            client: SqsClient = await self._session.create_client(
                "sqs", region_name=at.region, endpoint_url=at.endpoint or self._endpoint, config=config
            ).__aenter__()
        except NoRegionError as error:
            raise ConfigurationError(f"{self.where}: no region is given; set AWS_DEFAULT_REGION=eu-west-1") from error
        except ValueError as error:
            raise ConfigurationError(
                f"{self.where}: {error_text(error)}; write http(s)://host:port, with a host of letters, digits, "
                "'.' and '-', and a region as eu-west-1"
            ) from None
        except LOSS as error:
            raise self.unavailable("no client can be made", error) from error
        return client

    async def queue(self, client: SqsClient, at: QueueAddress) -> Queue:
        """The queue, with its attributes. Raises BrokerUnavailable, naming the queue if it is missing."""
        try:
            owner = {} if at.account is None else {"QueueOwnerAWSAccountId": at.account}
            url = at.url or (await client.get_queue_url(QueueName=at.name, **owner))["QueueUrl"]
            answer = await client.get_queue_attributes(QueueUrl=url, AttributeNames=["All"])
        except LOSS as error:
            raise self.refused(at.given, error) from error
        return Queue(at.name, url, answer.get("Attributes") or {}, at.given)

    def refused(self, given: str, error: Exception) -> BrokerUnavailable:
        """The exception for a queue that cannot be used, with the reason in our words."""
        at = address_of(given)
        if code_of(error) in GONE:
            fifo = " --attributes FifoQueue=true" if at.name.endswith(".fifo") else ""
            region = f" --region {at.region}" if at.region else ""
            where = f"account {at.account}" if at.account else "this account"
            where += f" and region {at.region}" if at.region else " and region"
            return BrokerUnavailable(
                f"{self.where} has no queue {given!r} in {where}; create it, for example: "
                f"aws sqs create-queue --queue-name {at.name}{fifo}{region}"
            )
        return self.unavailable(f"queue {given!r} cannot be used", error, "the queue's URL" if at.endpoint else None)

    def unavailable(self, what: str, error: Exception, address: str | None = None) -> BrokerUnavailable:
        """The exception for a failed request. `address`: where this endpoint is set, if not where the common one is."""
        setting = address or ("IDEMCONSUMER_SQS" if self._endpoint else "AWS_DEFAULT_REGION")
        at = urlsplit(str(getattr(error, "kwargs", {}).get("endpoint_url") or self._endpoint or "")).netloc
        if why := unreached(error, at.rpartition("@")[2] or "AWS", setting, "AWS_CA_BUNDLE"):
            return BrokerUnavailable(f"{self.where}: {what}: {why}")
        advice = ""
        if isinstance(error, BotoConnectionError | HTTPClientError):
            advice = f"; see that SQS answers there, or correct {setting}"
        elif isinstance(error, NoCredentialsError):
            advice = "; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or give the machine a role"
        elif code_of(error).startswith(_DENIED):
            advice = "; docs/operations.md lists the IAM actions that are needed"
        return BrokerUnavailable(f"{self.where}: {what}: {text_of(error)}{advice}")


def address_of(name: str) -> QueueAddress:
    """The address in the name of a source or destination. Raises ConfigurationError."""
    if (address := queue_address(name)) is None:
        raise ConfigurationError(f"sqs:{name} is neither the name of a queue, nor its ARN, nor its URL")
    return address


def code_of(error: Exception) -> str:
    """The service's error code; empty for an error that is not the service's."""
    return str(error.response.get("Error", {}).get("Code", "")) if isinstance(error, ClientError) else ""


def throttled(error: Exception) -> bool:
    """Whether the service refused the request only because there were too many."""
    if not isinstance(error, ClientError):
        return False
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    return status == 429 or any(word in code_of(error) for word in _THROTTLED)


async def farewell(client: SqsClient) -> None:
    """Close the client. Failures are ignored: a client that cannot be closed is not worth reporting."""
    with contextlib.suppress(*LOSS):
        await client.close()
