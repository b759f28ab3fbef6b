"""What a signal may be named."""

from __future__ import annotations

from typing import Final

CHILD: Final = "child:"  # begins what a saga waits for until a child has ended (L47)
_LONGEST: Final = 200  # characters


def wrong_name(name: object) -> str | None:
    """What is wrong with it, and what to write. A signal that is named like the end of a child would make whoever waits
    for that child due again and again."""
    if not isinstance(name, str) or not 0 < len(name) <= _LONGEST or not name.isprintable():
        return f"{name!r:.60}; write a printable string of up to {_LONGEST} characters"
    if name.startswith(CHILD):
        return f"{name!r:.60}, and names that begin with {CHILD!r} are for the ends of child sagas; choose another"
    return None
