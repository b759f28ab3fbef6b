"""Each link of the pages holds, and each block of code is run by a test, or is a fragment that fits what there is.

A block of Python that begins with the name of its file, `# shop.py`, is run by the test of its page. Any other is a
fragment: it can be compiled, and what it imports, its options and the methods that it calls exist. So do the verbs and
flags of commands, the targets of make, and the functions in SQL. A block of `text` is output.
"""

from __future__ import annotations

import ast
import importlib
import json
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from textwrap import dedent
from typing import Final

import click
import psycopg
import pytest
import yaml

from idemconsumer import App, Key, Message, Saga, Tx
from idemconsumer.cli.main import main
from idemconsumer.handlers.options import UnnamedOptions
from manual.site import SITE, SOURCE
from manual.sources import tree
from tests.support import ROOT
from tests.support.servers.postgres import migrated

PAGES: Final = sorted(
    path for pattern in ("*.md", "docs/**/*.md", "examples/**/*.md", "benchmarks/*.md") for path in ROOT.glob(pattern)
)
RUN: Final = {  # the test of each page, or of each page in a folder, that has programs
    "README.md": "tests/test_pages.py",
    "docs/coming-from.md": "tests/test_coming_from_docs.py",
    "docs/crash-matrix.md": "tests/crash_matrix/test_crash_matrix.py",
    "docs/howto": "tests/test_howto.py",
    "docs/migrating.md": "tests/test_migrating_docs.py",
    "docs/testing.md": "tests/test_testing_docs.py",
    "docs/tutorial.md": "tests/test_tutorial.py",
}
OUTPUT: Final = {"text", "mermaid"}
OTHERS: Final = {"py", "proto"}  # in `docs/coming-from.md`: code for another library; and files of other languages
OPTIONS: Final = {None, "key", "name", *UnnamedOptions.__annotations__}  # None: `**options`
KNOWN: Final = {"app": App, "saga": Saga, "tx": Tx, "Key": Key}
BLOCK: Final = re.compile(r"^( *)```([^\n]*)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
LINK: Final = re.compile(r"\]\(([^)\s]+)\)")
MAKEFILE: Final = (ROOT / "Makefile").read_text("utf-8")
MIGRATIONS: Final = "".join(path.read_text("utf-8") for path in (ROOT / "migrations").glob("*.sql"))


@dataclass(frozen=True)
class Block:
    kind: str
    text: str

    @property
    def file(self) -> str | None:
        """The name of the file that it is."""
        named = re.match(r"(?:#|//) (\S+\.\w+)(?:, at the end)?\n", self.text)
        return named[1] if named else None


def blocks(page: Path) -> Iterator[Block]:
    for _, kind, text in BLOCK.findall(page.read_text("utf-8")):
        yield Block(kind.partition(" ")[0], dedent(text))


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


# ---------------------------------------------------------------------------------------------------------------- links
@cache
def anchors(page: Path) -> frozenset[str]:
    """As GitHub makes them, and Zensical as manual/site.toml tells it to."""
    found: list[str] = []
    for heading in re.findall(r"^#{1,6} (.+)$", BLOCK.sub("", page.read_text("utf-8")), re.MULTILINE):
        slug = (
            re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()).strip().replace(" ", "-")
        )
        found.append(slug if slug not in found else f"{slug}-{found.count(slug)}")
    return frozenset(found)


def leads_nowhere(link: str, page: Path) -> bool:
    if link.startswith(SITE):
        place = link.removeprefix(SITE).replace(".html", ".md") or "../README.md"
        link = place.replace("howto/index.md", "howto/README.md").replace("changelog.md", "../CHANGELOG.md")
        folder = ROOT / "docs"
    elif link.startswith(SOURCE):
        link, folder = link.removeprefix(SOURCE), ROOT
    elif re.match(r"[a-z]+:", link):
        return False
    else:
        folder = page.parent
    file, _, anchor = link.partition("#")
    target = (folder / file).resolve() if file else page
    return not target.exists() or (anchor != "" and anchor not in anchors(target))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_each_link_leads_somewhere(page: Path) -> None:
    links = LINK.findall(BLOCK.sub("", page.read_text("utf-8")))
    assert [link for link in links if leads_nowhere(link, page)] == []


def test_the_readme_is_read_elsewhere_so_its_links_are_absolute() -> None:
    links = LINK.findall((ROOT / "README.md").read_text("utf-8"))
    assert len(links) > 20
    assert [link for link in links if not link.startswith(("https://", "#"))] == []


# --------------------------------------------------------------------------------------------------------------- blocks
def faults_of_python(text: str) -> Iterator[str]:
    if text.startswith("@") and " def " not in text and "\ndef " not in text:
        text += "def decorated(): ..."
    try:
        parsed = tree(text)
    except SyntaxError as error:
        yield f"line {error.lineno}: {error.msg}"
        return
    known = {name: of for name, of in KNOWN.items() if not re.search(rf"^{name} = (?!App\()", text, re.MULTILINE)}
    for node in ast.walk(parsed):
        match node:
            case ast.ImportFrom(str(module), names) if module.split(".")[0] == "idemconsumer":
                home = importlib.import_module(module)
                yield from (f"{module} has no {each.name}" for each in names if not hasattr(home, each.name))
            case ast.Call(ast.Attribute(ast.Name(owner), attr)) if owner in known and not hasattr(known[owner], attr):
                yield f"{owner} has no {attr}"
            case ast.Call(ast.Attribute(_, "idempotent_handler"), keywords=options):
                yield from (f"no option {each.arg}" for each in options if each.arg not in OPTIONS)


def faults_of_commands(text: str) -> Iterator[str]:
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        for at, word in enumerate(words):
            if word == "idemconsumer":
                yield from faults_of_command(words[at + 1 :])
            elif word == "make" and at == 0:
                yield from (
                    f"no target {each}" for each in words[1:2] if not re.search(rf"^{each}:", MAKEFILE, re.MULTILINE)
                )


def faults_of_command(words: list[str]) -> Iterator[str]:
    command: click.Command = main
    while words and isinstance(command, click.Group) and not words[0].startswith("-"):
        found = command.get_command(click.Context(command), words[0])
        if found is None:
            yield f"no verb {words[0]}"
            return
        command, words = found, words[1:]
    flags = {flag for each in command.params for flag in (*each.opts, *each.secondary_opts)} | {"--help"}
    for word in words:
        if word in ("|", "&&", ";", ">", "&"):
            return
        if word.startswith("--") and word.partition("=")[0] not in flags:
            yield f"{command.name} has no {word}"


def faults_of_sql(text: str) -> Iterator[str]:
    for called in re.findall(r"\bidemconsumer\.(\w+)\s*\(", text):
        if not re.search(rf"create (?:or replace )?(?:function|procedure|table) {{schema}}\.{called}\b", MIGRATIONS):
            yield f"no function {called}"


def faults_of_json(text: str) -> Iterator[str]:
    try:
        json.loads(text.replace("\n…", ""))
    except ValueError as error:
        yield str(error)


def faults_of_yaml(text: str) -> Iterator[str]:
    try:
        yaml.safe_load(text)
    except yaml.YAMLError as error:
        yield str(error)


CHECKS: Final[dict[str, Callable[[str], Iterator[str]]]] = {
    "python": faults_of_python,
    "sh": faults_of_commands,
    "sql": faults_of_sql,
    "json": faults_of_json,
    "yaml": faults_of_yaml,
}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_each_block_is_run_or_fits(page: Path) -> None:
    test = RUN.get(name(page)) or RUN.get(name(page.parent))
    for block in blocks(page):
        if block.file is not None and block.kind in ("python", "proto"):
            assert test is not None, f"no test runs {block.file}"
            assert page.parent.name in ("howto", "reference") or page.name in (ROOT / test).read_text("utf-8")
        if block.kind in CHECKS and not (block.kind == "python" and page.parent.name == "reference"):
            assert list(CHECKS[block.kind](block.text)) == [], block.text
        else:
            assert block.kind in OUTPUT | OTHERS | {"python"}, f"what is a block of {block.kind!r}?\n{block.text}"


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("python", "app.proces(message)"),
        ("python", "from idemconsumer import Nothing"),
        ("python", '@app.idempotent_handler("kafka:x", key="id", retian="3d")\ndef handle(x): ...'),
        ("python", "if:"),
        ("sh", "idemconsumer dead redrve 1"),
        ("sh", "A=b idemconsumer run shop:app --worker 4"),
        ("sh", "make tests"),
        ("sql", "select idemconsumer.publsh('a', '{}')"),
        ("json", "{"),
    ],
)
def test_a_fragment_that_does_not_fit_is_found(kind: str, text: str) -> None:
    assert len(list(CHECKS[kind](text))) == 1


# --------------------------------------------------------------------------------------------------------------- README
async def test_the_handler_of_the_readme(database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = [each for each in blocks(ROOT / "README.md") if each.file == "consumers.py"]
    (tmp_path / "consumers.py").write_text(block.text, "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("IDEMCONSUMER_DSN", database)
    migrated(database, "idemconsumer")
    with psycopg.connect(database, autocommit=True) as shop:
        shop.execute("create table stock as select 'pen' as sku, 3 as qty")
        consumers = importlib.import_module("consumers")
        orders = [json.dumps({"order_id": id, "sku": "pen", "qty": 2}).encode() for id in ("o-1", "o-1", "o-2", "o-2")]
        async with consumers.app as app:
            told = [await app.process(Message("kafka:orders.placed", order)) for order in orders]
        assert [(str(each.kind), each.result) for each in told] == [
            ("applied", b'{"reserved":2}'), ("duplicate", b'{"reserved":2}'),
            ("failed", b'{"code":"out_of_stock","body":null}'), ("duplicate", b'{"code":"out_of_stock","body":null}'),
        ]  # fmt: skip
        assert shop.execute("select qty from stock").fetchall() == [(1,)]
