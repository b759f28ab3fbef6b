"""The command line: one module a group of verbs; errors that a person can act on are one line, never a traceback."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Any, Final, NoReturn

import click

from idemconsumer.cli.missing import cannot_import
from idemconsumer.errors import ConfigurationError, IdemConsumerError, Replaced
from idemconsumer.process.child import MEANINGS, WORKER, Exit
from idemconsumer.redaction import error_text

# Their homes. One is imported when it is used: the launcher of a worker waits for nothing that only others need.
VERBS: Final[Mapping[str, str]] = {
    "demo": "demo",
    "run": "run",
    "dev": "run",
    "check": "inspect",
    "migrate": "schema",
    "publish": "messages",
    "dead": "dead",
    "keys": "keys",
    "explain": "keys",
    "skip": "skip",
    "sagas": "sagas",
    "prune": "messages",
}

_EPILOG = (
    "\b\nExit codes:\n"
    + "\n".join(f"  {code.value}  {text}" for code, text in MEANINGS.items())
    + "\n\nA setting is an option (--dsn), an environment variable (IDEMCONSUMER_DSN) or a line in [tool.idemconsumer] "
    "of pyproject.toml. An option overrides a variable, and a variable overrides a line."
)


class _Root(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        verb = getattr(import_module(f"idemconsumer.cli.{VERBS[cmd_name]}"), cmd_name)
        assert isinstance(verb, click.Command)
        return verb

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ConfigurationError as error:
            _fail(error, Exit.USAGE)
        except IdemConsumerError as error:
            _fail(error, Exit.ERROR)
        except ImportError as error:
            _fail(cannot_import("what idemconsumer needs", error), Exit.USAGE)
        except Exception as error:
            import psycopg

            if not isinstance(error, psycopg.Error):
                raise
            _fail(error, Exit.ERROR)


def _fail(error: Exception, code: Exit) -> NoReturn:
    # Of several workers that cannot start only the first one reports: they all fail alike.
    if os.environ.get(WORKER, "0") == "0" or isinstance(error, Replaced):
        click.echo(f"error: {error_text(error)}", err=True)
    sys.exit(code)


@click.group(cls=_Root, epilog=_EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="idemconsumer", message="%(prog)s %(version)s")
def main() -> None:
    """Process every message once, even when it arrives twice."""
