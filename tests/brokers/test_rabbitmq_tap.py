"""Between the broker's bytes and the client: deliveries are taken out, everything else passes. No server."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pamqp import body, commands, frame, header, heartbeat

from idemconsumer.brokers.rabbitmq.arrivals import Arrival, described
from idemconsumer.brokers.rabbitmq.tap import DeliveryReader
from idemconsumer.message.message import Whole

OURS, OTHER = 2, 3
ALIVE = heartbeat.Heartbeat().marshal()
WHEN = datetime(2026, 11, 22, 13, 30, tzinfo=UTC)
PROPERTIES: dict[str, Any] = {
    "content_type": "application/json",
    "content_encoding": "gzip",
    "headers": {"text": "ü", "n": -1, "in": {"list": [1, {"b": "c"}]}},
    "delivery_mode": 2,
    "priority": 9,
    "correlation_id": "c",
    "reply_to": "",
    "expiration": "60000",
    "message_id": "é" * 100,
    "timestamp": WHEN,
    "message_type": "t",
    "user_id": "guest",
    "app_id": "a",
}


def delivery(channel: int, tag: int, *parts: bytes, redelivered: bool = False, **properties: Any) -> list[bytes]:
    """The frames of one delivery."""
    method = commands.Basic.Deliver("c1", tag, redelivered, "exchange", "routing.key")
    head = header.ContentHeader(0, sum(map(len, parts)), commands.Basic.Properties(**properties))
    frames: list[frame.FrameTypes] = [method, head, *map(body.ContentBody, parts)]
    return [frame.marshal(each, channel) for each in frames]


def arrival(tag: int, content: bytes, *, redelivered: bool = False, **properties: Any) -> Arrival:
    return Arrival("c1", tag, redelivered, "exchange", "routing.key", properties, content)


async def read_all(chunks: list[bytes], *, end: bool = True) -> tuple[list[Arrival], bytes]:
    """What is taken of channel OURS, and what the client reads."""
    reader, taken = DeliveryReader(), list[Arrival]()
    reader.takers[OURS] = taken.append
    for chunk in chunks:
        reader.feed_data(chunk)
    if end:
        reader.feed_eof()
    return taken, await reader.read()


OTHERS = [frame.marshal(commands.Queue.DeclareOk("q", 1, 1), OURS), ALIVE, *delivery(OTHER, 1, b"theirs")]
STREAM = [
    OTHERS[0],
    *delivery(OURS, 1, b"whole", **PROPERTIES),
    *OTHERS[1:3],
    *delivery(OURS, 2)[:1],
    OTHERS[3],  # between the frames of ours
    *delivery(OURS, 2)[1:],
    *delivery(OURS, 3, b"in ", b"three ", b"parts", redelivered=True),
    OTHERS[4],
]


@settings(max_examples=60)
@given(cuts=st.sets(st.integers(0, sum(map(len, STREAM)))))
def test_wherever_the_bytes_are_cut_deliveries_are_whole_and_the_client_reads_all_else(cuts: set[int]) -> None:
    stream = b"".join(STREAM)
    places = [0, *sorted(cuts), len(stream)]
    chunks = [stream[a:b] for a, b in itertools.pairwise(places) if a < b]
    taken, read = asyncio.run(read_all(chunks))
    first = {"type" if name == "message_type" else name: value for name, value in PROPERTIES.items()}
    del first["reply_to"]  # the client does not send an empty one
    assert taken == [arrival(1, b"whole", **first), arrival(2, b""), arrival(3, b"in three parts", redelivered=True)]
    assert read.replace(ALIVE, b"") == b"".join(OTHERS).replace(ALIVE, b"")


@given(chosen=st.sets(st.sampled_from(sorted(PROPERTIES))))
def test_every_set_of_properties_is_read_as_the_client_reads_it(chosen: set[str]) -> None:
    properties = commands.Basic.Properties(**{name: PROPERTIES[name] for name in chosen - {"reply_to"}})
    encoded = header.ContentHeader(0, 7, properties).marshal()
    size, read = described(encoded)
    theirs = header.ContentHeader()
    theirs.unmarshal(encoded)
    assert size == 7
    assert read == {
        "type" if name == "message_type" else name: value
        for name, value in theirs.properties
        if value not in (None, "")
    }


async def test_flags_that_nobody_has_defined_are_passed_over() -> None:
    plain = header.ContentHeader(0, 7, commands.Basic.Properties(app_id="a")).marshal()
    more = plain[:13] + bytes([plain[13] | 1]) + b"\0\1\0\0" + plain[14:]
    assert described(more) == (7, {"app_id": "a"})


async def test_the_client_hears_that_the_broker_lives_while_there_are_only_deliveries() -> None:
    taken, read = await read_all(delivery(OURS, 1, b"1") + delivery(OURS, 2, b"2"))
    assert len(taken) == 2
    assert read == ALIVE


@pytest.mark.parametrize(
    "said", [b"AMQP\0\0\x09\1", b"SSH-2.0-OpenSSH_9.2\r\n", b"\1\0\0\0\0\0\4abcd?", b"\1\0\0"], ids=repr
)
async def test_what_is_not_amqp_is_the_clients_to_judge(said: bytes) -> None:
    assert await read_all([said]) == ([], said)
    assert await read_all([ALIVE + said]) == ([], ALIVE + said)


WHOLE = delivery(OURS, 1, b"12")


def raw(method: bytes) -> bytes:
    return b"\1\0\2" + len(method).to_bytes(4, "big") + method + b"\xce"


@pytest.mark.parametrize(
    "stream",
    [
        [WHOLE[0], WHOLE[0]],
        [WHOLE[0], WHOLE[2]],
        [*WHOLE[:2], WHOLE[1]],
        [raw(b"\0\x3c\0\x3c" + b"\xffc1" + bytes(20))],
        [raw(b"\0\x3c\0\x3c")],
    ],
    ids=["a method within a delivery", "a body before its header", "two headers", "too long a name", "cut off"],
)
async def test_a_delivery_that_cannot_be_one_ends_the_connection(stream: list[bytes]) -> None:
    with pytest.raises(ConnectionError, match="a delivery cannot be read"):
        await read_all(stream, end=False)


@pytest.mark.parametrize("parts", [[b"abcdef"], [b"abc", b"def"], [b"a", b"bcd", b"", b"e", b"f"]])
async def test_of_a_large_body_only_the_beginning_is_kept(parts: list[bytes]) -> None:
    reader, taken = DeliveryReader(), list[Arrival]()
    reader.takers[OURS] = taken.append
    reader.most_of_body = 4
    for part in [*delivery(OURS, 1, *parts), *delivery(OURS, 2, b"abcd"), *delivery(OURS, 3)]:
        reader.feed_data(part)
    assert [each.body for each in taken] == [b"abcd", b"abcd", b""]
    assert [each.whole for each in taken] == [Whole(6, hashlib.sha256(b"abcdef").digest()), None, None]


def failing(_: Arrival) -> None:
    raise KeyError


async def test_a_taker_that_fails_ends_the_connection() -> None:
    reader = DeliveryReader()
    reader.takers[OURS] = failing
    for part in WHOLE:
        reader.feed_data(part)
    with pytest.raises(ConnectionError, match="a delivery cannot be read"):
        await reader.readexactly(1)
