"""The decisions made in Redis, each by one script on one key (H25), and how the scripts are sent."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha1
from typing import Any, Final

from redis.exceptions import NoScriptError

from idemconsumer.errors import IdemConsumerError, StoreUnavailable
from idemconsumer.redaction import error_text
from idemconsumer.stores.redis.redis_client import Redises
from idemconsumer.user_code.cancellation import ends_this_task, uninterrupted

_MOST: Final = 50  # exchanges at a time; beyond its own limit the client raises an error instead of waiting
_PIECE: Final = 1_000  # keys
_PATIENCE: Final = 1_000  # milliseconds for the confirmations of replicas
_PREFIX: Final = b"idemconsumer:"


@dataclass(frozen=True, slots=True)
class Script:
    text: str

    @property
    def digest(self) -> str:
        return sha1(self.text.encode(), usedforsecurity=False).hexdigest()


# A request's value is a hash. s: the state's number. t: the fence token. o: the id of the call that claimed it. u: the
# end of the lease, in milliseconds of Redis's clock; l: the length of a lease. f, c: fingerprints. a: a former owner
# was lost. r: the response. b: when it was claimed, in microseconds since 1970. n: the name of its scope.
#
# An end more than two leases ahead means that the clock was set back. One lease would be too little: a step back by a
# millisecond, or a failover to a clock that is slow, would free a key that was claimed just before.
_NOW: Final = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local function over(u, l)
    return tonumber(u) < now or tonumber(u) > now + 2 * tonumber(l)
end
"""
# H53: a full server refuses commands that need memory, until the script has written. This write needs no memory and
# changes nothing. So a full server refuses new claims, but existing claims are renewed and ended.
_THOUGH_FULL: Final = "redis.call('HDEL', KEYS[1], '')"
CLAIM: Final = Script(f"""{_NOW}
local key, call, lease, keep, f, c = KEYS[1], ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[4], ARGV[5]
local s, t, o, u, l, a, kf, kc, r, b = unpack(
    redis.call('HMGET', key, 's', 't', 'o', 'u', 'l', 'a', 'f', 'c', 'r', 'b'))
local token = time[1] * 1000000 + time[2]
if not s then
    redis.call('HSET', key, 's', 1, 't', token, 'o', call, 'u', now + lease, 'l', lease, 'f', f, 'c', c, 'b', token,
        'n', ARGV[7])
    redis.call('PEXPIRE', key, keep)
    return {{'held', token, 0, token}}
end
if s ~= '1' then
    return {{'final', s, kf, kc, r}}
end
if o == call then
    redis.call('HSET', key, 'u', now + lease)
    return {{'held', tonumber(t), tonumber(a or 0), tonumber(b)}}
end
local lost = over(u, l)
local same = f == '' or kf == '' or f == kf or (c ~= '' and c == kc)
if lost and same and ARGV[6] == '1' then
    token = math.max(token, tonumber(t) + 1)
    redis.call('HSET', key, 't', token, 'o', call, 'u', now + lease, 'l', lease, 'a', 1, 'b', token)
    redis.call('PEXPIRE', key, keep)
    return {{'held', token, 1, tonumber(b)}}
end
return {{'running', kf, kc, lost and 1 or 0}}
""")
# Only while it has not expired: a claim that was cut off for longer has been reported as lost.
RENEW: Final = Script(f"""{_NOW}
local s, t, u, l = unpack(redis.call('HMGET', KEYS[1], 's', 't', 'u', 'l'))
if s == '1' and t == ARGV[1] and not over(u, l) then
    {_THOUGH_FULL}
    redis.call('HSET', KEYS[1], 'u', now + tonumber(l))
    redis.call('PEXPIRE', KEYS[1], ARGV[2])
    return 1
end
return 0
""")
# With 1 as the last argument only if the request is lost, and no owner has taken it since.
COMPLETE: Final = Script(f"""{_NOW}
local s, t, r, u, l = unpack(redis.call('HMGET', KEYS[1], 's', 't', 'r', 'u', 'l'))
if s == '1' and t == ARGV[1] and (ARGV[5] == '0' or over(u, l)) then
    {_THOUGH_FULL}
    redis.call('HSET', KEYS[1], 's', ARGV[2], 'r', ARGV[3])
    redis.call('HDEL', KEYS[1], 'o', 'u', 'l', 'a', 'b', 'n')
    redis.call('PEXPIRE', KEYS[1], ARGV[4])
    return 1
end
return (s == ARGV[2] and r == ARGV[3]) and 1 or 0
""")
# By its token, or by the call that claimed it, if its answer was lost. If a former owner was lost, that is kept, with
# its time.
RELEASE: Final = Script(f"""
local s, t, o, a = unpack(redis.call('HMGET', KEYS[1], 's', 't', 'o', 'a'))
if s == '1' and (t == ARGV[1] or o == ARGV[1]) then
    if a then
        {_THOUGH_FULL}
        redis.call('HSET', KEYS[1], 'u', 0, 'o', '')
        if ARGV[2] ~= '' then
            redis.call('HSET', KEYS[1], 'b', ARGV[2])
        end
    else
        redis.call('DEL', KEYS[1])
    end
end
return 0
""")
# As if its lease had ended.
LEAVE: Final = Script(f"""
local s, t = unpack(redis.call('HMGET', KEYS[1], 's', 't'))
if s == '1' and t == ARGV[1] then
    {_THOUGH_FULL}
    redis.call('HSET', KEYS[1], 'u', 0, 'a', 1)
end
return 0
""")
# Other types of values with such a name are copies, or not ours.
LOST: Final = Script(f"""{_NOW}
if redis.call('TYPE', KEYS[1]).ok ~= 'hash' then
    return false
end
local s, t, u, l, b, n = unpack(redis.call('HMGET', KEYS[1], 's', 't', 'u', 'l', 'b', 'n'))
if s == '1' and over(u, l) then
    return {{tonumber(t), tonumber(b), n}}
end
return false
""")
RELEASE_LOST: Final = Script(f"""{_NOW}
local s, t, u, l = unpack(redis.call('HMGET', KEYS[1], 's', 't', 'u', 'l'))
if s == '1' and t == ARGV[1] and over(u, l) then
    return redis.call('DEL', KEYS[1])
end
return 0
""")
READ: Final = Script("return redis.call('HMGET', KEYS[1], 's', 'f', 'c', 'r')")
# A copy of what Postgres has committed, or the mark of a request that is querying it now (H33).
LOOK: Final = Script("""
local found = redis.call('GET', KEYS[1])
if not found then
    redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
end
return found
""")
UNMARK: Final = Script("""
if redis.call('GET', KEYS[1]) == ARGV[1] then
    redis.call('DEL', KEYS[1])
end
return 0
""")
KEEP: Final = Script("return redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])")
FORGET: Final = Script("return redis.call('DEL', KEYS[1])")


class NotReplicated(StoreUnavailable):
    """The value was written, but fewer replicas than required have confirmed it in time."""


class Scripts:
    """Runs the scripts. With `replicas` a write counts once that many replicas have it."""

    def __init__(self, redises: Redises, *, replicas: int = 0) -> None:
        self._client = redises.client
        self._replicas = replicas
        self._turns = asyncio.Semaphore(_MOST)

    async def run(self, script: Script, key: bytes, *args: object, writes: bool = False) -> Any:
        """The script's answer. Runs to its end, within a time limit, even when the caller is cancelled. Raises
        StoreUnavailable: then it may have run."""
        return await uninterrupted(self._run(script, name_of(key), args, writes and self._replicas > 0))

    async def keys(self) -> set[bytes]:
        """All keys whose value may be ours; each server is asked in pieces. Raises StoreUnavailable."""
        with in_doubt():
            names = [name async for name in self._client.scan_iter(match=_PREFIX + b"*", count=_PIECE)]
        return {key for name in names if (key := key_of(name)) is not None}

    async def _run(self, script: Script, name: bytes, args: Sequence[object], wait: bool) -> Any:
        with in_doubt():
            async with self._turns:
                try:
                    return await self._send(wait, "EVALSHA", script.digest, 1, name, *args)
                except NoScriptError:  # a restart, a failover or SCRIPT FLUSH: this loads it too
                    return await self._send(wait, "EVAL", script.text, 1, name, *args)

    async def _send(self, wait: bool, *command: Any) -> Any:
        if not wait:
            return await self._client.execute_command(*command)
        # On one connection, since WAIT covers only the writes of its own.
        async with self._client.pipeline(transaction=False) as pipeline:
            pipeline.execute_command(*command)
            pipeline.execute_command("WAIT", self._replicas, _PATIENCE)
            answer, confirmed = await pipeline.execute(raise_on_error=False)
        if isinstance(answer, Exception):
            raise answer
        if isinstance(confirmed, Exception) or confirmed < self._replicas:
            raise NotReplicated(f"Redis: {confirmed} replicas of {self._replicas} have confirmed a write in time")
        return answer


@contextmanager
def in_doubt() -> Iterator[None]:
    """An error of the client, of any type, is no answer of Redis (H52). Raises StoreUnavailable instead."""
    try:
        yield
    except IdemConsumerError:
        raise
    except BaseException as error:
        if ends_this_task(error):
            raise
        raise StoreUnavailable(f"Redis: {type(error).__name__}: {error_text(error)}") from error


def name_of(key: bytes) -> bytes:
    """The name in Redis. One key of ours is one key of Redis, so each script stays in one slot of a cluster."""
    return _PREFIX + key.hex().encode()


def key_of(name: bytes) -> bytes | None:
    """The key that has this name in Redis; None if it is not a name of ours."""
    try:
        return bytes.fromhex(name.removeprefix(_PREFIX).decode())
    except ValueError:
        return None
