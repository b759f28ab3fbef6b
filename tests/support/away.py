"""A database that is farther away.

With KILL_ROUND_TRIP=1, as `make test-long` has it, that of the storms' workers is a millisecond away, so that what dies
has more on its way.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from psycopg.conninfo import conninfo_to_dict, make_conninfo

from benchmarks._child import child


@asynccontextmanager
async def away(dsn: str) -> AsyncIterator[str]:
    """The address by which workers reach this database."""
    if not (milliseconds := float(os.environ.get("KILL_ROUND_TRIP", "0"))):
        yield dsn
        return
    async with child("benchmarks.delaying") as proxy:
        server = int(conninfo_to_dict(dsn)["port"] or 5432)
        port = await proxy.ask(port=server, round_trip=milliseconds / 1_000)
        yield make_conninfo(dsn, host="127.0.0.1", port=port)
