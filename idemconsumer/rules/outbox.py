"""What to do with an outgoing message that its broker refused, and in which order the others are sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from idemconsumer.rules.backoff import backoff

TRIES: Final = 8  # that a broker gets, over about a minute, before the message waits for a person
_LONGEST: Final = 30.0  # seconds between two tries
_INDEXED: Final = 2_600  # bytes; the limit of Postgres for an index entry is a little higher


def next_try(tries: int) -> float | None:
    """Seconds until the next try, after `tries` refused ones. None: there is no other, the message is parked (X5)."""
    if tries >= TRIES:
        return None
    return backoff(tries, first=0.5, cap=_LONGEST)


def holdable(destination: str, order: str | None) -> bool:
    """Whether a message of this order fits into the index of the messages that wait for their next try."""
    return order is None or len(destination.encode()) + len(order.encode()) <= _INDEXED


def next_look(failures: int, jitter: float) -> float:
    """Seconds until the relay tries a destination again that was unreachable `failures` times in a row (X6)."""
    return backoff(failures, first=0.25, cap=_LONGEST, jitter=jitter)


def waves(orders: Sequence[str | None]) -> list[list[int]]:
    """The messages' indexes in waves, each with at most one message of an order. Those without an order are in the
    first one."""
    made: list[list[int]] = []
    seen: dict[str, int] = {}
    for index, order in enumerate(orders):
        number = 0 if order is None else seen.get(order, 0)
        if order is not None:
            seen[order] = number + 1
        if number == len(made):
            made.append([])
        made[number].append(index)
    return made


def together(orders: Sequence[str | None], tries: Sequence[int]) -> list[list[int]]:
    """What to send: first a batch, then each message that was refused before on its own, so that a refusal costs the
    others nothing (X5). Messages behind a refused one of the same order are left for later."""
    refused = [index for index, number in enumerate(tries) if number]
    held: dict[str, int] = {}
    for index in refused:
        if (order := orders[index]) is not None:
            held.setdefault(order, index)
    first = [
        index
        for index, number in enumerate(tries)
        if not number and not ((order := orders[index]) is not None and held.get(order, index) < index)
    ]
    alone = [[index] for index in refused if orders[index] is None or held[orders[index] or ""] == index]
    return [first, *alone] if first else alone
