"""`make shape`: how large the package is, what stands in it twice, and how many files one message goes through."""

from __future__ import annotations

import ast
import asyncio
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from idemconsumer import App, Message, Tx
from idemconsumer.testing import EmbeddedPostgres, migrate
from manual.sources import tree

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "idemconsumer"
OUTSIDE = {"testing", "embedded"}  # of what a message goes through


def main() -> None:
    """Print each figure and what it counts; with `--json` the same as one object."""
    found = dict(figures())
    if "--json" in sys.argv:
        print(json.dumps(found, indent=2))
        return
    for name, value in found.items():
        print(f"{value if isinstance(value, int) else ', '.join(value):>8}  {name}")


def figures() -> Iterator[tuple[str, int | list[str]]]:
    """By their names."""
    files = sorted(PACKAGE.rglob("*.py"))
    texts = {file: file.read_text("utf-8") for file in files}
    sql = [*PACKAGE.rglob("*.sql")]
    lines = {file: text.count("\n") for file, text in texts.items()}
    migrations = sum(file.read_text("utf-8").count("\n") for file in (ROOT / "migrations").glob("*.sql"))
    yield (
        "lines of the package, its SQL included",
        sum(lines.values()) + sum(file.read_text("utf-8").count("\n") for file in sql),
    )
    yield "lines of code in Python, without blank ones, comments and docstrings", sum(map(code_lines, texts.values()))
    yield "lines of migrations", migrations
    yield "files", len(files)
    yield "lines of the median file", int(statistics.median(lines.values()))
    yield "lines of the longest file", max(lines.values())
    names = Counter(file.stem for file in files if not file.stem.startswith("__"))
    yield "names of modules that occur twice", sum(count > 1 for count in names.values())
    classes = Counter(
        node.name
        for text in texts.values()
        for node in ast.walk(tree(text))
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    yield "names of public classes that occur twice", sum(count > 1 for count in classes.values())
    arrows = set(imports(texts))
    yield "rooms", len({room(file) for file in files})
    yield "arrows between rooms", len(arrows)
    yield (
        "rules of docs/protocol.md",
        len(re.findall(r"^### [A-Z]+[0-9]+ ", (ROOT / "docs/protocol.md").read_text("utf-8"), re.MULTILINE)),
    )
    yield "modules of the package that a worker imports", modules()
    way = asyncio.run(one_message())
    rooms = [room(PACKAGE / file) for file in way]
    moves = [there for here, there in itertools.pairwise(rooms) if here != there]
    yield "files that one message goes through", len(set(way))
    yield "rooms that it goes through", len(set(rooms))
    yield "calls in it that lead back to a room that it had left", len(moves) - len(set(moves))


def code_lines(text: str) -> int:
    """Of lines with a statement in them."""
    module = tree(text)
    plain = set[int]()
    for node in ast.walk(module):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(
            node, clean=False
        ):
            first = node.body[0]
            plain.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return sum(
        number not in plain and bool(line.strip()) and not line.lstrip().startswith("#")
        for number, line in enumerate(text.splitlines(), 1)
    )


def room(file: Path) -> str:
    """The folder right below the package, or the file itself."""
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(texts: dict[Path, str]) -> Iterator[tuple[str, str]]:
    """From which room to which other one."""
    for file, text in texts.items():
        for node in ast.walk(tree(text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("idemconsumer."):
                there = (node.module or "").split(".")[1]
                if there != room(file):
                    yield room(file), there


def modules() -> int:
    """In a process of its own."""
    count = "print(sum(name.startswith('idemconsumer.') for name in sys.modules))"
    program = f"import sys, idemconsumer.worker.worker as _; {count}"
    return int(subprocess.check_output([sys.executable, "-c", program], text=True))


app = App("shape")


@app.idempotent_handler("memory:orders", key="id")
async def handle(order: dict[str, str], tx: Tx) -> str:
    """What the message does."""
    await tx.execute("select 1")
    return order["id"]


async def one_message() -> list[str]:
    """The file of each function that is called for it, in order, once everything is open and known."""
    called: list[str] = []

    def called_now(frame: FrameType, event: str, _: Any) -> None:
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(str(PACKAGE)):
            file = str(Path(path).relative_to(PACKAGE))
            if file.split("/")[0] not in OUTSIDE:
                called.append(file)

    with EmbeddedPostgres() as server:
        migrate(server.dsn, "idemconsumer")
        os.environ["IDEMCONSUMER_DSN"] = server.dsn
        async with app:
            for number in range(3):
                await app.process(Message("memory:orders", json.dumps({"id": str(number)}).encode()))
            sys.setprofile(called_now)
            await app.process(Message("memory:orders", b'{"id": "one"}'))
            sys.setprofile(None)
    return called


if __name__ == "__main__":
    main()
