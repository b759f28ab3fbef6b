"""The findings of a crash matrix."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from idemconsumer.testing.matrix_database import Contents, Row

_ROWS_SHOWN: Final = 5
_WIDTH: Final = 72


@dataclass(frozen=True)
class WrongRun:
    """A run that left other rows than an undisturbed one.

    `what` is the kind of run: "killed", "rival", "duplicate" or "fresh process"; for the first two, `point` names the
    point. `effect` is what happened to the message's effect: "lost", "twice", "different", or "stuck" if the message
    was never acknowledged. `found` shows the expected rows and the actual ones.
    """

    what: str
    point: str
    effect: str
    found: str

    def __str__(self) -> str:
        """One line, followed by the rows."""
        return f"{self.what} {self.point}".rstrip() + f": {self.effect}\n{self.found}"


@dataclass(frozen=True)
class MatrixReport:
    """The findings of `crash_matrix`; as text, a table of them.

    `wrong` has the runs that left other rows than an undisturbed run; a correct consumer has none. `consumer` is its
    name, `names` are the points at which it was killed and paused, and `runs` counts the deliveries. `missed` has the
    runs that did not reach their point, as (what, point): a pool may open its connections in another order.
    """

    consumer: str
    names: Sequence[str]
    wrong: Sequence[WrongRun]
    missed: Sequence[tuple[str, str]]
    runs: int

    @property
    def points(self) -> int:
        """The number of points."""
        return len(self.names)

    def __str__(self) -> str:
        """A line for each point, followed by the wrong runs."""
        effects = {(run.what, run.point): run.effect for run in self.wrong}
        effects |= dict.fromkeys(self.missed, "missed")
        lines = [f"{self.consumer}: {self.runs} runs, {self.points} points, {len(self.wrong)} wrong", ""]
        lines.append(f"{'point':{_WIDTH}}  killed     rival")
        for name in self.names:
            killed, rival = (effects.get((what, name), "ok") for what in ("killed", "rival"))
            lines.append(f"{name:{_WIDTH}}  {killed:9}  {rival}")
        lines += ["", *(f"{what}: {effects.get((what, ''), 'ok')}" for what in ("duplicate", "fresh process"))]
        return "\n".join([*lines, *(f"\n{run}" for run in self.wrong)])


def compared(before: Contents, expected: Contents, found: Contents) -> tuple[str, str] | None:
    """The effect as one word, and the rows as text. None if the rows are the expected ones."""
    effects, texts = set[str](), list[str]()
    for table, rows in expected.items():
        if found[table] != rows:
            effects.add(_effect(before[table], rows, found[table]))
            texts += [f"  {table}: expected {_shown(rows - found[table])}", f"  {' ' * len(table)}  found    "]
            texts[-1] += _shown(found[table] - rows)
    if not texts:
        return None
    return effects.pop() if len(effects) == 1 else "different", "\n".join(texts)


def _effect(before: Counter[Row], expected: Counter[Row], found: Counter[Row]) -> str:
    missing, extra = expected - found, found - expected
    if found == before or not extra:
        return "lost"
    if not missing:
        return "twice"
    changed = [sorted(rows.elements(), key=repr) for rows in (before - expected, missing, extra)]
    if len({len(rows) for rows in changed}) == 1 and all(map(_doubled, *changed)):
        return "twice"
    return "different"


def _doubled(before: Row, once: Row, found: Row) -> bool:
    """Whether each column that differs has changed by the same amount again."""
    try:
        return all(
            float(value or "") - float(one or "") == float(one or "") - float(was or "")
            for (_, was), (_, one), (_, value) in zip(before, once, found, strict=True)
            if one != value
        )
    except ValueError:
        return False


def _shown(rows: Counter[Row]) -> str:
    shown = [" ".join(f"{name}={'null' if value is None else value}" for name, value in row) for row in rows.elements()]
    more = len(shown) - _ROWS_SHOWN
    return " | ".join(sorted(shown)[:_ROWS_SHOWN] + ([f"and {more} more"] if more > 0 else [])) or "no such row"
