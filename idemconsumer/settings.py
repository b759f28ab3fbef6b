"""Settings: flags over IDEMCONSUMER_* variables over [tool.idemconsumer] in pyproject.toml over defaults."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from idemconsumer.errors import ConfigurationError

PREFIX = "IDEMCONSUMER_"


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that can be set from outside. Each field `x_y` is the variable IDEMCONSUMER_X_Y.

    Times are seconds, sizes bytes. `dsn`, `kafka` and `rabbitmq` have no default: a worker that needs one and has none
    says so at its start.
    """

    dsn: str | None = None
    schema: str = "idemconsumer"

    kafka: str | None = None
    kafka_security_protocol: str = "PLAINTEXT"
    kafka_sasl_mechanism: str = "PLAIN"
    kafka_sasl_username: str | None = None
    kafka_sasl_password: str | None = None
    kafka_ca_file: str | None = None
    kafka_cert_file: str | None = None
    kafka_key_file: str | None = None
    kafka_group_instance_id: str | None = None
    kafka_session_timeout: float = 45.0

    rabbitmq: str | None = None
    rabbitmq_management: str | None = None
    rabbitmq_ca_file: str | None = None
    rabbitmq_cert_file: str | None = None
    rabbitmq_key_file: str | None = None

    workers: int = 1
    concurrency: int = 8
    handlers: str | None = None
    drain_timeout: float = 20.0
    max_restarts: int = 10
    until_empty: bool = False
    log_format: str = "auto"
    log_level: str = "info"
    log_keys: bool = False

    room: int = 1_000
    max_uncommitted: int = 10_000
    max_message_bytes: int = 4 * 1024 * 1024
    prune_every: float = 60.0

    def __post_init__(self) -> None:
        for name in ("workers", "concurrency", "room", "max_uncommitted", "max_message_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be at least 1")


def load(environ: Mapping[str, str] | None = None, directory: Path | None = None, **flags: Any) -> Settings:
    """Merge all layers. A flag that is None is not given. Raises ConfigurationError naming the variable or file."""
    environ = os.environ if environ is None else environ
    values: dict[str, Any] = _pyproject((directory or Path.cwd()) / "pyproject.toml")
    for name in Settings.__struct_fields__:
        if (value := environ.get(PREFIX + name.upper())) is not None and value != "":
            values[name] = value
    values.update({name: value for name, value in flags.items() if value is not None})
    try:
        return msgspec.convert(values, Settings, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigurationError(
            f"settings: {error}; each setting is a variable {PREFIX}NAME, a flag, or a line in [tool.idemconsumer]"
        ) from None


def _pyproject(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text("utf-8")
    except OSError:
        return {}
    try:
        table = tomllib.loads(text).get("tool", {}).get("idemconsumer", {})
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"settings: {path} is not valid TOML: {error}") from None
    return {str(name).replace("-", "_"): value for name, value in table.items()}
