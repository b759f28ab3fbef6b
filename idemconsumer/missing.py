"""The error for a failed import: what failed, where, and what to install (R46). A restart would not help."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Mapping
from typing import Final

from idemconsumer.errors import ConfigurationError
from idemconsumer.redaction import error_text

_EXTRAS: Final[Mapping[str, str]] = {
    "aio_pika": "rabbitmq", "aiormq": "rabbitmq", "pamqp": "rabbitmq", "aiobotocore": "sqs", "botocore": "sqs",
    "aiokafka": "kafka", "cramjam": "kafka", "aws_msk_iam_sasl_signer": "msk", "redis": "redis",
    "sqlalchemy": "sqlalchemy", "greenlet": "sqlalchemy", "prometheus_client": "metrics", "rich": "top",
    "opentelemetry": "opentelemetry", "watchfiles": "demo", "uvloop": "speed",
}  # fmt: skip


def cannot_import(what: str, error: ImportError, where: str | None = None) -> ConfigurationError:
    """The error for an import that `what` needs. `where`: the place in the code; by default the place of the failed
    import.

    An installed package may itself lack a module, or need another package. The text then names that package, not
    `what`.
    """
    if where is None:
        frames = [each for each in traceback.extract_tb(error.__traceback__) if not each.filename.startswith("<")]
        where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "while importing it"
    name = error.name or ""
    if not isinstance(error, ModuleNotFoundError) or not name:
        return ConfigurationError(f"{what} cannot be imported: {type(error).__name__}: {error_text(error)} ({where})")
    package = name.partition(".")[0]
    extra = _EXTRAS.get(package)
    lacking = f"there is no module {name!r}"
    if name != package and sys.modules.get(package) is not None:
        lacking = f"the {package} that is installed has no module {name!r}"
    install = "install the package that has it" if extra is None else f"pip install 'idemconsumer[{extra}]'"
    return ConfigurationError(f"{what} cannot be imported: {lacking} ({where}); {install}, for {sys.executable}")
