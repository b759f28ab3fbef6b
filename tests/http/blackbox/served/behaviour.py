"""What an endpoint does, by its query. First it adds its effect, a row named by the header `X-Effect`.

`gate=NAME`   then says that it is here, and goes on when the test opens the gate
`fail`        then it raises
`sql=COMMIT`  then it sends that by its Tx, and goes on whatever comes of it (joined routes)
`events=N`    answers with a stream of N events; it waits at its gate after the first one
`size=N`      answers with N bytes
`echo`        answers with the body of the request
`status=N`    answers with that status, 201 by default
`dated`       answers with a `Date` of its own, in the year 2000

Every answer has a nonce, so that one that was not replayed differs. `GET /effects/NAME` counts rows, and
`GET /openapi.json` describes the routes. Around the front door is what lets pages of every origin read the answers
(CORS).

The header `X-Die: running` kills the process in the endpoint, once it has added its effect; `X-Die: answering` when the
first byte of the answer would leave.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from uuid import uuid4

import psycopg

SCHEMA: Final = "create table if not exists effect (name text not null)"
ADD: Final = "insert into effect values (%s)"
OLD_DATE: Final = "Sat, 01 Jan 2000 00:00:00 GMT"


@dataclass(frozen=True)
class Reply:
    status: int
    headers: list[tuple[str, str]]
    body: bytes


def reply(query: Mapping[str, str], body: bytes) -> Reply:
    """What is answered, of one part."""
    nonce, status = uuid4().hex, int(query.get("status", "201"))
    headers = [
        ("Location", f"/orders/{nonce}"), ("ETag", f'"{nonce}"'), ("X-Kept", nonce), ("X-Other", nonce),
        ("Set-Cookie", f"session={nonce}"), ("Set-Cookie", "seen=1"), ("WWW-Authenticate", "Bearer"),
        ("Access-Control-Allow-Origin", "https://shop.example"),
    ]  # fmt: skip
    headers += [("Date", OLD_DATE)] if "dated" in query else []
    if "echo" in query:
        encoding = [("Content-Encoding", "gzip")] if query["echo"] == "gzip" else []
        return Reply(status, [*headers, *encoding, ("Content-Type", "application/octet-stream")], body)
    if "size" in query:
        return Reply(status, [*headers, ("Content-Type", "text/plain")], b"x" * int(query["size"]))
    if status in (204, 304):
        return Reply(status, headers, b"")
    made = f'{{"nonce": "{nonce}"}}'.encode()
    return Reply(status, [*headers, ("Content-Type", "application/json")], made)


def add(dsn: str, name: str) -> None:
    """By a connection of the application's own."""
    with psycopg.connect(dsn, autocommit=True) as db:
        db.execute(ADD, (name,))


def count(dsn: str, name: str) -> int:
    with psycopg.connect(dsn, autocommit=True) as db:
        row = db.execute("select count(*) from effect where name = %s", (name,)).fetchone()
        assert row is not None
        return int(row[0])


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class Gate:
    """Two files: how often an endpoint came here, and whether it may go on. One that nobody opens is open after a
    minute, since a test that has failed opens none."""

    folder: Path
    name: str

    def arrive(self) -> None:
        with (self.folder / f"{self.name}.here").open("a") as here:
            here.write(".")

    @property
    def arrivals(self) -> int:
        here = self.folder / f"{self.name}.here"
        return len(here.read_text()) if here.exists() else 0

    def open(self) -> None:
        (self.folder / f"{self.name}.open").touch()

    @property
    def is_open(self) -> bool:
        return (self.folder / f"{self.name}.open").exists()


GLANCE: Final = 0.01  # seconds
MOST_GLANCES: Final = 6_000
