"""What deploy/ and pyproject.toml have, read."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import yaml

from tests.support import ROOT

PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
PROJECT = PYPROJECT["project"]
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm" / "idemconsumer"
TEMPLATES = {path.name: path.read_text("utf-8") for path in sorted((CHART / "templates").iterdir())}


def parsed(path: Path) -> Any:
    return yaml.safe_load(path.read_text("utf-8"))


def instructions() -> list[tuple[str, str]]:
    """Of the Dockerfile: each word with the rest of its line."""
    text = (DEPLOY / "Dockerfile").read_text("utf-8").replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in lines)]
