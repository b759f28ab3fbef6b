"""The pages of docs/reference, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Final

from manual import names, tables
from manual.texts import TEXTS

FOLDER: Final = Path(__file__).parents[1] / "docs" / "reference"
_PARTS: Final[Mapping[str, Callable[[], Iterable[str]]]] = {
    **{name: partial(names.entries, name) for name in names.PAGES},
    "options": tables.options,
    "settings": tables.settings,
    "errors": tables.all_errors,
    "log-events": tables.log_events,
    "metrics": tables.metrics,
    "exit-codes": tables.exit_codes,
    "commands": tables.commands,
}


def pages() -> dict[str, str]:
    """Each file with its text."""
    return {f"{name}.md": _page(name, parts()) for name, parts in _PARTS.items()}


def _page(name: str, parts: Iterable[str]) -> str:
    head = f"# {TEXTS['pages'][name]['title']}\n\n{TEXTS['pages'][name]['text'].strip()}"
    made = "<!-- Made by `make reference`, from the code. -->"
    return "\n\n".join([made, head, *parts]) + "\n"
