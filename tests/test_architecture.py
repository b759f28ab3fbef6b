"""The walk through the rooms names files that are there."""

from __future__ import annotations

import re

from idemconsumer.message import sources
from tests.support import ROOT

PAGE = (ROOT / "docs" / "architecture.md").read_text("utf-8")
NAMED = sorted(set(re.findall(r"`([a-z_]+(?:/[a-z0-9_]+)*(?:\.py|\.sql|/))`", PAGE)))


def test_each_file_that_is_named_exists() -> None:
    assert len(NAMED) > 20, "this test sees what the page names"
    assert [name for name in NAMED if not ((ROOT / "idemconsumer" / name).exists() or (ROOT / name).exists())] == []


def test_each_room_is_named() -> None:
    rooms = {path.name for path in (ROOT / "idemconsumer").iterdir() if (path / "__init__.py").exists()}
    listed = set(re.findall(r"^([a-z_]+(?: {4}[a-z_]+)*) {2,}", PAGE, re.MULTILINE))
    assert rooms <= {room for line in listed for room in line.split()}


def test_sql_publishes_to_each_broker_that_python_publishes_to() -> None:
    publish = (ROOT / "migrations/0002_messages.sql").read_text("utf-8")
    (line,) = re.findall(r"elsif (starts_with.*) then", publish)
    assert tuple(re.findall(r"'(\w+):'", line)) == sources.REMOTE
    (named,) = re.findall(r"in \(('postgres'.*?)\) and strpos", publish)
    assert set(re.findall(r"\w+", named)) == {*sources.SCHEMES} - {"memory"}
