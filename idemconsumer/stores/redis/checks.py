"""What a Redis must be before a claim counts there, and what is to be known of it."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Any, Final

from redis.exceptions import AuthenticationError, NoPermissionError

from idemconsumer.errors import ConfigurationError
from idemconsumer.redaction import error_text
from idemconsumer.stores.redis.client import Redises
from idemconsumer.stores.redis.scripts import in_doubt

_KEEPS: Final = "noeviction"
_OLDEST: Final = 5  # the first whose scripts may write after they have asked for the time


async def refuse_unfit(redises: Redises) -> None:
    """H28. Raises ConfigurationError for a server that would forget claims by itself, or cannot run our scripts, and
    StoreUnavailable."""
    for server in await _infos(redises, "server"):
        version = str(server.get("redis_version", ""))
        major = version.partition(".")[0]
        if major.isdecimal() and int(major) < _OLDEST:
            raise ConfigurationError(f"redis: version {version} is too old; {_OLDEST}.0 or newer is needed")
    replicas = await _asked(redises.replica_infos("memory"))
    for memory in (*await _infos(redises, "memory"), *replicas):
        policy = str(memory.get("maxmemory_policy", _KEEPS))
        if policy != _KEEPS and int(memory.get("maxmemory", 0)) > 0:
            whose = "of a replica, which may take over, " if memory in replicas else ""
            raise ConfigurationError(
                f"redis: maxmemory-policy {whose}is {policy}, so a claim could be evicted and its request run again; "
                "set it to noeviction, on a server of its own if caches need another: "
                "CONFIG SET maxmemory-policy noeviction"
            )


async def examine(address: str) -> list[str]:
    """What may lose claims one day (H28). Raises as `refuse_unfit`."""
    redises = Redises(address)
    try:
        await refuse_unfit(redises)
        persistence, memory = await _infos(redises, "persistence"), await _infos(redises, "memory")
    finally:
        await redises.close()
    found = []
    if not all(int(each.get("aof_enabled", 0)) for each in persistence):
        found.append(
            "appendonly is off, so a restart loses the claims and responses since the last snapshot, and their "
            "requests run again; set appendonly to yes"
        )
    if any(0 < int(each.get("maxmemory", 0)) <= int(each.get("used_memory", 0)) for each in memory):
        found.append(
            "memory is full, so no request with a key can begin (503), and what runs is still stored; raise maxmemory"
        )
    if any(each.get("maxmemory_policy", _KEEPS) != _KEEPS for each in memory):
        found.append(
            f"maxmemory-policy is not {_KEEPS}: with a maxmemory, claims would be evicted, and so it is refused then"
        )
    return found


async def _infos(redises: Redises, section: str) -> Sequence[dict[str, Any]]:
    return await _asked(redises.infos(section))


async def _asked(infos: Awaitable[Sequence[dict[str, Any]]]) -> Sequence[dict[str, Any]]:
    with in_doubt():
        try:
            return await infos
        except (AuthenticationError, NoPermissionError) as error:
            text = f"redis: {error_text(error)}; grant +info and +eval, or mend the password"
            raise ConfigurationError(text) from error
