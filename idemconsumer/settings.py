"""Settings: flags over IDEMCONSUMER_* variables over [tool.idemconsumer] in pyproject.toml over defaults."""

from __future__ import annotations

import difflib
import math
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from idemconsumer.addresses import check_dsn, kafka_hosts, listening_at, rabbitmq_urls, read_url, redis_urls
from idemconsumer.errors import ConfigurationError
from idemconsumer.hashing import HASHING

PREFIX = "IDEMCONSUMER_"
FORMATS: Final = ("auto", "json", "console")
LEVELS: Final = ("debug", "info", "warning", "error")

# Variables of ours that are not settings: set for workers by their parent, or used by the demo or the tests.
_INTERNAL: Final = {"WORKER", "LIFELINE", "CHANNEL", "DEV", "DEMO_PAUSE", "TEST_CACHE", "TEST_DSN"}
# Kubernetes and Docker put these into every container when a service is named idemconsumer or idemconsumer-….
_OF_A_SERVICE: Final = re.compile(r"(.*_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_\w+)?)")
_LEAST: Final = {
    "workers": 1, "concurrency": 1, "max_message_bytes": 1, "max_bytes_in_hand": 1, "redis_replicas": 0,
}  # fmt: skip
_MOST: Final = {"kafka_session_timeout": 1_000_000, "drain_timeout": 1_000_000}  # Kafka counts milliseconds in 32 bits
_ABOVE_ZERO: Final = ("drain_timeout", "prune_every", "kafka_session_timeout")
_CHOICES: Final = {
    "log_format": FORMATS,
    "log_level": LEVELS,
    "kafka_auto_offset_reset": ("earliest", "latest"),
    "redis_outage": ("closed", "open"),
}
_ADDRESSES: Final[Mapping[str, Callable[[Any, str], object]]] = {
    "dsn": check_dsn, "listen_dsn": check_dsn, "kafka": kafka_hosts, "rabbitmq": rabbitmq_urls,
    "rabbitmq_management": partial(read_url, example="http(s)://user:password@host:15672"),
    "sqs": partial(read_url, example="http(s)://host:port, or leave it out for AWS"),
    "kafka_oauth_token_url": partial(read_url, example="https://host/path, and the secret into another setting"),
    "ops_port": listening_at, "redis": redis_urls,
}  # fmt: skip
_BOOLEANS: Final = dict.fromkeys(("true", "yes", "on", "1"), True) | dict.fromkeys(("false", "no", "off", "0"), False)


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that can be set from outside. Each field `x_y` is the variable IDEMCONSUMER_X_Y.

    Times are seconds, sizes bytes; `delivery_log` is a duration with its unit. Raises ConfigurationError for a value
    out of its range.

    * `dsn`: the Postgres that holds both the records and your data. A worker without it refuses to start.
    * `listen_dsn`: the server's own address, if `dsn` leads to a pooler. With it, workers are notified of messages in
      Postgres queues instead of polling.
    * `schema`: the schema of idemconsumer's tables.
    * `require_synchronous_standby`: refuse to run, and to commit, unless COMMIT waits for a synchronous standby.
    * `key_secrets`: `new[,old]`, each of at least 32 characters. Keys and fingerprints are hashed with them, so that a
      reader of the database cannot guess keys.
    * `kafka`: the brokers, `host:9092[,host:9092]`.
    * `kafka_security_protocol`: `PLAINTEXT`, `SSL`, `SASL_PLAINTEXT` or `SASL_SSL`.
    * `kafka_sasl_mechanism`: `PLAIN`, `SCRAM-SHA-256`, `SCRAM-SHA-512`, `OAUTHBEARER` or `AWS_MSK_IAM`. The last one
      needs `pip install 'idemconsumer[msk]'`, and region and credentials as for SQS.
    * `kafka_sasl_username`: the user; for `OAUTHBEARER` the id of the client.
    * `kafka_sasl_password`: the password; for `OAUTHBEARER` the secret of the client.
    * `kafka_oauth_token_url`: for `OAUTHBEARER`, the OAuth server that gives tokens for client credentials.
    * `kafka_oauth_scope`: for `OAUTHBEARER`, the scope to request for the token.
    * `kafka_ca_file`: a PEM file with the trusted authorities. Python 3.13 and newer accepts an authority only if its
      certificate has a key usage extension. A renewed file is read before the next connection.
    * `kafka_cert_file`: a PEM file with the client's certificate.
    * `kafka_key_file`: a PEM file with the key of that certificate.
    * `kafka_group_instance_id`: static membership, with which a rolling restart causes no rebalance. Each program needs
      its own: if two live programs have the same one, the one that joined first stops.
    * `kafka_session_timeout`: how long Kafka waits for a dead worker before its partitions go to others.
    * `kafka_auto_offset_reset`: where a group without offsets begins: `earliest` or `latest`.
    * `rabbitmq`: the servers, `amqp(s)://user:password@host[:5672][,host…]/vhost`.
    * `rabbitmq_management`: `http://user:password@host:15672`, for `check` to read queue limits.
    * `sqs`: an endpoint to use instead of AWS, such as `http://localhost:9324`. Region (unless an ARN or a URL names
      it) and credentials come from the usual `AWS_…` variables, profile or role.
    * `redis`: the Redis in which HTTP requests are kept, or to which they are copied: `redis://user:password@host:6379/0`,
      `sentinel://user:password@host:26379[,host:26379]/service/0` or `cluster://user:password@host:6379[,host:6379]`;
      `rediss`, `sentinels` and `clusters` for TLS.
    * `redis_replicas`: how many replicas of Redis must confirm a claim or a response before it counts; not with a
      cluster.
    * `redis_outage`: what happens to requests kept in Redis while Redis is down. `closed` answers them with 503; `open`
      runs them without a claim, and their responses have `Idempotent-Unclaimed: true`.
    * `workers`: the number of worker processes.
    * `concurrency`: how many messages or groups each handler runs at a time in one process. A handler's own
      `concurrency` comes first.
    * `handlers`: run only these handlers, separated by commas. Without it all handlers of the app run.
    * `build`: the version of the code, such as a git sha. A saga that one build cannot continue goes to another.
      Without it, a hash of the source of the handlers' packages is used.
    * `drain_timeout`: the time to finish runs in progress after a request to stop.
    * `until_empty`: exit when every source is empty.
    * `log_format`: `json`, `console`, or `auto`: `console` on a terminal, else `json`.
    * `log_level`: `debug`, `info`, `warning` or `error`.
    * `log_error_text`: no: the log has the types and places of errors, but not their texts.
    * `ops_port`: `[HOST:]PORT` where the launcher serves metrics and probes. Without it they are not served.
    * `tracing`: trace messages with OpenTelemetry.
    * `max_message_bytes`: larger messages (body, headers and record key together) become dead letters unparsed.
    * `max_bytes_in_hand`: how many bytes of messages one process may hold, of all sources together.
    * `prune_every`: the time between two pruning passes, of all workers of the schema together.
    * `delivery_log`: how long the outcome of each delivery is kept, such as `1d`. Without it none is kept.
    """

    dsn: str | None = None
    listen_dsn: str | None = None
    schema: str = "idemconsumer"

    require_synchronous_standby: bool = False
    key_secrets: str | None = None

    kafka: str | None = None
    kafka_security_protocol: str = "PLAINTEXT"
    kafka_sasl_mechanism: str = "PLAIN"
    kafka_sasl_username: str | None = None
    kafka_sasl_password: str | None = None
    kafka_oauth_token_url: str | None = None
    kafka_oauth_scope: str | None = None
    kafka_ca_file: str | None = None
    kafka_cert_file: str | None = None
    kafka_key_file: str | None = None
    kafka_group_instance_id: str | None = None
    kafka_session_timeout: float = 45.0
    kafka_auto_offset_reset: str = "earliest"

    rabbitmq: str | None = None
    rabbitmq_management: str | None = None

    sqs: str | None = None

    redis: str | None = None
    redis_replicas: int = 0
    redis_outage: str = "closed"

    workers: int = 1
    concurrency: int = 8
    handlers: str | None = None
    build: str | None = None
    drain_timeout: float = 20.0
    until_empty: bool = False
    log_format: str = "auto"
    log_level: str = "info"
    log_error_text: bool = True
    ops_port: int | str | None = None
    tracing: bool = False

    max_message_bytes: int = 4 * 1024 * 1024
    max_bytes_in_hand: int = 64 * 1024 * 1024
    prune_every: float = 60.0
    delivery_log: str | None = None

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            _check(f"settings: `{name}`", name, getattr(self, name))


def load(environ: Mapping[str, str] | None = None, directory: Path | None = None, **flags: Any) -> Settings:
    """Merge all layers. A flag that is None and an empty variable count as not given.

    Raises ConfigurationError for a value that is not allowed, and for a name that looks like a misspelt setting. The
    text names the flag, variable or line.
    """
    environ = os.environ if environ is None else environ
    path = (directory or Path.cwd()) / "pyproject.toml"
    given = {name: (f"`{name}` of [tool.idemconsumer] in {path}", value) for name, value in _pyproject(path).items()}
    for variable, value in environ.items():
        if variable.startswith(PREFIX) and value != "" and _is_setting(variable, value):
            given[variable.removeprefix(PREFIX).lower()] = variable, value
    for name, value in flags.items():
        if value is not None:
            given[name] = f"--{name.replace('_', '-')}", value
    settings = Settings(**{name: _read(label, name, value) for name, (label, value) in given.items()})
    HASHING.obey(settings.key_secrets)
    return settings


def log_format(flag: str | None, environ: Mapping[str, str] | None = None, directory: Path | None = None) -> str:
    """The requested log format, even if other settings cannot be read; `auto` if this one cannot be read itself."""
    environ = os.environ if environ is None else environ
    given: object = flag or environ.get(f"{PREFIX}LOG_FORMAT")
    if not given:
        with suppress(ConfigurationError):
            given = _table((directory or Path.cwd()) / "pyproject.toml").get("log_format")
    return given.lower() if isinstance(given, str) and given.lower() in FORMATS else "auto"


def _is_setting(variable: str, value: str) -> bool:
    """Whether a variable is meant as a setting. Variables of a Kubernetes service are not: a service named
    idemconsumer-ops has an IDEMCONSUMER_OPS_PORT."""
    name = variable.removeprefix(PREFIX)
    of_a_service = _OF_A_SERVICE.fullmatch(name) is not None
    if of_a_service and value.startswith(("tcp://", "udp://")):
        return False
    if name == name.upper() and name.lower() in Settings.__struct_fields__:
        return True
    near = None if name in _INTERNAL or of_a_service else _nearest(name.lower())
    if near is not None:
        raise ConfigurationError(f"there is no setting {variable}; did you mean {PREFIX}{near.upper()}?")
    return False


def _nearest(name: str) -> str | None:
    return next(iter(difflib.get_close_matches(name, Settings.__struct_fields__, n=1)), None)


def _table(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text("utf-8")
    except OSError:
        return {}
    try:
        table = tomllib.loads(text).get("tool", {}).get("idemconsumer", {})
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"settings: {path} is not valid TOML: {error}") from None
    return {str(name).replace("-", "_"): value for name, value in table.items()}


def _pyproject(path: Path) -> dict[str, Any]:
    named = _table(path)
    for name in named:
        if name not in Settings.__struct_fields__:
            near = _nearest(name)
            hint = f"did you mean `{near}`?" if near else "docs/reference/settings.md lists all settings"
            raise ConfigurationError(f"there is no setting `{name}`, in [tool.idemconsumer] of {path}; {hint}")
    return named


def _read(label: str, name: str, value: Any) -> Any:
    """The value, converted to the type of its field."""
    kind = _KINDS[name]
    if isinstance(value, str):
        if name in _CHOICES:
            value = value.lower()
        if kind is bool:
            value = _BOOLEANS.get(value.lower(), value)
    try:
        value = msgspec.convert(value, kind, strict=False)
    except msgspec.ValidationError:
        raise ConfigurationError(f"{label}: {_quoted(name, value)}write {_allowed(name)}") from None
    _check(label, name, value)
    return value


def _check(label: str, name: str, value: Any) -> None:
    if name in _ADDRESSES and value is not None:
        _ADDRESSES[name](value, label)
    if (
        (name in _LEAST and value < _LEAST[name])
        or (name in _MOST and value > _MOST[name])
        or (name in _ABOVE_ZERO and not 0 < value < math.inf)
        or (name in _CHOICES and value not in _CHOICES[name])
    ):
        raise ConfigurationError(f"{label}: {_quoted(name, value)}write {_allowed(name)}")


def _allowed(name: str) -> str:
    if name in _LEAST:
        return f"a whole number of at least {_LEAST[name]}"
    if name in _ABOVE_ZERO:
        return "a number of seconds above 0" + (f", at most {_MOST[name]}" if name in _MOST else "")
    if name in _CHOICES:
        return f"one of {', '.join(_CHOICES[name])}"
    return "yes or no (true, false, on, off, 1, 0)" if _KINDS[name] is bool else "a string"


def _quoted(name: str, value: Any) -> str:
    """The start of an error, with the value as written. The value of a free text field is left out, since it may be an
    address or a password."""
    return "" if _KINDS[name] not in (bool, int, float) and name not in _CHOICES else f"{value!r} is not allowed; "


_KINDS: Final = {field.name: field.type for field in msgspec.structs.fields(Settings)}
