"""Our own certificates: until when they are valid, and TLS that reads them again once they were renewed (K27, Q13)."""

from __future__ import annotations

import os
import re
import ssl
import time
from _ssl import _test_decode_cert  # type: ignore[attr-defined]  # the library has no other way to read one
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, Final, Self
from urllib.parse import parse_qsl

import psycopg
from psycopg import pq
from psycopg.conninfo import make_conninfo

from idemconsumer.addresses import rabbitmq_parameters, rabbitmq_urls, redis_urls
from idemconsumer.errors import ConfigurationError
from idemconsumer.settings import Settings

_ALERT: Final = re.compile(r"alert [a-z ]*(certificate|unknown ca)")  # what the other side says of ours
SOON: Final = 14 * 86_400.0  # seconds: who renews by a program does so before


class RenewedContext(ssl.SSLContext):
    """What `make` returns; made anew before a connection once one of `files` has changed.

    While they cannot be used, as between the writing of a key and of its certificate, the former one goes on. What is
    connected already stays so. `certificate`: the file with ours, if there is one.
    """

    certificate: str | None

    def __new__(cls, make: Callable[[], ssl.SSLContext], files: Sequence[str | None]) -> Self:
        return super().__new__(cls, ssl.PROTOCOL_TLS_CLIENT)

    def __init__(self, make: Callable[[], ssl.SSLContext], files: Sequence[str | None]) -> None:
        """`files`: of the authority, of the certificate, and of its key. Raises what `make` does."""
        self._make = make
        self._files = [file for file in files if file is not None]
        self.certificate = files[1]
        self._seen = self._changes()  # before they are read: what changes meanwhile is read again
        self._made = make()
        self.check_hostname, self.verify_mode = self._made.check_hostname, self._made.verify_mode

    def wrap_bio(self, *arguments: Any, **more: Any) -> ssl.SSLObject:
        """As asyncio and uvloop connect."""
        return self._latest().wrap_bio(*arguments, **more)

    def wrap_socket(self, *arguments: Any, **more: Any) -> ssl.SSLSocket:
        """As urllib does."""
        return self._latest().wrap_socket(*arguments, **more)

    def _latest(self) -> ssl.SSLContext:
        try:
            if (changes := self._changes()) != self._seen:
                self._made, self._seen = self._make(), changes
        except (OSError, ValueError, ConfigurationError):
            pass  # tried again before the next connection
        return self._made

    def _changes(self) -> list[tuple[int, int, int]]:
        found = [os.stat(file) for file in self._files if os.path.exists(file)]
        return [(each.st_ino, each.st_mtime_ns, each.st_size) for each in found]


def expires_at(file: str) -> float | None:
    """When the first certificate in a PEM file expires, as seconds of the epoch; None if it cannot be read."""
    try:
        return float(ssl.cert_time_to_seconds(str(_test_decode_cert(file)["notAfter"])))
    except (OSError, KeyError, ValueError):
        return None


def expired(file: str | None) -> str | None:
    """That it has, in words; None for one that is valid."""
    until = None if file is None else expires_at(file)
    if until is None or until > time.time():
        return None
    return (
        f"our own certificate, {file}, expired on {_day(until)}; renew that file, and the next attempt to connect "
        "reads it"
    )


def whose(refusal: str, dsn: str) -> str | None:
    """Which certificate it is about, and what to do, where libpq could not connect: it says neither whose it is nor
    which file. None where it is about none."""
    if "certificate verify failed" in refusal:
        return (
            "the server's certificate is not accepted: renew it if it has expired, or set sslrootcert to the authority "
            "that signed it"
        )
    if not _ALERT.search(refusal):
        return None
    if (file := _of_libpq(dsn)) is None:
        return "the server requires a client certificate; set sslcert and sslkey"
    return expired(file) or f"the server refuses our own certificate, {file}; have it signed by an authority it trusts"


def ours(settings: Settings) -> Iterator[tuple[str, str]]:
    """The server, and the file with the certificate that we show it."""
    if settings.kafka_cert_file is not None:
        yield "kafka", settings.kafka_cert_file
    if settings.rabbitmq is not None:
        parameters = rabbitmq_parameters(rabbitmq_urls(settings.rabbitmq)[0])
        if (file := parameters.get("certfile")) is not None:
            yield "rabbitmq", file
    if settings.redis is not None:
        query = dict(parse_qsl(redis_urls(settings.redis)[0].query))
        if (file := query.get("ssl_certfile")) is not None:
            yield "redis", file
    of_postgres = None if settings.dsn is None else _of_libpq(settings.dsn)
    if of_postgres is not None:
        yield "postgres", of_postgres
    listening = None if settings.listen_dsn is None else _of_libpq(settings.listen_dsn)
    if listening not in (None, of_postgres):
        yield "postgres-listen", listening


def _of_libpq(dsn: str) -> str | None:
    """Where libpq finds our certificate: in the address, PGSSLCERT, a service file, or its default place, if there is
    one. Nobody listens where this leads, so no server is asked."""
    try:
        trial = pq.PGconn.connect_start(make_conninfo(dsn, host="/nobody", hostaddr="", port="").encode())
    except psycopg.Error:
        return None  # said where it is used
    known = {option.keyword: (option.val or b"").decode() for option in trial.info}
    trial.finish()
    if "disable" in (known[b"sslmode"], known.get(b"sslcertmode")):
        return None
    default = os.path.expanduser("~/.postgresql/postgresql.crt")
    return known[b"sslcert"] or (default if os.path.exists(default) else None)


def days_left(file: str) -> tuple[float, str] | None:
    """How many, and until which day; None if that cannot be read."""
    until = expires_at(file)
    return None if until is None else ((until - time.time()) / 86_400, _day(until))


def _day(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M} UTC"
