"""What a run of a benchmark leaves: rates, ratios between neighbours, and the tables made of them."""

from __future__ import annotations

import statistics
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import msgspec

Subject: TypeAlias = Callable[[int], Awaitable[float]]  # number of the round -> what was measured in it


class Spread(msgspec.Struct, frozen=True):
    """The least, the middle and the most of several rounds."""

    least: float
    median: float
    most: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        seen = sorted(values)
        return cls(seen[0], statistics.median(seen), seen[-1])


class Figure(msgspec.Struct, frozen=True):
    """One measured thing, such as the messages a second of one consumer. `goal` is what it should be at most."""

    name: str
    unit: str
    values: Spread
    goal: float | None = None

    @property
    def met(self) -> bool | None:
        """By the median; None without a goal."""
        return None if self.goal is None else self.values.median <= self.goal


class Target(msgspec.Struct, frozen=True):
    """What `of` divided by `to` should be. `bound` says on which side of it the target is met."""

    of: str
    to: str
    goal: float | None = None
    bound: Literal["at least", "at most"] = "at least"


class Ratio(msgspec.Struct, frozen=True):
    target: Target
    values: Spread

    @property
    def met(self) -> bool | None:
        """By the median; None without a goal."""
        goal, median = self.target.goal, self.values.median
        if goal is None:
            return None
        return median >= goal if self.target.bound == "at least" else median <= goal


class Table(msgspec.Struct, frozen=True):
    """Things that were measured side by side. `facts` are counts and settings that are no rates."""

    title: str
    figures: list[Figure]
    ratios: list[Ratio] = []
    facts: dict[str, Any] = {}
    plot: bool = False


class Result(msgspec.Struct, frozen=True):
    """One part of the suite, as it is kept in results/<part>.json. `plot` is the title of one of all its ratios."""

    part: str
    tables: list[Table]
    plot: str = ""
    quick: bool = False
    seconds: float = 0.0
    when: str = ""
    machine: str = ""
    versions: dict[str, str] = {}


async def side_by_side(
    title: str,
    subjects: Mapping[str, Subject],
    targets: Sequence[Target],
    *,
    rounds: int,
    say: Callable[[str], None],
    unit: str = "messages/s",
    plot: bool = False,
    facts: Mapping[str, Any] | None = None,
) -> Table:
    """Run every subject once a round and compare within the round, since a machine's pace changes with the minutes.

    Every other round goes backwards, so that nobody always comes after the same neighbour.
    """
    seen: dict[str, list[float]] = {name: [] for name in subjects}
    for number in range(rounds):
        names = list(subjects)[:: 1 if number % 2 == 0 else -1]
        for name in names:
            seen[name].append(await subjects[name](number))
            say(f"{title}: {name}: {seen[name][-1]:,.4g} {unit}")
    return Table(
        title,
        [Figure(name, unit, Spread.of(values)) for name, values in seen.items()],
        [ratio(seen, target) for target in targets if {target.of, target.to} <= seen.keys()],
        dict(facts or {}),
        plot,
    )


def ratio(seen: Mapping[str, Sequence[float]], target: Target) -> Ratio:
    """Round by round."""
    return Ratio(target, Spread.of(ours / other for ours, other in zip(seen[target.of], seen[target.to], strict=True)))
