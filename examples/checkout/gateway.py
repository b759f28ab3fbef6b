"""A payment gateway that is not there: somebody else's system, with a memory of its own (one SQLite file).

It does what a saga needs of every remote: under an idempotency key it acts once, and answers a repeated call as it
answered the first one, *a failure too*. A gateway that forgets its failures would charge a late repeat of a call that
was declined, after the saga has been undone.

What it does is told by the card: `declined` is refused; `timeout` is charged, and then no answer comes, once; `slow`
answers a second after it has charged. Any other card is charged at once.
"""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path

SLOW = 1.0  # seconds


class Declined(Exception):
    """The gateway's final no."""


class Gateway:
    def __init__(self, file: Path) -> None:
        self._database = sqlite3.connect(file, isolation_level=None, timeout=10.0)
        self._database.execute(
            "create table if not exists asked ("
            " key text primary key, what text not null, card text not null, amount integer not null,"
            " answer text not null, times integer not null default 1)"
        )

    def close(self) -> None:
        self._database.close()

    async def charge(self, key: str, card: str, amount: int) -> str:
        """The charge's number. Raises Declined; TimeoutError when nobody knows whether it was charged."""
        answer, first = self._once(key, "charge", card, amount)
        if answer == "declined":
            raise Declined(card)
        if first and card == "slow":
            await asyncio.sleep(SLOW)
        if first and card == "timeout":
            raise TimeoutError("the gateway does not answer")
        return answer

    async def refund(self, key: str, card: str, amount: int) -> str:
        return self._once(key, "refund", card, amount)[0]

    async def find(self, key: str) -> str | None:
        """How the call with this key was answered; None when there was none."""
        row = self._database.execute("select answer from asked where key = ?", (key,)).fetchone()
        return None if row is None else str(row[0])

    def _once(self, key: str, what: str, card: str, amount: int) -> tuple[str, bool]:
        """The answer, and whether this is the call that it was made for."""
        answer = "declined" if card == "declined" else f"{what}-{key[:8]}"
        with closing(self._database.cursor()) as cursor:
            cursor.execute(
                "insert into asked (key, what, card, amount, answer) values (?, ?, ?, ?, ?)"
                " on conflict (key) do update set times = times + 1 returning answer, times",
                (key, what, card, amount, answer),
            )
            stored, times = cursor.fetchone()
        return str(stored), times == 1

    def effects(self) -> list[tuple[str, str, int]]:
        """What really happened, for the demo: (charge or refund, card, amount) for each key."""
        rows = self._database.execute("select what, card, amount from asked where answer <> 'declined'").fetchall()
        return [(str(what), str(card), int(amount)) for what, card, amount in rows]
