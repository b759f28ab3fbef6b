"""The site: each page of docs/ is in it, links hold, and nothing is loaded from elsewhere."""

from __future__ import annotations

import json
import re
import subprocess
from html import unescape
from pathlib import Path

import pytest

from manual import site
from tests.support import ROOT

# What a browser gets by itself: scripts, styles, fonts, pictures. Links are followed by people.
LOADED = re.compile(r"<(?:script|link|img|iframe|source)\b[^>]*?\b(?:src|href)=\"?([^\s\">]+)")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("build")
    site.build(folder)
    return folder / "site"


def test_each_page_of_docs_is_there_and_nothing_is_loaded_from_elsewhere(built: Path) -> None:
    pages = [path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")]
    assert len(pages) > 20
    for page in [*pages, Path("index.md"), Path("changelog.md")]:
        page = page.with_name("index.md") if page.name == "README.md" else page
        html = (built / page.with_suffix(".html")).read_text("utf-8")
        assert f"{page}:" in (built / "llms.txt").read_text("utf-8").replace(")", "")
        loaded = [unescape(each) for each in LOADED.findall(html) if not each.startswith(site.SITE)]
        assert len(loaded) > 3
        assert [each for each in loaded if each.startswith(("http:", "https:", "//"))] == [], page


def test_each_item_of_a_list_is_one(built: Path) -> None:
    """Python's Markdown takes a list that follows a paragraph at once for a part of it."""
    prose = {
        page.name: re.sub(r"<pre.*?</pre>", "", page.read_text("utf-8"), flags=re.S) for page in built.rglob("*.html")
    }
    assert {name: found for name, text in prose.items() if (found := re.findall(r"\n- .{0,40}", text))} == {}


def test_it_is_searched_by_event_setting_and_question(built: Path) -> None:
    items = json.loads((built / "search.json").read_text("utf-8"))["items"]
    places = {re.sub(r"<.*?>", "", unescape(item["title"])): item["location"] for item in items}
    assert places["worker died"].startswith("reference/log-events.html#")
    assert places["drain_timeout"].startswith("reference/settings.html#")
    assert any("kills its worker" in item["text"] for item in items)
    assert not any(item["location"].startswith("protocol") for item in items)


@pytest.mark.parametrize("link", ["nowhere.md", "index.md#nowhere"])
def test_a_link_that_leads_nowhere_fails(tmp_path: Path, link: str) -> None:
    with pytest.raises(subprocess.CalledProcessError):
        site.build(tmp_path, {"index.md": f"# Start\n\nGo [there]({link}).\n"})


def test_a_page_without_a_section_fails(tmp_path: Path) -> None:
    with pytest.raises(site.Misplaced, match=r"lost\.md"):
        site.build(tmp_path, {"index.md": "# Start\n\nHere.\n", "lost.md": "# Lost\n\nHere.\n"})
