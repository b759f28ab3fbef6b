"""Pages whose programs run as they are printed: files, commands, and what these print.

A `python` block begins with the name of its file, `# shop.py`, or `# shop.py, at the end` if it is added to that file.
So does a `proto` block.
A `sh` block has commands, and a `text` block right after it what they print, where `…` stands for anything. A comment
`<!-- not run: why -->` above a block says that no test runs it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final

from tests.support import ROOT

_BLOCK: Final = re.compile(
    r"^(?P<skipped><!-- not run: [^\n]+ -->\n)?```(?P<kind>\w+)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE
)
_FILE: Final = re.compile(r"(?:#|//) (\S+\.\w+)(, at the end)?\n")


@dataclass(frozen=True)
class File:
    """A file that the reader makes, or adds to."""

    name: str
    code: str
    added: bool

    def write(self, folder: Path) -> None:
        before = (folder / self.name).read_text("utf-8") + "\n\n" if self.added else ""
        (folder / self.name).write_text(before + self.code, "utf-8")


@dataclass(frozen=True)
class Commands:
    """What the reader types in one go, and what is printed then; None if the page does not say."""

    lines: list[str]
    printed: str | None


@dataclass(frozen=True)
class Statements:
    """What the reader has the database do."""

    text: str


@dataclass(frozen=True)
class Printed:
    """What the reader is told to look at, elsewhere."""

    text: str


def steps(page: str) -> Iterator[File | Commands | Statements | Printed]:
    """What a reader of docs/`page` does, in order."""
    blocks = [each for each in _BLOCK.finditer((ROOT / "docs" / page).read_text("utf-8")) if not each["skipped"]]
    outputs = {id(block): after for block, after in pairwise(blocks) if _answers(block, after)}
    taken = {id(after) for after in outputs.values()}
    for block in blocks:
        if block["kind"] in ("python", "proto"):
            named = _FILE.match(block["text"])
            assert named is not None, f"docs/{page}: a block of {block['kind']} begins with the name of its file"
            yield File(named[1], block["text"][named.end() :].lstrip("\n"), named[2] is not None)
        elif block["kind"] == "sh":
            printed = outputs.get(id(block))
            yield Commands(block["text"].splitlines(), None if printed is None else printed["text"])
        elif block["kind"] == "text":
            if id(block) not in taken:
                yield Printed(block["text"])
        else:
            assert block["kind"] == "sql", f"docs/{page}: no test runs a block of {block['kind']!r}"
            yield Statements(block["text"])


def _answers(block: re.Match[str], after: re.Match[str]) -> bool:
    return (block["kind"], after["kind"]) == ("sh", "text") and not block.string[block.end() : after.start()].strip()


def matches(printed: str, text: str) -> bool:
    """Whether `text` is what the page has printed."""
    return re.fullmatch(_pattern(printed), text.rstrip(), re.DOTALL) is not None


def shows(printed: str, text: str) -> bool:
    """Whether each line that the page has printed is in `text`, in that order."""
    return re.search(".*".join(map(_pattern, printed.splitlines())), text, re.DOTALL) is not None


def _pattern(printed: str) -> str:
    return ".*?".join(map(re.escape, printed.rstrip().split("…")))
