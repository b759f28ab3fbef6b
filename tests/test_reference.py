"""docs/reference is what the code says, and has each public name, option, setting, error, event, metric and code."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from idemconsumer.handlers.options import UnnamedOptions
from idemconsumer.process.child import Exit
from idemconsumer.rules.redriven import REASONS
from idemconsumer.settings import PREFIX, Settings
from manual import names, tables
from manual.events import Untraceable, events
from manual.reference import FOLDER
from tests.support import ROOT

HEADING = re.compile(r"^#{2,4} (`+) ?(.+?) ?\1$", re.MULTILINE)


def headings(page: str) -> list[str]:
    return [text for _, text in HEADING.findall((FOLDER / f"{page}.md").read_text("utf-8"))]


def test_it_is_what_the_code_says() -> None:
    # In a process of its own, as `make reference`: tests before this one may have changed what a command shows.
    code = "import json, sys; from manual.reference import pages; json.dump(pages(), sys.stdout)"
    made = json.loads(subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True).stdout)
    stored = {path.name: path.read_text("utf-8") for path in FOLDER.iterdir()}
    assert sorted(stored) == sorted(made)
    assert [name for name, text in made.items() if stored[name] != text] == [], "run `make reference`"


@pytest.mark.parametrize(
    ("page", "known"),
    [
        *(
            (page, {name for module in modules for name in names.public(module)})
            for page, modules in names.PAGES.items()
        ),
        ("options", {"name", *UnnamedOptions.__annotations__}),
        ("settings", Settings.__struct_fields__),
        ("errors", {*(each.__name__ for each in tables.raised()), *REASONS}),
        ("commands", {"idemconsumer run", "idemconsumer dead redrive", "idemconsumer kafka reset"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_has_a_heading(page: str, known: Iterable[str]) -> None:
    assert sorted(set(known) - set(headings(page))) == []


@pytest.mark.parametrize("page", names.PAGES)
def test_each_public_name_has_its_signature_and_a_text(page: str) -> None:
    """Also a method of a Protocol that has overloads alone."""
    entries = [each for each in names.entries(page) if not each.startswith("## In ")]
    assert [
        each for each in entries if not re.fullmatch(r"#+ `[\w.]+`\n\n(```python\n.+?\n```\n\n)?\S.*", each, re.DOTALL)
    ] == []
    assert [each for each in entries if "@overload" in each or "Ellipsis" in each] == []


def test_each_setting_has_its_variable() -> None:
    page = (FOLDER / "settings.md").read_text("utf-8")
    assert [name for name in Settings.__struct_fields__ if f"`{PREFIX}{name.upper()}`" not in page] == []


def test_each_exit_code_is_a_row() -> None:
    page = (FOLDER / "exit-codes.md").read_text("utf-8")
    assert re.findall(r"^\| `(\d)` \| (\w+) \| \S", page, re.MULTILINE) == [
        (str(each.value), each.name) for each in Exit
    ]


def test_each_event_has_a_meaning_and_each_meaning_an_event() -> None:
    told = [text for of in tables.EVENTS.values() for text in of]
    assert len(told) == len(set(told))
    assert sorted(set(events()) ^ set(told)) == [], "manual/texts.toml"
    assert sorted(headings("log-events")) == sorted(told)


def test_each_reason_has_a_meaning() -> None:
    assert sorted(tables.REASONS_SAY) == sorted(REASONS)


FOUND = """
from idemconsumer.logs import log
NAME = "a constant"
class Teller:
    def tell(self, event):
        log.warning(event)
def go(teller, bad, news=None):
    log.info(NAME)
    teller.tell("a parameter" if bad else "another")
    say = log.debug if bad else log.error
    say("an alias", field=1)
"""


def test_an_event_is_followed_to_its_text(tmp_path: Path) -> None:
    (tmp_path / "found.py").write_text(FOUND, "utf-8")
    found = events(tmp_path)
    assert list(found) == ["a constant", "a parameter", "an alias", "another"]
    assert (found["an alias"].levels, list(found["an alias"].fields)) == ({"debug", "error"}, ["field"])


@pytest.mark.parametrize("text", ["made()", "event.name", "given", "f'{count} messages'"])
def test_one_that_cannot_be_followed_is_an_error(tmp_path: Path, text: str) -> None:
    lost = f"from idemconsumer.logs import log\ndef go(event, count, given):\n    log.info({text})\n"
    (tmp_path / "lost.py").write_text(lost, "utf-8")
    with pytest.raises(Untraceable, match=r"lost\.py"):
        events(tmp_path)
