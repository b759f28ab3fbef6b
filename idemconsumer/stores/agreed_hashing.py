"""Whether this process hashes keys as all others that use the schema do (R38), and under which secret (R39)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from idemconsumer.errors import ConfigurationError
from idemconsumer.hashing import HASHING
from idemconsumer.logs import log
from idemconsumer.sql.queries import in_words
from idemconsumer.stores.pool import Pool
from idemconsumer.wrapping import new_key, unwrap, wrap

_WHY: Final = "a message known under one hash would be new under another one, and would run twice"


async def settle_hashing(pool: Pool, schema: str) -> None:
    """Hash keys as the schema does; any other way is refused. If the schema has no way yet, record that of this
    process. If its data key is wrapped by another secret than the first one configured, wrap it with the first one.
    Raises ConfigurationError, also when the schema is not migrated, and StoreUnavailable."""
    with in_words(schema):
        stored = await pool.alone("hashing", {})
        if not stored:
            # A process that has a data key uses it for new schemas too: tests open one schema after the other.
            ours = wrap(HASHING.secrets[0], HASHING.data_key or new_key()) if HASHING.secrets else b""
            await pool.alone("settle_hashing", {"wrapped": ours})
            stored = await pool.alone("hashing", {})  # another process may have been faster
        wrapped = bytes(stored[0][0]) if stored else b""
        if (place := learn_hashing(wrapped, schema)) and HASHING.data_key is not None:
            anew = wrap(HASHING.secrets[0], HASHING.data_key)
            # Only one of several processes succeeds. The data key stays the same, so the others lose nothing.
            if await pool.alone("wrap_anew", {"anew": anew, "wrapped": wrapped}):
                log.info("key secret rotated: the data key is now wrapped by the first of `key_secrets`", was=place + 1)


def may_hash(stored: Sequence[Mapping[str, Any]], schema: str) -> bool:
    """Whether a process that only reads can hash keys, by the rows of the query `hashing`. No: there are secrets, and
    nothing was recorded with them. Raises ConfigurationError if this process hashes in another way."""
    if not stored:
        return not HASHING.secrets
    learn_hashing(bytes(stored[0]["wrapped"]), schema)
    return True


def learn_hashing(wrapped: bytes, schema: str) -> int:
    """Hash as the schema does from now on. Returns the index of the secret that wraps its data key; 0 also if there is
    no secret. Raises ConfigurationError if this process cannot hash that way."""
    if not HASHING.secrets and not wrapped:
        return 0
    for place, secret in enumerate(HASHING.secrets):
        if (data_key := unwrap(secret, wrapped)) is not None:
            HASHING.settle(data_key)
            return place
    if not HASHING.secrets:
        found, instead = "are hashed with a secret", "set IDEMCONSUMER_KEY_SECRETS to it"
    elif wrapped:
        found = "are hashed under a secret that is not among `key_secrets`"
        instead = "write the last secret that was in use after the new one, IDEMCONSUMER_KEY_SECRETS=new,old"
    else:
        found, instead = "are hashed without a secret", "remove `key_secrets`, or use another schema with them"
    raise ConfigurationError(f"database: the keys of schema {schema!r} {found}; {instead}: {_WHY}")
