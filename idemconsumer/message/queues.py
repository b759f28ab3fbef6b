"""An SQS queue as a source names it: by its name, its ARN or its URL."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from idemconsumer.errors import ConfigurationError

GROUP: Final = "MessageGroupId"
"""The header that names the group of a message, published or received."""

DEDUPLICATION_ID: Final = "MessageDeduplicationId"
"""The header with the deduplication id of a message received from a FIFO queue."""

TOKEN: Final = re.compile(r"[!-~]{1,128}", re.ASCII)
"""What SQS accepts as a group or as a deduplication id."""

_NAME: Final = r"(?P<name>[A-Za-z0-9_-]{1,80}(\.fifo)?)"
_PLAIN: Final = re.compile(_NAME)
_ARN: Final = re.compile(rf"arn:aws[a-z-]*:sqs:(?P<region>[a-z0-9-]+):(?P<account>\d{{12}}):{_NAME}")
_URL: Final = re.compile(rf"https?://[A-Za-z0-9.:\[\]-]+/(?:[^@?#\s]*/)?{_NAME}")
# https://docs.aws.amazon.com/general/latest/gr/sqs-service.html, its older form, and the form of FIPS endpoints.
_AWS: Final = re.compile(r"(?:(?:sqs|sqs-fips)\.([a-z0-9-]+)|([a-z0-9-]+)\.queue)\.amazonaws\.com(?:\.cn)?")


@dataclass(frozen=True, slots=True)
class QueueAddress:
    """A queue as far as the given text identifies it.

    A field that is None is decided by the credentials and settings.
    """

    given: str
    name: str
    account: str | None = None
    region: str | None = None
    url: str | None = None
    endpoint: str | None = None


def queue_address(given: str) -> QueueAddress | None:
    """The address in a text; None if it cannot be the name, the ARN or the URL of a queue."""
    if arn := _ARN.fullmatch(given):
        return QueueAddress(given, arn["name"], arn["account"], arn["region"])
    if url := _URL.fullmatch(given):
        try:
            parts = urlsplit(given)
            if parts.port == 0:
                return None
        except ValueError:
            return None
        if aws := _AWS.fullmatch(parts.hostname or ""):
            return QueueAddress(given, url["name"], region=aws[1] or aws[2], url=given)
        return QueueAddress(given, url["name"], url=given, endpoint=f"{parts.scheme}://{parts.netloc}")
    return QueueAddress(given, given) if _PLAIN.fullmatch(given) else None


def check_group(queue: str, headers: Mapping[str, str | bytes]) -> None:
    """Raise ConfigurationError for a message that the queue would refuse because of its group."""
    group = headers.get(GROUP)
    if group is None and queue.endswith(".fifo"):
        raise ConfigurationError(
            f"publish to sqs:{queue}: a FIFO queue keeps order within a group, so each message names its own; "
            f"give headers={{{GROUP!r}: customer_id}}, or --header {GROUP}=…"
        )
    if group is not None and (isinstance(group, bytes) or not TOKEN.fullmatch(group)):
        raise ConfigurationError(
            f"publish to sqs:{queue}: the header {GROUP} has 1 to 128 letters, digits or punctuation, no spaces"
        )
