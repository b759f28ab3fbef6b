"""The app that whole worker processes run: `idemconsumer run tests.sagas.programs.on_record:app`.

What its sagas act on, and what they are given, is on record outside of the process, whenever that is killed.
"""

from __future__ import annotations

import asyncio
import json
import os
from functools import cached_property
from typing import Any, Final
from uuid import UUID

import psycopg

from tests.sagas.programs.interpreter import Seen, app_of

RECORD: Final = "PROGRAMS_RECORD"  # in the environment: the file for what runs see
TABLES: Final = """
create table remote (key uuid, name text, primary key (key, name));
create table tried (name text primary key);
"""


class OnRecord:
    def __init__(self) -> None:
        self._connection: psycopg.AsyncConnection[Any] | None = None
        self._connecting = asyncio.Lock()

    # ------------------------------------------------------------------------------------ in tables, as a remote has it
    async def note(self, key: UUID, name: str) -> None:
        await self._execute("insert into remote (key, name) values (%s, %s) on conflict do nothing", key, name)

    async def first_time(self, name: str) -> bool:
        return bool(await self._execute("insert into tried (name) values (%s) on conflict do nothing", name))

    async def _execute(self, query: str, *params: object) -> int:
        """How many rows that was."""
        async with self._connecting:
            if self._connection is None or self._connection.closed:  # a call that was cut off may close it
                dsn = os.environ["IDEMCONSUMER_DSN"]
                self._connection = await psycopg.AsyncConnection.connect(dsn, autocommit=True)
        return (await self._connection.execute(query.encode(), params)).rowcount

    # ------------------------------------------------- in a file, without a turn of the loop that a run would not have
    @cached_property
    def _file(self) -> int:
        return os.open(os.environ[RECORD], os.O_WRONLY | os.O_APPEND)

    def begins(self, saga: str, seen: Seen) -> None:
        self._write(saga, seen)

    def got(self, saga: str, seen: Seen, name: str, entry: str | None) -> None:
        self._write(saga, seen, name, entry)

    def _write(self, saga: str, seen: Seen, *got: str | None) -> None:
        os.write(self._file, json.dumps([saga, seen.token, seen.number, *got]).encode() + b"\n")


# What is late is given out of its turn after `timeout`: longer than a busy machine takes to answer.
app = app_of(OnRecord(), lease="1s", max_attempts=100, timeout="20s")
