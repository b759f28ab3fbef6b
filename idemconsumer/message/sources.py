"""Sources and destinations, written `scheme:name`."""

from __future__ import annotations

import difflib
import re
from functools import lru_cache
from typing import Final

from idemconsumer.message.queues import queue_address
from idemconsumer.redaction import redact

# Brokers with servers of their own: the outbox relays to them, and their messages may ask for a reply. The function
# `publish` in migrations/0002 names them too.
REMOTE: Final = ("kafka", "rabbitmq", "sqs")
SCHEMES: Final = (*REMOTE, "postgres", "memory")
MAX_QUEUE_NAME: Final = 255  # bytes, in AMQP
_PATTERN: Final = re.compile(r"kafka:/(.+)/", re.DOTALL)  # no topic's name has a slash
_UNUSABLE: Final = re.compile("[\0\ud800-\udfff]")  # AMQP takes no surrogates, Postgres no NUL
_TOPIC: Final = re.compile(r"(?!\.{1,2}\Z)[a-zA-Z0-9._-]{1,249}")  # Kafka refuses others, and the client waits for them


LONGEST: Final = 1_000  # bytes, as in migrations/0002: it has to fit into a row of an index
_SHOWN: Final = 60


class BadSource(ValueError):
    """A text that is not a valid source: what is wrong with it, and what to write instead."""

    def __init__(self, problem: str, instead: str) -> None:
        super().__init__(f"{problem}; {instead}")
        self.problem = problem
        self.instead = instead


def split_source(source: object) -> tuple[str, str]:
    """The scheme and the name of `scheme:name`. Raises BadSource."""
    if not isinstance(source, str):
        raise BadSource(f"source {source!r} is not a string", _write(""))
    if (size := len(source.encode(errors="surrogatepass"))) > LONGEST and not is_pattern(source):
        raise BadSource(f"{source[:_SHOWN]!r}… has {size} bytes", f"write a name of at most {LONGEST}, scheme included")
    scheme, colon, name = source.partition(":")
    if scheme not in SCHEMES or not colon:
        near = difflib.get_close_matches(scheme, SCHEMES, n=1)
        raise BadSource(f"{source!r} has no known scheme", _write(near[0] if near else ""))
    if scheme == "rabbitmq":
        if not 0 < len(name.encode(errors="surrogatepass")) <= MAX_QUEUE_NAME or _UNUSABLE.search(name):
            raise BadSource(
                f"{source!r} has no valid name",
                f"write a queue's name, 1 to {MAX_QUEUE_NAME} bytes of UTF-8 without NUL",
            )
        return scheme, name
    if not name or not name.isprintable() or name != name.strip():
        raise BadSource(f"{source!r} has no valid name", _write(scheme))
    if scheme == "kafka" and name.startswith("/"):
        _check_pattern(source)
    elif scheme == "kafka" and _TOPIC.fullmatch(name) is None:
        raise BadSource(f"{source!r} has no valid name", "write a topic's name: letters, digits, '.', '_', '-'")
    if scheme == "sqs" and queue_address(name) is None:
        instead = "write its name, as sqs:orders, its ARN, or its URL without credentials"
        raise BadSource(f"{redact(source)!r} is not a queue", instead)
    if name.startswith("~"):
        raise BadSource(f'{source!r}: names that start with "~" are reserved', "choose another")
    return scheme, name


def is_pattern(source: str) -> bool:
    """Whether it stands for all Kafka topics that it matches: `kafka:/regular expression/`."""
    return _PATTERN.fullmatch(source) is not None


def consumes(source: str, other: str) -> bool:
    """Whether messages of the source `other` come from `source`: it is the same, or a pattern that matches its whole
    name."""
    return source == other or (
        is_pattern(source)
        and other.startswith("kafka:")
        and not is_pattern(other)
        and _compiled(source).fullmatch(other.removeprefix("kafka:")) is not None
    )


@lru_cache(maxsize=256)
def _compiled(source: str) -> re.Pattern[str]:
    return re.compile(source[len("kafka:/") : -1])


def _check_pattern(source: str) -> None:
    instead = r'write a regular expression between slashes, as r"kafka:/orders\..*/"'
    if not is_pattern(source):
        raise BadSource(f"{source!r} has no valid name", instead)
    try:
        _compiled(source)
    except re.error as error:
        raise BadSource(f"{source!r} is no regular expression ({error})", instead) from None


def _write(scheme: str) -> str:
    return f'write "{scheme}:name"' if scheme else "write one of " + ", ".join(f'"{s}:name"' for s in SCHEMES)


def own_source(app: str, handler: str) -> str:
    """The Postgres queue that belongs to a handler."""
    return f"postgres:~{app}/{handler}"


def retry_source(app: str, handler: str) -> str:
    """The handler's second queue, for messages whose next attempt is due later. Workers that do not know it never read
    it (D18)."""
    return f"postgres:~~{app}/{handler}"
