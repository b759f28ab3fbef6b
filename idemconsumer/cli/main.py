"""The command line: one module per group of verbs. An error that a person can act on is one line, never a traceback."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module
from keyword import iskeyword
from typing import Any, Final

import click

from idemconsumer.cli.failures import in_one_line, remedy
from idemconsumer.errors import Denied
from idemconsumer.process.child import MEANINGS

# The module of each verb. A module is imported when its verb is used, so the launcher of a worker does not wait for
# imports that only other verbs need.
VERBS: Final[Mapping[str, str]] = {
    "demo": "demo",
    "run": "run_verb",
    "dev": "run_verb",
    "check": "inspect",
    "migrate": "schema",
    "publish": "message_verbs",
    "dead": "dead",
    "keys": "key_verbs",
    "explain": "key_verbs",
    "requests": "request_verbs",
    "outbox": "outbox_verbs",
    "skip": "message_verbs",
    "kafka": "message_verbs",
    "sagas": "saga_verbs",
    "status": "status_verb",
    "top": "top",
    "doctor": "doctor_verb",
    "workers": "control_verbs",
    "pause": "control_verbs",
    "resume": "control_verbs",
    "drain": "control_verbs",
    "audit": "control_verbs",
    "prune": "message_verbs",
}

_WORDS: Final = "idemconsumer.words"  # the words of the command line, in a context's `meta`

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
        name = f"{cmd_name}_" if iskeyword(cmd_name) else cmd_name
        verb = getattr(import_module(f"idemconsumer.cli.{VERBS[cmd_name]}"), name)
        assert isinstance(verb, click.Command)
        return verb

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if (odd := next((each for each in args if not _is_utf8(each)), None)) is not None:
            raise click.UsageError(f"{os.fsencode(odd)!r} is not UTF-8; `publish --file -` takes any bytes")
        if (odd := next((each for each in args if "\0" in each), None)) is not None:
            raise click.UsageError(f"{odd!r} contains a NUL, which is not allowed; leave it out")
        ctx.meta[_WORDS] = [*args, ""]
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        def say(text: str, error: Exception) -> None:
            if isinstance(error, Denied):
                verb, word, *_ = ctx.meta[_WORDS]
                command = f"{verb} {word}" if isinstance(self.get_command(ctx, verb), click.Group) else verb
                text += f"; {remedy(command)}"
            click.echo(f"error: {text}", err=True)

        with in_one_line(say):
            return super().invoke(ctx)


def _is_utf8(argument: str) -> bool:
    """Whether an argument is UTF-8. In others Python keeps lone surrogates, which cannot be stored or sent."""
    return not any("\ud800" <= character <= "\udfff" for character in argument)


@click.group(cls=_Root, epilog=_EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="idemconsumer", message="%(prog)s %(version)s")
def main() -> None:
    """Process every message once, even when it arrives twice."""
