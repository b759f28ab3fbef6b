"""The Redis record of a request whose key is kept there (H17)."""

from __future__ import annotations

import msgspec

from idemconsumer.admin.stored_keys import KeyDetail
from idemconsumer.errors import NothingFound
from idemconsumer.rules.coming_again import coming_again
from idemconsumer.rules.values import Record, State
from idemconsumer.settings import load


async def record_in_redis(key: bytes) -> tuple[Record, bool] | None:
    """The record, and whether its owner was lost, from the Redis of the settings; None without a record or without
    Redis. Raises StoreUnavailable."""
    if (address := load().redis) is None:
        return None
    from idemconsumer.stores.redis.redis_requests import RedisRequests  # an optional driver

    requests = RedisRequests(address)
    try:
        if (record := await requests.peek(key)) is None:
            return None
        lost = await requests.lost() if record.state is State.PROCESSING else []
        return record, any(each.key == key.hex() for each in lost)
    finally:
        await requests.close()


async def is_in_redis(key: bytes) -> bool:
    return await record_in_redis(key) is not None


async def explained(detail: KeyDetail) -> KeyDetail:
    """The detail, completed from Redis if the database has no record."""
    if detail.state is not None or (found := await record_in_redis(bytes.fromhex(detail.key))) is None:
        return detail
    record, lost = found
    result, runs = record.result, record.state is State.PROCESSING
    return msgspec.structs.replace(
        detail,
        store="redis",
        state=record.state.name.lower(),
        result=None if result is None else result.body.decode("utf-8", "backslashreplace"),
        next=coming_again(
            record.state, compared=bool(record.fingerprint), over=False, letter=None, lost=lost if runs else None
        ),
    )


async def refuse_to_forget(key: bytes) -> None:
    """Raises NothingFound for a key that only Redis has."""
    if await is_in_redis(key):
        raise NothingFound(
            f"key {key.hex()[:12]} is not forgotten: it is in Redis; once its request has ended, "
            f"run DEL idemconsumer:{key.hex()} there"
        )
