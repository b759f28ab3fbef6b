"""The ack plan of one channel, against a model of what RabbitMQ does with acks. No server."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from idemconsumer.brokers.rabbitmq.amqp_channel import Ack, AckTags


class Channel:
    """RabbitMQ's side: deliveries 1..n are outstanding, and an ack of anything else closes the channel."""

    def __init__(self, delivered: int) -> None:
        self.outstanding = set(range(1, delivered + 1))

    def take(self, ack: Ack) -> set[int]:
        assert ack.tag in self.outstanding, f"PRECONDITION_FAILED - unknown delivery tag {ack.tag}"
        taken = {tag for tag in self.outstanding if tag == ack.tag or (ack.multiple and tag < ack.tag)}
        self.outstanding -= taken
        return taken


def send_all(tags: AckTags, channel: Channel) -> list[Ack]:
    acks = tags.due()
    for ack in acks:
        channel.take(ack)
    tags.sent(acks)
    assert tags.due() == []
    return acks


def test_a_finished_prefix_is_one_multiple_ack() -> None:
    tags = AckTags()
    tags.finish([3, 1, 2])
    assert send_all(tags, Channel(5)) == [Ack(3, multiple=True)]


def test_a_single_tag_is_acked_alone() -> None:
    tags = AckTags()
    tags.finish([1])
    assert send_all(tags, Channel(5)) == [Ack(1, multiple=False)]


def test_beyond_an_unfinished_tag_each_is_acked_alone() -> None:
    tags = AckTags()
    tags.finish([2, 3])
    assert sorted(ack.tag for ack in send_all(tags, Channel(5))) == [2, 3]


def test_a_multiple_ends_at_a_tag_that_is_still_outstanding() -> None:
    tags, channel = AckTags(), Channel(5)
    tags.finish([3])
    send_all(tags, channel)
    tags.finish([1, 2])
    assert send_all(tags, channel) == [Ack(2, multiple=True)]
    tags.finish([4])
    assert send_all(tags, channel) == [Ack(4, multiple=False)]


def test_a_tag_that_was_acked_is_never_named_again() -> None:
    tags, channel = AckTags(), Channel(5)
    tags.finish([1, 2, 4])
    send_all(tags, channel)
    tags.finish([1, 2, 4])
    assert send_all(tags, channel) == []


@given(
    order=st.integers(1, 30).flatmap(lambda count: st.permutations(range(1, count + 1))),
    settles=st.lists(st.integers(1, 5)),
    sends=st.lists(st.integers(0, 3)),
    repeats=st.lists(st.integers(1, 30)),
)
def test_whatever_the_order_only_finished_tags_are_acked_and_each_once(
    order: list[int], settles: list[int], sends: list[int], repeats: list[int]
) -> None:
    tags, channel = AckTags(), Channel(len(order))
    finished: set[int] = set()
    acked: set[int] = set()
    rest = list(order)
    while rest:
        count = settles.pop() if settles else 1
        now, rest = rest[:count], rest[count:]
        finished.update(now)
        tags.finish([*now, *(tag for tag in repeats if tag in finished)])
        for _ in range(sends.pop() if sends else 1):
            due = tags.due()
            for ack in due:
                acked |= channel.take(ack)
            tags.sent(due)
        assert acked <= finished
    send_all(tags, channel)
    assert channel.outstanding == set()
