"""The command line: one module a group of verbs; errors that a person can act on are one line, never a traceback."""

from __future__ import annotations

import os
import sys
from typing import Any, NoReturn

import click
import psycopg

from idemconsumer.cli.demo import demo
from idemconsumer.cli.inspect import check
from idemconsumer.cli.messages import dead, prune, publish
from idemconsumer.cli.run import dev, run
from idemconsumer.cli.sagas import sagas
from idemconsumer.cli.schema import migrate
from idemconsumer.errors import ConfigurationError, IdemConsumerError
from idemconsumer.process.child import MEANINGS, WORKER, Exit
from idemconsumer.redaction import error_text

VERBS: tuple[click.Command, ...] = (demo, run, dev, check, migrate, publish, dead, sagas, prune)

_EPILOG = (
    "\b\nExit codes:\n"
    + "\n".join(f"  {code.value}  {text}" for code, text in MEANINGS.items())
    + "\n\nA setting is an option (--dsn), an environment variable (IDEMCONSUMER_DSN) or a line in [tool.idemconsumer] "
    "of pyproject.toml. An option overrides a variable, and a variable overrides a line."
)


class _Root(click.Group):
    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ConfigurationError as error:
            _fail(error, Exit.USAGE)
        except (IdemConsumerError, psycopg.Error) as error:
            _fail(error, Exit.ERROR)


def _fail(error: Exception, code: Exit) -> NoReturn:
    # Of several workers that cannot start only the first one reports: they all fail alike.
    if os.environ.get(WORKER, "0") == "0":
        click.echo(f"error: {error_text(error)}", err=True)
    sys.exit(code)


@click.group(cls=_Root, epilog=_EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="idemconsumer", message="%(prog)s %(version)s")
def main() -> None:
    """Process every message once, even when it arrives twice."""


for _verb in VERBS:
    main.add_command(_verb)
