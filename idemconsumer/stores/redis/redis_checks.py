"""What a Redis must fulfil before a claim counts there, and what may lose claims."""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Awaitable, Sequence
from typing import Any, Final

from redis.exceptions import AuthenticationError, NoPermissionError

from idemconsumer.errors import ConfigurationError, StoreUnavailable
from idemconsumer.redaction import error_text
from idemconsumer.rules.values import State
from idemconsumer.stores.redis import scripts as lua
from idemconsumer.stores.redis.keeping import now
from idemconsumer.stores.redis.redis_client import Redises
from idemconsumer.stores.redis.scripts import Scripts, in_doubt, name_of

EVERY: Final = 60.0  # seconds for which the result of a check is valid
_KEEPS: Final = "noeviction"
_RIGHTS: Final = "grant what docs/stores.md lists"
_DENIED: Final = ("permission", "can't run this command")  # the second one in a script
_TRIAL: Final = 10_000  # milliseconds after which the trial's key expires, if it could not be deleted
_OLDEST: Final = 5  # the first version whose scripts may write after they have read the time


async def refuse_unfit(redises: Redises) -> None:
    """Raises ConfigurationError for a server that would drop claims by itself, or cannot run our scripts (H28), and
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
                "set it to noeviction (CONFIG SET maxmemory-policy noeviction), and if caches need another policy, use "
                "a separate server for them"
            )


class Fitness:
    """Whether a claim counts at its server: a Redis that is fit when it is first used may evict keys later (H28).

    The answer is valid for a minute after the servers were asked, and until a new connection is made: that may lead to
    another server, as after a failover.
    """

    def __init__(self, redises: Redises) -> None:
        self._redises = redises
        self._asking = asyncio.Lock()
        self._made = 0  # number of connections, before they were checked
        self._until = -math.inf

    @property
    def known(self) -> bool:
        return self._made == self._redises.made and now() < self._until

    async def ask(self) -> None:
        """Check, unless the last result is valid. After a claim this checks the server that has it. Raises as
        `refuse_unfit`."""
        if self.known:
            return
        async with self._asking:
            if self.known:
                return
            made = self._redises.made
            await refuse_unfit(self._redises)
            self._made, self._until = made, now() + EVERY


async def examine(address: str, replicas: int = 0) -> list[str]:
    """What may lose claims one day (H28). Raises as `refuse_unfit`, and ConfigurationError for a user that lacks a
    right that requests need. That is tried with a key that exists for a moment (H57)."""
    redises = Redises(address)
    try:
        await refuse_unfit(redises)
        persistence, memory = await _infos(redises, "persistence"), await _infos(redises, "memory")
        full = any(0 < int(each.get("maxmemory", 0)) <= int(each.get("used_memory", 0)) for each in memory)
        if not full:
            await _try_scripts(redises, replicas)
    finally:
        await redises.close()
    found = []
    if not all(int(each.get("aof_enabled", 0)) for each in persistence):
        found.append(
            "appendonly is off, so a restart loses the claims and responses since the last snapshot, and their "
            "requests run again; set appendonly to yes"
        )
    if full:
        found.append(
            "memory is full, so new requests with a key get 503, and running ones are still stored; raise maxmemory"
        )
    if any(each.get("maxmemory_policy", _KEEPS) != _KEEPS for each in memory):
        found.append(
            f"maxmemory-policy is not {_KEEPS}: once maxmemory is set, claims could be evicted, and Redis is refused"
        )
    return found


async def _infos(redises: Redises, section: str) -> Sequence[dict[str, Any]]:
    return await _asked(redises.infos(section))


async def _asked(infos: Awaitable[Sequence[dict[str, Any]]]) -> Sequence[dict[str, Any]]:
    with in_doubt():
        try:
            return await infos
        except (AuthenticationError, NoPermissionError) as error:
            raise ConfigurationError(f"redis: {error_text(error)}; correct the password, or {_RIGHTS}") from error


async def _try_scripts(redises: Redises, replicas: int) -> None:
    """Run each script once, on an unused key. Raises ConfigurationError if a request could not finish there."""
    scripts, key, call = Scripts(redises, replicas=replicas), secrets.token_bytes(32), "trial"
    claim = (call, 1_000, _TRIAL, b"", b"", 1, "check/-/trial")
    try:
        try:
            _, token, *_ = await scripts.run(lua.CLAIM, key, *claim, writes=True)
            for script, given in (
                (lua.READ, ()), (lua.RENEW, (token, _TRIAL)), (lua.LEAVE, (token,)), (lua.LOST, ()),
                (lua.RELEASE, (token, 0)), (lua.RELEASE_LOST, (token,)),
            ):  # fmt: skip
                await scripts.run(script, key, *given)
            _, token, *_ = await scripts.run(lua.CLAIM, key, *claim)
            await scripts.run(lua.COMPLETE, key, token, int(State.COMPLETED), b"", _TRIAL, 0, writes=True)
            with in_doubt():  # EVAL too, although the server may know all of these by their digests
                await redises.client.execute_command("EVAL", "return 1", 1, name_of(key))
                async for _ in redises.client.scan_iter(match=b"*", count=1):
                    break
            await scripts.run(lua.FORGET, key)
            await scripts.run(lua.LOOK, key, call, _TRIAL)
            await scripts.run(lua.UNMARK, key, call)
            await scripts.run(lua.KEEP, key, call, _TRIAL)
        finally:
            await scripts.run(lua.FORGET, key)
    except StoreUnavailable as error:
        why = str(error).removeprefix("Redis: ")
        text = f"redis: no request could finish there: {why}"
        raise ConfigurationError(f"{text}; {_RIGHTS}" if any(each in why for each in _DENIED) else text) from error
