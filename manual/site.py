"""The site: docs/, README and the reference as pages that Zensical builds into build/site, and llms.txt."""

from __future__ import annotations

import fnmatch
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

ROOT: Final = Path(__file__).parents[1]
_DOCS: Final = ROOT / "docs"
_PROJECT: Final = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
SITE: Final[str] = _PROJECT["urls"]["Documentation"]
SOURCE: Final[str] = _PROJECT["urls"]["Source"] + "/blob/main/"
_SETTINGS: Final[dict[str, Any]] = tomllib.loads((Path(__file__).parent / "site.toml").read_text("utf-8"))
_UNSEARCHED: Final = "---\nsearch:\n  exclude: true\n---\n\n"
_FENCE: Final = re.compile(r"^( *)(```+)")
_LINK: Final = re.compile(r"(?<=\]\()([^)\s]+)(?=\))")


class Misplaced(Exception):
    """A page without a section."""


def build(folder: Path, pages: Mapping[str, str] | None = None) -> None:
    """Everything, or these pages, into `folder`/site. A warning, such as a link that leads nowhere, is an error."""
    written = dict(_pages()) if pages is None else pages
    docs, site = folder / "docs", folder / "site"
    for each in (docs, site):
        shutil.rmtree(each, ignore_errors=True)
    shutil.copytree(_DOCS / "images", docs / "images")
    _write({name: _UNSEARCHED * (name in _SETTINGS["unsearched"]) + text for name, text in written.items()}, docs)
    sections = _sections(written)
    nav = [{title: [{_title(written[name]): name} for name in names]} for title, names in sections.items()]
    project = _SETTINGS["project"] | {"docs_dir": "docs", "site_dir": "site", "site_url": SITE, "nav": nav}
    (folder / "zensical.toml").write_bytes(msgspec.toml.encode({"project": project}))
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean", "--config-file", "zensical.toml"]
    subprocess.run(command, cwd=folder, check=True)
    _write(written, site)
    (site / "llms.txt").write_text(_llms(sections, written), "utf-8")


def _write(pages: Mapping[str, str], folder: Path) -> None:
    for name, text in pages.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, "utf-8")


def _pages() -> Iterator[tuple[str, str]]:
    """Each page of the site with its text."""
    yield "index.md", _adapted(ROOT / "README.md")
    yield "changelog.md", _adapted(ROOT / "CHANGELOG.md")
    for path in sorted(_DOCS.rglob("*.md")):
        name = path.relative_to(_DOCS)
        yield str(name.with_name("index.md") if name.name == "README.md" else name), _adapted(path)


def _adapted(path: Path) -> str:
    return "\n".join(
        _for_python_markdown(_LINK.sub(lambda link: _adapted_link(link[1], path), path.read_text("utf-8")))
    )


def _adapted_link(link: str, page: Path) -> str:
    """To a page of the site by its place there, to any other file of the repository by its address."""
    if link.startswith(SITE):
        return link.removeprefix(SITE).replace(".html", ".md") or "index.md"
    file, hash, anchor = link.partition("#")
    if not file or ":" in file:
        return link
    target = (page.parent / file).resolve()
    if not target.is_relative_to(_DOCS):
        return f"{SOURCE}{target.relative_to(ROOT)}{hash}{anchor}"
    if target.name == "README.md":
        target = target.with_name("index.md")
    place = os.path.relpath(target, page.parent if page.is_relative_to(_DOCS) else _DOCS)
    return f"{place}{hash}{anchor}"


def _for_python_markdown(text: str) -> Iterator[str]:
    """Its lists need a blank line before them and four spaces in front of what goes on; GitHub's need two or three."""
    fence, more, block = "", 0, ""  # the first line since the last blank one
    for line in text.splitlines():
        indent = len(line) - len(line.lstrip(" "))
        found = _FENCE.match(line)
        if not fence:
            more = 4 - indent if indent in (2, 3) else 0
            if line.startswith("- ") and block and not block.startswith(("- ", "|")):
                yield ""
                block = line
        if found is not None and (not fence or found[2] == fence):
            fence = "" if fence else found[2]
        yield " " * more + line if line else line
        block = line and (block or line)
    yield ""


def _title(text: str) -> str:
    found = re.search(r"^# (.+)$", text, re.MULTILINE)
    assert found is not None
    return found[1]


def _sections(pages: Mapping[str, str]) -> dict[str, list[str]]:
    """The names of the pages by the titles of sections; those without a page are left out."""
    found: dict[str, list[str]] = {}
    left = sorted(pages, key=lambda name: (not name.endswith("index.md"), name))
    for section in _SETTINGS["sections"]:
        names = list(dict.fromkeys(name for pattern in section["pages"] for name in fnmatch.filter(left, pattern)))
        left = [name for name in left if name not in names]
        if names:
            found[section["title"]] = names
    if left:
        raise Misplaced(f"manual/site.toml: no section has {', '.join(left)}")
    return found


def _llms(sections: Mapping[str, list[str]], pages: Mapping[str, str]) -> str:
    """As https://llmstxt.org has it: what this is, and where each page is as Markdown."""
    parts = [f"# {_PROJECT['name']}\n\n> {_PROJECT['description']}\n"]
    for title, names in sections.items():
        parts.append(f"## {title}\n")
        parts += [f"- [{_title(pages[name])}]({SITE}{name}): {_first_sentence(pages[name])}" for name in names]
        parts.append("")
    return "\n".join(parts)


def _first_sentence(text: str) -> str:
    """Of the first paragraph, without its links."""
    paragraph = next(part for part in text.split("\n\n") if re.match(r"[\w*`]", part) and not part.startswith("```"))
    unlinked = re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", " ".join(paragraph.split()))
    return re.split(r"(?<=\.) ", unlinked)[0]
