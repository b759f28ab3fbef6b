"""Addresses of servers, read so that a mistake in one never quotes its password."""

from __future__ import annotations

import ipaddress
from collections.abc import Collection
from typing import Final
from urllib.parse import SplitResult, urlsplit

import psycopg
from psycopg.conninfo import conninfo_to_dict

from idemconsumer.errors import ConfigurationError

_ENCODED: Final = "with @ : / ? # in a user or password percent-encoded, as %40 %3A %2F %3F %23"


def read_url(text: str, setting: str, schemes: Collection[str], example: str) -> SplitResult:
    """The parts of a URL. ConfigurationError, naming the setting and quoting nothing, for a text that is not one.

    An unencoded / ? or # ends the authority, so that a part of a password is taken for the port or the path. An @
    behind it is the sign of that.
    """
    try:
        parts = urlsplit(text)
        readable = parts.scheme in schemes and bool(parts.hostname) and parts.port != 0
    except ValueError:
        readable = False
    if not readable or "@" in parts.path + parts.query + parts.fragment:
        raise ConfigurationError(f"settings: `{setting}` is not an address; write {example}, {_ENCODED}")
    return parts


def read_hosts(text: str, setting: str, instead: str) -> list[str]:
    """The hosts of `host:port[,host:port]`. Raises as `read_url` does."""
    hosts = [_host(address.strip()) for address in text.split(",")]
    if not all(hosts):
        raise ConfigurationError(f"settings: `{setting}` is not a list of addresses; {instead}")
    return hosts


def check_dsn(dsn: str, label: str = "the database address") -> None:
    """Raise ConfigurationError for a text that is not the address of a database.

    Neither the text nor the driver's message about it is quoted: both may hold a password.
    """
    instead = f"write postgresql://user:password@host:5432/database, {_ENCODED}"
    try:
        parts = conninfo_to_dict(dsn)
    except psycopg.Error:
        raise ConfigurationError(f"{label} cannot be parsed; {instead}") from None
    # libpq takes part of a password with such characters for host, port or database, and would quote it when it cannot
    # connect.
    ports = str(parts.get("port") or "").split(",")
    path = dsn.partition("://")[2].partition("?")[0].partition("/")[2]
    if "@" in str(parts.get("host") or "") or not all(port.isdecimal() or not port for port in ports) or "@" in path:
        raise ConfigurationError(f"{label} has an invalid host, port or database; {instead}")


def is_local(host: str | None) -> bool:
    """Whether what is sent to that host stays on this machine. None and a path are Unix sockets."""
    if not host or host.startswith(("/", "@")) or host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _host(address: str) -> str:
    """Of `host[:port]`; empty for anything else."""
    try:
        return str(ipaddress.IPv6Address(address))
    except ValueError:
        pass
    try:
        parts = urlsplit(f"//{address}")
        plain = parts.netloc == address and "@" not in address and parts.port != 0
    except ValueError:
        return ""
    return parts.hostname or "" if plain else ""
