"""The data file as it is."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, Final

TEXTS: Final[dict[str, Any]] = tomllib.loads((Path(__file__).parent / "texts.toml").read_text("utf-8"))
