"""The client certificates of this process: when they expire, and TLS that rereads renewed files (K27, Q13)."""

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

_ALERT: Final = re.compile(r"alert [a-z ]*(certificate|unknown ca)")  # TLS alerts of a server that refuses ours
SOON: Final = 14 * 86_400.0  # seconds; automatic renewal happens earlier than this before the expiry


class RenewedContext(ssl.SSLContext):
    """An SSL context from `make`, made anew before the next connection after one of `files` has changed.

    While the files cannot be used, such as between the writing of a key and of its certificate, the previous context
    stays in use. Open connections are not affected. `certificate`: the file with our certificate, if there is one.
    """

    certificate: str | None

    def __new__(cls, make: Callable[[], ssl.SSLContext], files: Sequence[str | None]) -> Self:
        return super().__new__(cls, ssl.PROTOCOL_TLS_CLIENT)

    def __init__(self, make: Callable[[], ssl.SSLContext], files: Sequence[str | None]) -> None:
        """`files`: the authority, our certificate, and its key. Raises what `make` raises."""
        self._make = make
        self._files = [file for file in files if file is not None]
        self.certificate = files[1]
        self._seen = self._changes()  # before they are read, to notice a change during the read
        self._made = make()
        self.check_hostname, self.verify_mode = self._made.check_hostname, self._made.verify_mode

    def wrap_bio(self, *arguments: Any, **more: Any) -> ssl.SSLObject:
        """Used by asyncio and uvloop."""
        return self._latest().wrap_bio(*arguments, **more)

    def wrap_socket(self, *arguments: Any, **more: Any) -> ssl.SSLSocket:
        """Used by urllib."""
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
    """When the first certificate in a PEM file expires, in seconds of the Unix epoch; None if it cannot be read."""
    try:
        return float(ssl.cert_time_to_seconds(str(_test_decode_cert(file)["notAfter"])))
    except (OSError, KeyError, ValueError):
        return None


def expired(file: str | None) -> str | None:
    """A message if the certificate has expired; None if it is still valid, or cannot be read."""
    until = None if file is None else expires_at(file)
    if until is None or until > time.time():
        return None
    return (
        f"our own certificate, {file}, expired on {_day(until)}; renew that file, and the next attempt to connect "
        "reads it"
    )


def whose(refusal: str, dsn: str) -> str | None:
    """Which certificate made libpq's connection fail, and what to do: libpq names neither the owner nor the file. None
    if the failure was not about a certificate."""
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
    """Each server, with the file of the certificate that this process presents to it."""
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
    """Where libpq finds our certificate: in the address, PGSSLCERT, a service file, or its default place; None if there
    is none. No server is contacted: the address leads to a socket path that does not exist."""
    try:
        trial = pq.PGconn.connect_start(make_conninfo(dsn, host="/nobody", hostaddr="", port="").encode())
    except psycopg.Error:
        return None  # reported where the address is used
    known = {option.keyword: (option.val or b"").decode() for option in trial.info}
    trial.finish()
    if "disable" in (known[b"sslmode"], known.get(b"sslcertmode")):
        return None
    default = os.path.expanduser("~/.postgresql/postgresql.crt")
    return known[b"sslcert"] or (default if os.path.exists(default) else None)


def days_left(file: str) -> tuple[float, str] | None:
    """How many days the certificate is still valid, and its last day; None if the file cannot be read."""
    until = expires_at(file)
    return None if until is None else ((until - time.time()) / 86_400, _day(until))


def _day(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M} UTC"
