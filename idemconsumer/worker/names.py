"""Before a worker begins: whether what its handlers have recorded is found under the names that they say (L68)."""

from __future__ import annotations

from collections.abc import Sequence

from idemconsumer.admin.dead_letters import PATIENCE, connected
from idemconsumer.errors import ConfigurationError
from idemconsumer.handlers.handler import BoundHandler
from idemconsumer.message import keys
from idemconsumer.sql.queries import load


async def check_names(dsn: str, schema: str, handlers: Sequence[BoundHandler]) -> None:
    """Raises StoreUnavailable, and ConfigurationError for a handler that last recorded messages under another name than
    its first: they would run again if they came again."""
    renamed = [handler for handler in handlers if len(handler.names) > 1]
    if not renamed:
        return
    async with connected(dsn, schema, patience=PATIENCE) as connection:
        for handler in renamed:
            given = {
                "apps": [keys.scopes_of(name.app).removesuffix("/") for name in handler.names],
                "handlers": [keys.scopes_of(name.handler).removesuffix("/") for name in handler.names],
            }
            cursor = await connection.execute(load(schema)["last_name"], given)
            row = await cursor.fetchone()
            if row is None or row["place"] == 1:
                continue
            last, first = handler.names[row["place"] - 1], handler.names[0]
            others = (name for name in handler.names if name not in (last, (handler.app, handler.name)))
            order = ", ".join(f'"{name.handler if name.app == handler.app else name}"' for name in (last, *others))
            raise ConfigurationError(
                f"handler {handler.name!r}: its messages were recorded as {last} when it last ran, and would be looked "
                f"up as {first}, so that they would run again if they came again; write the name that was recorded "
                f"last first, formerly=({order})"
            )
