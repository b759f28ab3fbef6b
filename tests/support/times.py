"""Where the time of a test run goes: by test, by file, by process; and the order that follows from it."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

import pytest

DURATIONS: Final = Path(__file__).parent.parent / "durations.json"
_SLOWEST: Final = 25
_USUAL: Final = 5.0  # seconds of a file that nobody has timed


def known() -> Mapping[str, float]:
    """The seconds of each file of tests, as `make durations` has last seen them."""
    read: dict[str, float] = json.loads(DURATIONS.read_text("utf-8"))
    return read


def longest_first(items: list[pytest.Item], root: Path) -> None:
    """Sort by file: one that takes long and began last would leave the other processes idle."""
    seconds = known()

    def longest(item: pytest.Item) -> float:
        return -seconds.get(item.path.relative_to(root).as_posix(), _USUAL)

    items.sort(key=longest)


class Times:
    """A plugin of the process that prints: it hears of every test, whichever process has run it."""

    def __init__(self, keep: bool) -> None:
        self._keep = keep
        self._tests: Counter[str] = Counter()
        self._busy: Counter[str] = Counter()
        self._ended: defaultdict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        process = str(getattr(report, "worker_id", "one"))
        self._tests[report.nodeid] += report.duration  # type: ignore[assignment]
        self._busy[process] += report.duration  # type: ignore[assignment]
        self._ended[process] = max(self._ended[process], report.stop)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self._tests:
            return
        files = _by_file(self._tests)
        write = terminalreporter.write_line
        terminalreporter.section("seconds")
        for name, seconds in self._tests.most_common(_SLOWEST):
            write(f"{seconds:7.2f}  {name}")
        write("")
        for line in _columns(f"{seconds:7.1f}  {name}" for name, seconds in files.most_common() if seconds >= 0.05):
            write(line)
        write("")
        last = max(self._ended.values())
        for process, ended in sorted(self._ended.items()):
            write(f"{process}: {self._busy[process]:.0f} s in tests, idle for {last - ended:.1f} s at the end")
        if self._keep:
            kept = dict(known()) | {name: round(seconds, 1) for name, seconds in files.items()}
            there = {name: kept[name] for name in sorted(kept) if (DURATIONS.parent.parent / name).exists()}
            DURATIONS.write_text(json.dumps(there, indent=1) + "\n", "utf-8")


def _by_file(tests: Mapping[str, float]) -> Counter[str]:
    files: Counter[str] = Counter()
    for name, seconds in tests.items():
        files[name.partition("::")[0]] += seconds  # type: ignore[assignment]
    return files


def _columns(entries: Iterable[str], width: int = 70) -> list[str]:
    """Two beside each other."""
    listed = list(entries)
    half = (len(listed) + 1) // 2
    return [f"{left:<{width}}{right}".rstrip() for left, right in zip(listed, [*listed[half:], ""], strict=False)][
        :half
    ]
