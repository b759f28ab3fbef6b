"""Parsing of server addresses. The error for a wrong address never quotes its password."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from idemconsumer.errors import ConfigurationError

_REFUSED: Final = ("invalid ", "could not match ", "weak sslmode")  # libpq gives texts and no error codes
# libpq accepts every address of this form. Only for other addresses is psycopg imported to ask libpq: that import would
# be most of what a launcher has to load before it starts a worker (P10).
_WORD: Final = r"(?:[\w.~-]|%(?!00)[0-7][0-9A-Fa-f])+"
_HOST: Final = r"[\w-]{1,63}(?:\.[\w-]{1,63})*(?::(?:[1-9][0-9]{0,3}|[1-5][0-9]{4}))?"
_TLS: Final = rf"sslmode=(?:disable|allow|prefer|require|verify-ca|verify-full)(?:&sslrootcert=(?:/{_WORD})+)?"
_PLAIN_DSN: Final = re.compile(rf"postgres(?:ql)?://(?:{_WORD}(?::{_WORD})?@)?{_HOST}/{_WORD}(?:\?{_TLS})?", re.ASCII)
_LISTENING: Final = re.compile(r"(?:(?P<host>\[[0-9A-Fa-f:.]+\]|[\w.-]+):)?(?P<port>[0-9]{1,5})")
_OF_RABBITMQ: Final[Mapping[str, tuple[str, Callable[[str], object]]]] = {  # parameters that the RabbitMQ client obeys
    "heartbeat": (
        "a number of seconds below 65535",
        lambda text: re.fullmatch("[0-9]{1,5}", text) and int(text) < 65_535,
    ),
    "auth": ("plain or external", lambda text: text.lower() in ("plain", "external")),
    "no_verify_ssl": ("0 or 1", lambda text: text in ("0", "1")),
    **dict.fromkeys(("cafile", "certfile", "keyfile"), ("a path", bool)),
}
_ENCODED: Final = "with @ : / ? # in a user or password percent-encoded, as %40 %3A %2F %3F %23"


def rabbitmq_urls(text: str, label: str = "settings: `rabbitmq`") -> list[SplitResult]:
    """One URL for each host of `amqp://user:password@host:5672[,host:5672]/vhost`. Raises as `read_url` does."""
    urls = _each_host(
        text, label, ("amqp", "amqps"), "amqp://user:password@host:5672[,host:5672]/vhost, or amqps:// for TLS"
    )
    _check_vhost(urls[0], label)
    _check_parameters(urls[0], label)
    return urls


def rabbitmq_parameters(url: SplitResult) -> dict[str, str]:
    """The query parameters of one URL from `rabbitmq_urls`."""
    return dict(parse_qsl(url.query))


def _check_vhost(url: SplitResult, label: str) -> None:
    path = url.path[1:]
    try:
        usable = len(unquote(path, errors="strict").encode()) <= 255
    except UnicodeError:
        usable = False
    if not usable or re.search("%(?![0-9A-Fa-f]{2})", path) or url.fragment:
        instead = "write a name of at most 255 bytes, with % / ? # percent-encoded, as %25 %2F %3F %23"
        raise ConfigurationError(f"{label}: the vhost is not one; {instead}")


def _check_parameters(url: SplitResult, label: str) -> None:
    """Refuse bad parameters: the client replaces a value that it cannot read by another, and ignores unknown names."""
    given = parse_qsl(url.query, keep_blank_values=True)
    names = [name for name, _ in given]
    for name, value in given:
        if name not in _OF_RABBITMQ:
            known = ", ".join(_OF_RABBITMQ)
            raise ConfigurationError(f"{label}: there is no parameter {name!r}; write one of {known}, or none")
        what, fits = _OF_RABBITMQ[name]
        if not fits(value) or names.count(name) > 1:
            raise ConfigurationError(f"{label}: the parameter `{name}` cannot be used; write {what}, once")


def _each_host(text: str, label: str, schemes: Collection[str], example: str) -> list[SplitResult]:
    """The parts of `scheme://user:password@host[,host]/path`, once for each host."""
    before, slashes, rest = text.partition("://")
    end = min(index for index in (*map(rest.find, "/?#"), len(rest)) if index >= 0)
    user, at, hosts = rest[:end].rpartition("@")
    return [
        read_url(f"{before}{slashes}{user}{at}{host}{rest[end:]}", label, example, schemes) for host in hosts.split(",")
    ]


def redis_urls(text: str, label: str = "settings: `redis`") -> list[SplitResult]:
    """One URL for each host. Several hosts are the Sentinels, or some nodes of a cluster. Raises as `read_url` does."""
    example = (
        "redis://user:password@host:6379/0, sentinel://user:password@host:26379[,host:26379]/service/0 or "
        "cluster://user:password@host:6379[,host:6379], with rediss, sentinels or clusters for TLS"
    )
    urls = _each_host(text, label, ("redis", "rediss", "sentinel", "sentinels", "cluster", "clusters"), example)
    several = len(urls) > 1
    watched = urls[0].scheme.startswith("sentinel")
    if (several and urls[0].scheme.startswith("redis")) or (watched and not urls[0].path.strip("/")):
        raise ConfigurationError(f"{label} is not an address; write {example}, {_ENCODED}")
    return urls


def is_cluster(text: str) -> bool:
    """Whether this is the address of a Redis cluster."""
    return text.startswith("cluster")


def kafka_hosts(text: str, label: str = "settings: `kafka`") -> list[str]:
    """The hosts of `host:port[,host:port]`. Raises as `read_url` does."""
    hosts = [_host(address.strip()) for address in text.split(",")]
    if not all(hosts):
        instead = "write host:9092[,host:9092], and credentials into IDEMCONSUMER_KAFKA_SASL_USERNAME and _PASSWORD"
        raise ConfigurationError(f"{label} is not a list of addresses; {instead}")
    return hosts


def listening_at(given: int | str, label: str = "settings: `ops_port`") -> tuple[str, int]:
    """Host and port of `[HOST:]PORT`. Without a host: every address of this machine. Raises ConfigurationError."""
    found = _LISTENING.fullmatch(str(given))
    if found is None or not 0 < int(found["port"]) < 65_536:
        raise ConfigurationError(f"{label} is not a port; write one such as 9100, or HOST:PORT")
    return (found["host"] or "0.0.0.0").strip("[]"), int(found["port"])


def read_url(text: str, label: str, example: str, schemes: Collection[str] = ("http", "https")) -> SplitResult:
    """The parts of a URL. For a text that is not a URL, raises ConfigurationError, which names the setting and quotes
    nothing.

    An unencoded / ? or # in a password ends the authority, so part of the password is parsed as the port or the path.
    An @ after that point shows that this has happened.
    """
    try:
        parts = urlsplit(text)
        readable = parts.scheme in schemes and _is_name(parts.hostname or "") and parts.port != 0
    except ValueError:
        readable = False
    if not readable or "@" in parts.path + parts.query + parts.fragment:
        raise ConfigurationError(f"{label} is not an address; write {example}, {_ENCODED}")
    return parts


def check_dsn(dsn: str, label: str = "the database address") -> None:
    """Raise ConfigurationError for a text that is not the address of a database.

    Neither the text nor the driver's message about it is quoted: both may hold a password.
    """
    if _PLAIN_DSN.fullmatch(dsn) and not any(name.startswith("PG") for name in os.environ):
        return
    import psycopg
    from psycopg.conninfo import conninfo_to_dict

    instead = f"write postgresql://user:password@host:5432/database, {_ENCODED}"
    try:
        parts = conninfo_to_dict(dsn)
    except (psycopg.Error, UnicodeError):
        raise ConfigurationError(f"{label} cannot be parsed; {instead}") from None
    # With such characters in a password, libpq parses part of it as host, port or database, and quotes that part if it
    # cannot connect.
    ports = str(parts.get("port") or "").split(",")
    hosts = str(parts.get("host") or "").split(",")
    path = dsn.partition("://")[2].partition("?")[0].partition("/")[2]
    readable = all(not host or host.startswith("/") or ("@" not in host and _is_name(host)) for host in hosts)
    if not readable or not all(port.isdecimal() or not port for port in ports) or "@" in path:
        raise ConfigurationError(f"{label} has an invalid host, port or database; {instead}")
    if problem := _refused_by_libpq(parts):
        raise ConfigurationError(f"{label}: {problem}; {instead}")


def _refused_by_libpq(given: dict[str, Any]) -> str:
    """How libpq refuses a value before it connects, without quoting the value. No server is contacted: the address
    leads to a socket path that does not exist."""
    from psycopg import pq
    from psycopg.conninfo import make_conninfo

    defaults = {each.keyword.decode(): each.val.decode() for each in pq.Conninfo.get_defaults() if each.val}
    known = defaults | given
    if "service" in known:  # the service file may name hosts and ports that are unknown here
        return ""
    hosts = str(known.get("hostaddr") or known.get("host") or "").count(",") + 1
    nowhere = {"host": ",".join(["/nobody"] * hosts), "hostaddr": ""}
    trial = pq.PGconn.connect_start(make_conninfo(**(given | nowhere)).encode())
    said = trial.get_error_message().partition("\n")[0]
    trial.finish()
    return re.sub(r": \".*", "", said) if said.startswith(_REFUSED) else ""


def is_local(host: str | None) -> bool:
    """Whether data sent to that host stays on this machine. None and a path are Unix sockets."""
    if not host or host.startswith(("/", "@")) or host == "localhost":
        return True
    import ipaddress

    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _host(address: str) -> str:
    """The host of `host[:port]`; empty for anything else."""
    import ipaddress

    try:
        return str(ipaddress.IPv6Address(address))
    except ValueError:
        pass
    try:
        parts = urlsplit(f"//{address}")
        plain = parts.netloc == address and "@" not in address and parts.port != 0
    except ValueError:
        return ""
    host = parts.hostname or ""
    return host if plain and _is_name(host) else ""


def _is_name(host: str) -> bool:
    """Whether a resolver can look up this name. For other texts it raises errors that no client expects."""
    try:
        return bool(host.encode("idna")) and host.isprintable() and " " not in host
    except UnicodeError:
        return False
