"""What the schema says of how keys are hashed, for who looks into it (R39)."""

from __future__ import annotations

from idemconsumer.admin.dead_letters import connected
from idemconsumer.errors import ConfigurationError
from idemconsumer.hashing import HASHING
from idemconsumer.ports.broker import Finding
from idemconsumer.sql.queries import load
from idemconsumer.stores.hashing import learn_hashing


async def examine_secrets(dsn: str, schema: str) -> list[Finding]:
    """Whether `key_secrets` are those of the schema, and whether some of them can go. Raises like `Admin`."""
    async with connected(dsn, schema) as connection:
        rows = await (await connection.execute(load(schema)["hashing"])).fetchall()
    if not rows:
        return []
    try:
        place = learn_hashing(bytes(rows[0]["wrapped"]), schema)
    except ConfigurationError as error:
        return [Finding("error", "key_secrets", str(error).removeprefix("database: "))]
    if place:
        text = f"the data key is wrapped by number {place + 1}; the next process that starts with this list fixes it"
        return [Finding("warning", "key_secrets", text)]
    if len(HASHING.secrets) > 1:
        text = "the data key is wrapped by the first one; once all processes have this list, leave the others out"
        return [Finding("ok", "key_secrets", text)]
    return []
