"""What a server under test is told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

Store: TypeAlias = Literal["postgres", "redis", "hybrid"]
Interface: TypeAlias = Literal["asgi", "wsgi", "django"]


@dataclass(frozen=True)
class Config:
    """`dsn` and `redis` are the front door's; `effects` is where the application writes by itself. Gates are files in
    `folder`, where the log is too. `skew`: by how many seconds the process's clock is wrong. `outage`: what is done
    while Redis is away, "closed" or "open"."""

    store: Store
    dsn: str
    effects: str
    redis: str | None
    folder: Path
    skew: float = 0.0
    outage: str = "closed"
