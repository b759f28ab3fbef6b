"""The options of a handler: their syntax, their allowed values, and their values in seconds."""

from __future__ import annotations

import difflib
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final, Literal, TypedDict

from idemconsumer.errors import ConfigurationError, HandlerError
from idemconsumer.handlers.arguments import Done, Duration, NotDone, Unknown
from idemconsumer.handlers.durations import MAX_RUN, MIN_LEASE, parse_duration
from idemconsumer.message.envelopes import Envelope
from idemconsumer.message.keys import KeySpec
from idemconsumer.message.message import Message
from idemconsumer.message.sources import BadSource, is_pattern, split_source
from idemconsumer.rules.backoff import Backoff
from idemconsumer.rules.group_size import MAX_GROUP
from idemconsumer.rules.saga import ANY_VERSION

RAW_BYTES: Final = "raw bytes"
"""Not a possible path, since it contains a space."""
_ANY: Final = re.compile(r"(?s:.*)")


class UnnamedOptions(TypedDict, total=False):
    """The options of any handler: see `Options`."""

    group_size: int
    concurrency: int
    consumer_group: str
    tenant: KeySpec
    order_by: KeySpec | None
    fingerprint: KeySpec | None
    envelope: Envelope
    decode: Callable[[bytes, Message], object]
    retain: Duration
    retain_dead: Duration
    retain_dead_body: Duration
    wait: Duration
    timeout: Duration
    max_attempts: int
    backoff: Backoff | tuple[Duration, Duration] | str
    lease: Duration
    version: str
    max_duration: Duration
    reconcile: Callable[..., Awaitable[Done[Any] | NotDone | Unknown]]
    settle: Literal["claimed", "finished"]
    fail_on: tuple[type[Exception], ...]
    reply: bool | str
    dead_letter_to: str
    max_age: Duration


class Options(UnnamedOptions, total=False):
    """The options of `@idempotent_handler`, besides its sources and `key`.

    * `name`: the handler's name, within which keys are unique. Default: the function's name. Another name forgets every
      key: if you rename the function, write its old name here.
    * `group_size`: sets the initial and maximum number of messages that share one transaction, up to 128; failures and
      collisions reduce it. By default the size adapts to the handler's time, failures and collisions. Use 1 for a
      handler that cannot share `now()`, or that must not run again because another message of its group failed. A saga
      always runs alone.
    * `concurrency`: how many of its messages or groups run at a time in one process. Default: the setting.
    * `consumer_group`: the Kafka consumer group; each message reaches one handler of a group. Default: the app's name.
    * `tenant`: the tenant of a message; equal keys of two tenants are two keys.
    * `order_by`: the entity within which order is kept. "partition" keeps the order of the Kafka partition; None keeps
      none. Default: the broker's promise, which is order within a Kafka record key or an SQS FIFO group, and elsewhere
      none. A saga's default is none.
    * `fingerprint`: the part of a message that must be the same under one key. Default: the whole payload, as a JSON
      value. "raw bytes" compares the body byte by byte. A key spec compares the value that it names, or the whole
      payload if it finds nothing. None compares nothing.
    * `envelope`: the format around the payload: "sns", "eventbridge" or "cloudevents". Keys and handler see the inside.
    * `decode`: a function of body and Message that makes the payload, for formats other than JSON. An async function
      may wait, for `timeout` at most; a plain one must not wait. After Retry, or while a server that it needs is away,
      the message is read again at no cost. Any other exception makes the message a dead letter.
    * `retain`: how long a record is kept. It must be longer than the broker may redeliver. Default "14d".
    * `retain_dead`: how long a dead letter is kept after its last arrival. For ever by default.
    * `retain_dead_body`: how long the message of a dead letter is kept, with its headers and the error's text. After
      that it cannot be redriven. For ever by default.
    * `wait`: how long a delivery waits in its lane while its key is leased elsewhere, before it lets others pass.
      Default "10s"; "0s" lets them pass at once.
    * `timeout`: how long one run may take; for a batch, the whole call. A run that still waits for a lock at that time
      costs no attempt. Default "30s".
    * `max_attempts`: how many runs a message gets before it becomes a dead letter, unless all messages of the handler
      fail. A message that kills its workers gets two more. Default 5.
    * `backoff`: a Backoff, (first, cap) or "first, cap". Default: half a second, doubling, at most 30 s. For pauses up
      to 30 s, and 15 minutes in all, a message waits in its worker: it stays unsettled and keeps its place in an order.
      For a longer pause it is stored in the database and settled: any worker runs it later, and it gives up its place.
      Sagas are always stored.
    * `lease` (sagas): how long others wait for a lost worker before they take over its sagas. Default "30s". The
      shortest lease among a worker's handlers counts, and limits the transaction of each of their steps.
    * `version` (sagas): raise it if the steps change so that sagas already begun must not go on by themselves.
    * `max_duration` (sagas): how long a saga may take from its beginning, pauses included. After that `reconcile` is
      called; without one the saga becomes a dead letter. No limit by default.
    * `reconcile`: an async function of payload, Tx and the like. It is called in three cases. Before a saga runs again
      after its worker was lost: `Done(result)` completes the saga, `NotDone()` runs it, `Unknown()` leaves it to a
      person. When a saga has taken longer than `max_duration`: here `NotDone()` undoes it. Before `max_age` rejects an
      accepted message: `Done(result)` completes it, Reject rejects it, `NotDone()` rejects it with 504, `Unknown()` and
      Retry wait longer.
    * `settle` (sagas): when the delivery is settled: "claimed", once the message is stored; "finished", at the end.
    * `fail_on`: exceptions that a further attempt cannot cure. After any other exception the message is tried again.
    * `reply`: True sends the result or the rejection to the address that the message names, before the message is
      settled. A regular expression sends only to addresses that it matches whole. Default False. A saga needs
      `settle="finished"`.
    * `dead_letter_to`: a destination such as "kafka:orders.dlq", to which each dead letter is forwarded too.
    * `max_age`: how long a message accepted by `app.accept` may wait for its end. After that `reconcile` is called if
      there is one; otherwise the message is rejected with the code `not_in_time` and the status 504, and no longer
      runs. No limit by default.
    """

    name: str


class _Refused(Exception):
    """The problem with a value, worded to follow the name of its option, and what to write instead."""


def _integer(most: int) -> Callable[[Any], int]:
    def check(value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            raise _Refused(f" is {value!r}", f"write a whole number from 1 to {most:,}")
        return value

    return check


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise _Refused(f" is {value!r}", "write a string")
    return value


def _version(value: Any) -> str:
    if value == ANY_VERSION:
        raise _Refused(f' is "{ANY_VERSION}", which marks sagas that a person resumed', 'write e.g. "2"')
    return _text(value)


def _seconds(value: Any) -> float:
    try:
        return parse_duration(value)
    except ConfigurationError as error:
        raise _Refused("", str(error)) from None


def _positive(value: Any) -> float:
    seconds = _seconds(value)
    if seconds == 0:
        raise _Refused(" is zero", 'write a duration above 0, e.g. "30s"')
    return seconds


def _run(value: Any) -> float:
    seconds = _positive(value)
    if seconds > MAX_RUN:
        raise _Refused(" is longer than 20 days", 'write a shorter one, e.g. "30s"')
    return seconds


def _lease(value: Any) -> float:
    seconds = _run(value)
    if seconds < MIN_LEASE:
        raise _Refused(f" is shorter than {MIN_LEASE:g} s", 'write a longer one, e.g. "30s"')
    return seconds


def _settle(value: Any) -> str:
    if value not in ("claimed", "finished"):
        raise _Refused(f" is {value!r}", 'write "claimed" or "finished"')
    return str(value)


def _backoff(value: Any) -> Backoff:
    if isinstance(value, Backoff):
        return value
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, tuple | list) or len(parts) != 2:
        raise _Refused(f" is {value!r}", 'write the first pause and the longest, e.g. "0.5s, 30s", or a Backoff')
    first, cap = map(_seconds, parts)
    try:
        return Backoff(first, cap=cap)
    except ConfigurationError as error:
        raise _Refused("", str(error)) from None


def _reply(value: Any) -> re.Pattern[str] | None:
    """Which addresses may get a reply."""
    if isinstance(value, bool):
        return _ANY if value else None
    instead = r'write True, or what whole addresses must match, e.g. reply=r"replies\..*"'
    if not isinstance(value, str):
        raise _Refused(f" is {value!r}", instead)
    try:
        return re.compile(value)
    except re.error as error:
        raise _Refused(f" is {value!r}, which is no regular expression ({error})", instead) from None


def _destination(value: Any) -> str:
    try:
        split_source(value)
    except BadSource as error:
        raise _Refused(f": {error.problem}", error.instead) from None
    if is_pattern(value):
        raise _Refused(f" is {value!r}, which stands for many topics", "name one of them")
    return str(value)


def _exceptions(value: Any) -> tuple[type[Exception], ...]:
    if not isinstance(value, tuple) or not all(isinstance(v, type) and issubclass(v, Exception) for v in value):
        raise _Refused(f" is {value!r}", "write a tuple of exception classes, e.g. fail_on=(ValueError,)")
    return value


def _read_by(check: Callable[[Any], Any], default: Any = None) -> Any:
    return field(default=default, metadata={"check": check})


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """The options of one handler that are plain values, checked in this order, times in seconds. The others are
    functions and places in the message, which `planning.py` checks."""

    group_size: int | None = _read_by(_integer(MAX_GROUP))
    concurrency: int | None = _read_by(_integer(1_000))
    consumer_group: str | None = _read_by(_text)
    retain: float = _read_by(_positive, 14 * 86_400.0)
    retain_dead: float | None = _read_by(_positive)
    retain_dead_body: float | None = _read_by(_positive)
    wait: float = _read_by(_seconds, 10.0)
    timeout: float = _read_by(_run, 30.0)
    max_attempts: int = _read_by(_integer(1_000), 5)
    backoff: Backoff = _read_by(_backoff, Backoff())
    lease: float = _read_by(_lease, 30.0)
    version: str | None = _read_by(_version)
    settle: Literal["claimed", "finished"] = _read_by(_settle, "claimed")
    max_duration: float | None = _read_by(_positive)
    fail_on: tuple[type[Exception], ...] = _read_by(_exceptions, ())
    reply: re.Pattern[str] | None = _read_by(_reply)
    dead_letter_to: str | None = _read_by(_destination)
    max_age: float | None = _read_by(_positive)


def check_known(handler: str, given: Mapping[str, Any]) -> None:
    """Raise HandlerError for the first option that does not exist."""
    known = ["name", *UnnamedOptions.__annotations__]
    for option in given:
        if option not in known:
            near = difflib.get_close_matches(option, known, n=1, cutoff=0.7)
            raise HandlerError(
                handler,
                f"there is no option `{option}`",
                (f"did you mean `{near[0]}`? " if near else "") + f"the options are {', '.join(known)}",
            )


def resolve(handler: str, given: Mapping[str, Any]) -> Resolved:
    """Check the options and turn times into seconds. Raises HandlerError."""
    read = {}
    for name, check in ((each.name, each.metadata["check"]) for each in fields(Resolved) if each.name in given):
        try:
            read[name] = check(given[name])
        except _Refused as refused:
            problem, instead = refused.args
            raise HandlerError(handler, f"`{name}`{problem}", instead) from None
    return Resolved(**read)


def check_pauses(handler: str, options: Resolved) -> None:
    """Refuse a `backoff` that would keep the delivery of a saga unsettled for too long (D7). Raises HandlerError."""
    pauses = options.max_attempts - 1
    if options.settle == "finished" and pauses and options.backoff.stores(pauses):
        raise HandlerError(
            handler,
            f"{pauses} pauses of its `backoff` would keep the saga's delivery unsettled for more than 30 s, or for 15 "
            "minutes in all",
            'lower `backoff` or `max_attempts`, or write settle="claimed", which settles the message at its claim',
        )
