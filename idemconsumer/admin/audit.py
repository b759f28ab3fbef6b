"""The audit: who decided what (O16), written in the transaction that carries the decision out."""

from __future__ import annotations

import getpass
import os
import socket
from typing import Any

from idemconsumer.admin.sender import Sender
from idemconsumer.stores.claims import PostgresClaims


class Trace:
    """One audit row for a decision that takes several transactions. It always says how far they came, even if the rest
    never run.

    `target` never quotes a key or an error, which may be personal data.
    """

    def __init__(self, by: str, what: str) -> None:
        self._given: dict[str, Any] = {"by": by, "what": what}
        self._id: int | None = None

    async def write(self, send: Sender, target: str) -> None:
        """Write or update the row, in the caller's transaction."""
        name = "note_decision" if self._id is None else "note_progress"
        (row,) = await send(name, **self._given, id=self._id, target=target)
        self._id = row["id"]


async def note_saga(claims: PostgresClaims, key: bytes, by: str, what: str, detail: str | None) -> None:
    """Write a decision about a saga to the audit, in the transaction that carries it out."""
    target = f"saga {key.hex()[:12]}{'' if detail is None else f', {detail}'}"
    await claims.send("note_decision", {"by": by, "what": what, "target": target})


def counted(count: int, things: str, **chosen: str | None) -> str:
    """A target such as `3 dead letters, reason undecodable`."""
    return ", ".join([f"{count} {things}", *(f"{name} {value}" for name, value in chosen.items() if value is not None)])


def user() -> str:
    """The default for who decides: the account and the machine of this process."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # the user of a container may have no name
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"
