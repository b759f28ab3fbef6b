"""`requests`: HTTP requests in leased mode whose process is gone, and decisions about them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final

import click
from click import argument, option

from idemconsumer.admin.audit import user
from idemconsumer.admin.dead_letters import only
from idemconsumer.cli.flags import as_json, database, deciding, limit, together
from idemconsumer.cli.layout import listed, printable, short
from idemconsumer.cli.verbs import Given, Output, Verbs
from idemconsumer.errors import ConfigurationError, Denied
from idemconsumer.http.exchanged import Response
from idemconsumer.http.lost import LostRequests
from idemconsumer.ports.requests import LostRequest, RequestStore
from idemconsumer.stores.checks import check_database
from idemconsumer.stores.pool import Pool
from idemconsumer.stores.postgres_requests import PostgresRequests

Decide = Callable[[LostRequests, LostRequest], Awaitable[bool]]

_LONGEST: Final = 30.0  # seconds; nothing runs here
_of_a_store = together(
    as_json,
    option(
        "--store",
        type=click.Choice(["postgres", "redis"]),
        default="postgres",
        show_default=True,
        help='Where the keys are: the database, also with store="hybrid", or the Redis of the setting `redis`.',
    ),
    database,
)


requests = Verbs(
    "requests", help="HTTP requests whose process was killed between their effect and their stored response."
)


@requests.verb("list", option("--app", metavar="NAME", help="Only those of this app."), limit, ends=_of_a_store)
async def requests_list(given: Given) -> Output:
    """List requests whose owner was lost, oldest first. With Redis, this reads all of its keys."""
    async with _opened(given, reads=True) as store:
        found = await LostRequests(store, app=given.app, by=user()).all()
    shown = found[: given.limit]
    rows = ((short(each.key), each.app, each.tenant, each.route, each.since) for each in shown)
    more = len(found) - given.limit
    notes = [f"{more} more: --limit {len(found)}"] if more > 0 else []
    return Output(shown, listed("key, app, tenant, route, since", rows, "no lost requests"), notes)


@requests.verb(
    "settle",
    argument("key"),
    option("--status", type=click.IntRange(200, 499), required=True, help="The status of the answer."),
    option("--body", default="", metavar="TEXT", help="Its body; @FILE reads it from a file."),
    option("--content-type", default="application/json", show_default=True, help="The type of the body."),
    option("--header", "headers", multiple=True, metavar="NAME:VALUE", help="A further header; can be repeated."),
    deciding,
    ends=_of_a_store,
)
def requests_settle(given: Given) -> Output:
    """Store the answer to a request that was done; when it is sent again, it gets that answer.

    KEY is the first digits of the key, as `requests list` shows them.
    """
    headers = [("content-type", given.content_type)] if given.body and given.content_type else []
    response = Response(given.status, (*headers, *map(_header, given.headers)), _bytes(given.body))

    async def settle(lost: LostRequests, request: LostRequest) -> bool:
        return await lost.settle(request, response)

    return asyncio.run(_decide(given, settle, "settled", f"a repetition gets {given.status}"))


@requests.verb("release", argument("key"), deciding, ends=_of_a_store)
async def requests_release(given: Given) -> Output:
    """Release a request that was not done: its key is new, and it runs when it is sent again.

    KEY is the first digits of the key, as `requests list` shows them.
    """
    return await _decide(given, LostRequests.release, "released", "it runs when it is sent again")


async def _decide(given: Given, act: Decide, what: str, so: str) -> Output:
    async with _opened(given) as store:
        lost = LostRequests(store, by=given.by)
        request = _one(await lost.all(), given.key)
        if not await act(lost, request):
            raise ConfigurationError(
                f"key {short(request.key)} is not {what}: it was sent again meanwhile; check again with "
                "`idemconsumer requests list`"
            )
    said = f"{what}: {short(request.key)}, {printable(request.route)}; {so}"
    return Output({"key": request.key, what: True}, said)


def _one(lost: list[LostRequest], digits: str) -> LostRequest:
    found = {bytes.fromhex(each.key): each for each in lost if each.key.startswith(digits.lower())}
    if not found:
        raise ConfigurationError(
            f"no lost request has a key that begins with {digits!r}; `idemconsumer requests list` shows them"
        )
    return found[only([*found][:5], f"{digits!r}")]


def _header(given: str) -> tuple[str, str]:
    name, colon, value = given.partition(":")
    if not colon or not name.strip():
        raise click.UsageError(f'{given!r} is not a header; write --header "Location: /orders/1"')
    return name.strip(), value.strip()


def _bytes(body: str) -> bytes:
    if not body.startswith("@"):
        return body.encode()
    try:
        with open(body[1:], "rb") as file:
            return file.read()
    except OSError as error:
        raise click.UsageError(f"{body[1:]!r} cannot be read: {error.strerror}") from None


@asynccontextmanager
async def _opened(given: Given, *, reads: bool = False) -> AsyncIterator[RequestStore]:
    settings = given.settings
    if given.store == "redis":
        from idemconsumer.stores.redis.redis_requests import RedisRequests  # an optional driver

        if settings.redis is None:
            raise ConfigurationError("no Redis is given; set IDEMCONSUMER_REDIS")
        redis = RedisRequests(settings.redis, replicas=settings.redis_replicas)
        try:
            yield redis
        finally:
            await redis.close()
        return
    dsn, schema = given.database
    try:
        await check_database(dsn, schema, longest_run=_LONGEST, kind="front-door")  # like a process that serves them
    except Denied as denied:
        if not (reads and denied.reads):  # O35
            raise
    pool = Pool(dsn, schema, connections=1, longest_run=_LONGEST)
    await pool.open()
    try:
        yield PostgresRequests.on(pool, dsn, schema)
    finally:
        await pool.close()
