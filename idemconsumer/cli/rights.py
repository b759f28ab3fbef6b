"""The least role of the database that may run each command, as `migrate grants` makes it (O35)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

# What is not named here a worker may do. `owner`: who may change the schema; `nobody`: it takes no rights in it.
LEAST: Final[Mapping[str, Collection[str]]] = {
    "nobody": ("demo", "dev", "migrate grants", "migrate sql"),
    "reader": (
        "audit", "check", "doctor", "explain", "status", "top", "workers list", "migrate status", "requests list",
        "dead export", "dead groups", "dead list", "dead show", "keys list", "keys show", "outbox list", "outbox show",
        "sagas export", "sagas list", "sagas show",
    ),
    "producer": ("publish",),
    "purge": ("prune",),
    "front-door": ("keys forget", "requests release", "requests settle"),
    "owner": ("migrate up",),
}  # fmt: skip
# Of these a reader may do the half that changes nothing.
READS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("dead discard", "dead redrive", "outbox discard", "prune"), "with --dry-run"),
    "dead runs": "without --cancel",
    "skip": "without a place",
}


def least(command: str) -> str:
    """The role that has to be granted."""
    return next((role for role, commands in LEAST.items() if command in commands), "worker")


def remedy(command: str) -> str:
    """What to do where this command was denied."""
    role, half = least(command), READS.get(command)
    also = f"; {half} a reader may run it" if half else ""
    return f"the least role for `{command}` is a {role}, see `idemconsumer migrate grants --{role} ROLE`{also}"
