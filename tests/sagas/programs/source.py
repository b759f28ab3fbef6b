"""Random workflow programs as data: made from a seed, printed, and shrunk to what still fails.

A program is a list of nodes, each a list of its kind and what the methods of `interpreter.Run` take.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from itertools import count
from typing import Any, Final

Node = list[Any]
Program = list[Node]

LEAVES: Final = {
    "tx": 6, "call": 6, "refuse": 2, "flaky": 2, "sleep": 1, "wait": 2, "first": 2, "child": 1, "items": 1, "turns": 2,
    "patched": 1,
}  # fmt: skip
WAYS: Final = ("all", "gather", "group", "as_completed", "first_completed", "beside", "limited")
CUTTING: Final = ("all", "group")  # a refusal ends the other branches, wherever they are
_MOST: Final = 14  # nodes


class _Maker:
    def __init__(self, seed: int) -> None:
        self._chosen = random.Random(seed)
        self._names = count(1)
        self._left = _MOST

    def program(self) -> Program:
        chosen = self._chosen
        program = self._sequence(chosen.randint(2, 5), depth=0)
        if chosen.random() < 0.3:
            program.append(["reject"])
        return program

    def _sequence(self, length: int, depth: int) -> Program:
        nodes: Program = []
        for _ in range(length):
            if self._left <= 0:
                break
            if depth < 2 and self._chosen.random() < (0.5 if depth == 0 else 0.15):
                nodes.append(self._branches(depth))
                if depth == 0 and self._chosen.random() < 0.6:
                    nodes.append(["loop", self._name("l"), self._chosen.choice(["tx", "call"]), self._undo()])
            else:
                nodes.append(self._leaf(depth))
        return nodes

    def _branches(self, depth: int) -> Node:
        chosen = self._chosen
        way = chosen.choice(WAYS)
        number = 2 if way == "beside" else chosen.randint(2, 4)
        branches = [self._sequence(chosen.randint(1, 3), depth + 1) for _ in range(number)]
        return [way, branches, chosen.random() < 0.8, chosen.randint(1, 4)]

    def _leaf(self, depth: int) -> Node:
        self._left -= 1
        chosen = self._chosen
        kind = chosen.choices(list(LEAVES), list(LEAVES.values()))[0]
        brief = depth > 1  # a run rests for its `timeout` beside a task that waits for others
        if brief and kind == "child":
            kind = "call"
        name = self._name(kind[0])
        match kind:
            case "tx" | "call":
                return [kind, name, self._undo()]
            case "refuse":
                return [kind, name, chosen.choice(["tx", "call"]), chosen.random() < 0.8]
            case "flaky":
                return [kind, name, chosen.choice(["tx", "call"]), chosen.choice(["retry", "error"])]
            case "wait":
                return [kind, name, not brief and chosen.random() < 0.7]
            case "first":
                return [kind, name, "" if brief else chosen.choice(["a", "b", "ab", ""])]
            case "child":
                return [kind, name, chosen.random() < 0.7, self._undo()]
            case "items":
                return [kind, name, chosen.sample("abcdefgh", chosen.randint(2, 4))]
            case "turns":
                return [kind, chosen.randint(1, 4)]
        return [kind, name]

    def _name(self, kind: str) -> str:
        return f"{kind}{next(self._names)}"

    def _undo(self) -> bool:
        return self._chosen.random() < 0.6


def make(seed: int) -> Program:
    return _Maker(seed).program()


def nodes_of(program: Program) -> Iterator[Node]:
    for node in program:
        yield node
        if node[0] in WAYS:
            for branch in node[1]:
                yield from nodes_of(branch)


def signals(program: Program) -> list[str]:
    """The names of those that are to be sent."""
    found = [node[1] for node in nodes_of(program) if node[0] == "wait" and node[2]]
    return found + [f"{node[1]}_{which}" for node in nodes_of(program) if node[0] == "first" for which in node[2]]


def open_ended(program: Program) -> bool:
    """Whether it depends on time which steps it requests: a refusal cuts branches off, and which way a saga goes at a
    patch is told by what was recorded before."""
    for way, branches, *_ in (node for node in program if node[0] in WAYS):
        if any(node[0] == "patched" for branch in branches for node in nodes_of(branch)):
            return True
        if way in CUTTING and any(_refuses(each) for branch in branches for each in branch):
            return True
        if any(open_ended(branch) for branch in branches):
            return True
    return False


def _refuses(node: Node) -> bool:
    if node[0] in WAYS:
        return not node[2] and any(_refuses(each) for branch in node[1] for each in branch)
    return (node[0] == "refuse" and not node[3]) or node[0] == "reject"


def smaller(program: Program) -> Iterator[Program]:
    """Programs with a part of this one less, the smallest first."""
    for place, node in enumerate(program):
        before, after = program[:place], program[place + 1 :]
        yield before + after
        if node[0] in WAYS:
            for number, branch in enumerate(node[1]):
                yield before + branch + after
                if len(node[1]) > 1 and node[0] != "beside":
                    yield [*before, [node[0], node[1][:number] + node[1][number + 1 :], *node[2:]], *after]
                for less in smaller(branch):
                    yield [*before, [node[0], [*node[1][:number], less, *node[1][number + 1 :]], *node[2:]], *after]


def shown(program: Program) -> str:
    return json.dumps(program)
