"""Walks through every state that a model can reach, breadth first."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import TypeVar

W = TypeVar("W", bound=Hashable)


class Violation(AssertionError):
    """A promise is broken; the text ends with the way there."""


@dataclass(frozen=True)
class Explored:
    states: int
    transitions: int
    actions: frozenset[str]
    ends: frozenset[int]


def walk(
    start: W,
    successors: Callable[[W], Iterable[tuple[str, W]]],
    *,
    broken: Callable[[W, W], str | None],
    same: Callable[[W], W],
    end: Callable[[W], int | None],
) -> Explored:
    """Visit every reachable state, and see that from each one an `end` can be reached, so that nothing waits for ever.

    `broken` says which promise a transition breaks, `same` what equal states have in common. Raises Violation with a
    shortest way to it.
    """
    ids = {start: 0}
    came: list[tuple[int, str]] = [(-1, "")]
    worlds = [start]
    before: list[list[int]] = [[]]
    actions: set[str] = set()
    queue = deque([0])
    transitions = 0
    while queue:
        current = queue.popleft()
        world = worlds[current]
        for label, after in successors(world):
            if what := broken(world, after):
                raise Violation(_story(what, came, current, label, after))
            transitions += 1
            actions.add(label[2:] if label[1] == " " else label)
            after = same(after)
            index = ids.get(after)
            if index is None:
                index = ids[after] = len(worlds)
                worlds.append(after)
                came.append((current, label))
                before.append([])
                queue.append(index)
            before[index].append(current)
    ends = [end(world) for world in worlds]
    _all_can_end([each is not None for each in ends], worlds, before, came)
    return Explored(len(worlds), transitions, frozenset(actions), frozenset(each for each in ends if each is not None))


def _all_can_end(can: list[bool], worlds: list[W], before: list[list[int]], came: list[tuple[int, str]]) -> None:
    queue = deque(index for index, ends in enumerate(can) if ends)
    while queue:
        for index in before[queue.popleft()]:
            if not can[index]:
                can[index] = True
                queue.append(index)
    if not all(can):
        stuck = can.index(False)
        raise Violation(_story("no end can be reached", came, stuck, "(stuck)", worlds[stuck]))


def _story(broken: str, came: list[tuple[int, str]], last: int, label: str, after: Hashable) -> str:
    way = [label]
    while last > 0:
        last, label = came[last]
        way.append(label)
    return "\n  ".join([broken, *reversed(way), repr(after)])
