"""The statements of stores/postgres.sql, by name, with the schema filled in."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from typing import Final

from psycopg import sql

_NAME: Final = re.compile(r"^-- name: (\w+)$", re.MULTILINE)
_COMMENT: Final = re.compile(r"^--.*\n?", re.MULTILINE)

Queries = dict[str, bytes]


@lru_cache(maxsize=8)
def load(schema: str) -> Queries:
    """All named statements. The schema is an identifier, quoted by psycopg, so any name is safe."""
    text = (Path(__file__).parent / "stores" / "postgres.sql").read_text("utf-8")
    parts = _NAME.split(text)[1:]
    return {
        name: fill(_COMMENT.sub("", body).strip(), schema) for name, body in zip(parts[::2], parts[1::2], strict=True)
    }


def fill(text: str, schema: str) -> bytes:
    """SQL text of ours with `{schema}` replaced by the quoted identifier."""
    return sql.SQL(text).format(schema=sql.Identifier(schema)).as_bytes(None)
