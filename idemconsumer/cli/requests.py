"""`requests`: what processes that are gone have left of HTTP requests in leased mode, and what is decided about it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar

import click

from idemconsumer.admin.audit import user
from idemconsumer.cli.banner import table
from idemconsumer.cli.letters import time_of
from idemconsumer.cli.options import as_json, database, deciding, need_dsn, print_json, printable
from idemconsumer.errors import ConfigurationError, Denied
from idemconsumer.http.lost import LostRequests
from idemconsumer.http.messages import Response
from idemconsumer.ports.requests import LostRequest, RequestStore
from idemconsumer.settings import load
from idemconsumer.stores.checks import check_database
from idemconsumer.stores.pool import Pool
from idemconsumer.stores.requests import PostgresRequests

F = TypeVar("F", bound=Callable[..., Any])
Decide = Callable[[LostRequests, LostRequest], Awaitable[bool]]

_SHORT: Final = 12  # digits of a key that a person reads
_LONGEST: Final = 30.0  # seconds; nothing runs here


def _of_a_store(command: F) -> F:
    text = 'Where the keys are: the database, also with store="hybrid", or the Redis of the setting `redis`.'
    kinds = click.Choice(["postgres", "redis"])
    option = click.option("--store", type=kinds, default="postgres", show_default=True, help=text)
    return as_json(option(database(command)))


@click.group()
def requests() -> None:
    """HTTP requests whose process was killed between their effect and their stored response."""


@requests.command("list")
@click.option("--app", metavar="NAME", help="Only those of this app.")
@click.option(
    "--limit", type=click.IntRange(1, 1_000_000), default=50, metavar="N", help="List at most N.  [default: 50]"
)
@_of_a_store
def requests_list(app: str | None, limit: int, as_json: bool, **flags: Any) -> None:
    """List requests whose owner was lost, oldest first. With Redis, this reads all of its keys."""

    async def read() -> list[LostRequest]:
        async with _opened(flags, reads=True) as store:
            return await LostRequests(store, app=app, by=user()).all()

    found = asyncio.run(read())
    if as_json:
        print_json(found[:limit])
        return
    rows: list[tuple[str, ...]] = [("key", "app", "tenant", "route", "since")]
    for each in found[:limit]:
        names = map(printable, (each.app, "-" if each.tenant is None else each.tenant, each.route))
        rows.append((each.key[:_SHORT], *names, time_of(each.since)))
    click.echo(table(rows) if found else "no lost requests")
    if len(found) > limit:
        click.echo(f"{len(found) - limit} more: --limit {len(found)}", err=True)


@requests.command("settle")
@click.argument("key")
@click.option("--status", type=click.IntRange(200, 499), required=True, help="The status of the answer.")
@click.option("--body", default="", metavar="TEXT", help="Its body; @FILE reads it from a file.")
@click.option("--content-type", default="application/json", show_default=True, help="The type of the body.")
@click.option("--header", "headers", multiple=True, metavar="NAME:VALUE", help="A further header; can be repeated.")
@deciding
@_of_a_store
def requests_settle(
    key: str,
    status: int,
    body: str,
    content_type: str,
    headers: tuple[str, ...],
    by: str,
    as_json: bool,
    **flags: Any,
) -> None:
    """Store the answer to a request that was done; when it is sent again, it gets that answer.

    KEY is its first digits, as `requests list` shows them.
    """
    response = Response(status, (*_headers(headers, content_type if body else ""),), _bytes(body))

    async def settle(lost: LostRequests, request: LostRequest) -> bool:
        return await lost.settle(request, response)

    _decide(key, settle, flags, by, as_json, "settled", f"a repetition gets {status}")


@requests.command("release")
@click.argument("key")
@deciding
@_of_a_store
def requests_release(key: str, by: str, as_json: bool, **flags: Any) -> None:
    """Release a request that was not done: its key is new, and it runs when it is sent again.

    KEY is its first digits, as `requests list` shows them.
    """
    _decide(key, LostRequests.release, flags, by, as_json, "released", "it runs when it is sent again")


def _decide(key: str, act: Decide, flags: dict[str, Any], by: str, as_json: bool, what: str, so: str) -> None:
    async def decide() -> LostRequest:
        async with _opened(flags) as store:
            lost = LostRequests(store, by=by)
            request = _one(await lost.all(), key)
            if not await act(lost, request):
                raise ConfigurationError(
                    f"key {request.key[:_SHORT]} is not {what}: it was sent again meanwhile; check again with "
                    "`idemconsumer requests list`"
                )
            return request

    request = asyncio.run(decide())
    if as_json:
        print_json({"key": request.key, what: True})
    else:
        click.echo(f"{what}: {request.key[:_SHORT]}, {printable(request.route)}; {so}")


def _one(lost: list[LostRequest], digits: str) -> LostRequest:
    found = [each for each in lost if each.key.startswith(digits.lower())]
    if not found:
        raise ConfigurationError(
            f"no lost request has a key that begins with {digits!r}; `idemconsumer requests list` shows them"
        )
    if len(found) > 1:
        several = ", ".join(each.key[:16] for each in found[:5])
        raise ConfigurationError(f"{digits!r} matches several keys: {several}…; write more digits")
    return found[0]


def _headers(given: tuple[str, ...], content_type: str) -> list[tuple[str, str]]:
    headers = [("content-type", content_type)] if content_type else []
    for each in given:
        name, colon, value = each.partition(":")
        if not colon or not name.strip():
            raise click.UsageError(f'{each!r} is not a header; write --header "Location: /orders/1"')
        headers.append((name.strip(), value.strip()))
    return headers


def _bytes(body: str) -> bytes:
    if not body.startswith("@"):
        return body.encode()
    try:
        with open(body[1:], "rb") as file:
            return file.read()
    except OSError as error:
        raise click.UsageError(f"{body[1:]!r} cannot be read: {error.strerror}") from None


@asynccontextmanager
async def _opened(flags: dict[str, Any], *, reads: bool = False) -> AsyncIterator[RequestStore]:
    settings = load(dsn=flags["dsn"], schema=flags["schema"])
    if flags["store"] == "redis":
        from idemconsumer.stores.redis.requests import RedisRequests  # an optional driver

        if settings.redis is None:
            raise ConfigurationError("no Redis is given; set IDEMCONSUMER_REDIS")
        redis = RedisRequests(settings.redis, replicas=settings.redis_replicas)
        try:
            yield redis
        finally:
            await redis.close()
        return
    dsn = need_dsn(settings)
    try:
        await check_database(dsn, settings.schema, longest_run=_LONGEST, kind="front-door")  # as who serves them
    except Denied as denied:
        if not (reads and denied.reads):  # O35
            raise
    pool = Pool(dsn, settings.schema, connections=1, longest_run=_LONGEST)
    await pool.open()
    try:
        yield PostgresRequests.on(pool, dsn, settings.schema)
    finally:
        await pool.close()
