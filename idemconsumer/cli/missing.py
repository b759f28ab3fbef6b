"""What is said of an import that fails: what, from where, and what to install. A restart would not help."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Mapping
from typing import Final

from idemconsumer.errors import ConfigurationError
from idemconsumer.redaction import error_text

_EXTRAS: Final[Mapping[str, str]] = {
    "aio_pika": "rabbitmq", "aiobotocore": "sqs", "aiokafka": "kafka", "prometheus_client": "metrics",
    "sqlalchemy": "sqlalchemy", "uvloop": "speed",
}  # fmt: skip


def cannot_import(what: str, error: ImportError, where: str | None = None) -> ConfigurationError:
    """`where`: the place in the code; that of the import that failed unless given."""
    if where is None:
        frames = [each for each in traceback.extract_tb(error.__traceback__) if not each.filename.startswith("<")]
        where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "while importing it"
    name = error.name or ""
    if not isinstance(error, ModuleNotFoundError) or not name:
        return ConfigurationError(f"{what} cannot be imported: {type(error).__name__}: {error_text(error)} ({where})")
    extra = _EXTRAS.get(name.partition(".")[0])
    install = "install the package that has it" if extra is None else f"pip install 'idemconsumer[{extra}]'"
    return ConfigurationError(
        f"{what} cannot be imported: there is no module {name!r} ({where}); {install}, for {sys.executable}"
    )
