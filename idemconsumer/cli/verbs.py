"""The frame of every verb: its words, and a function from the typed values to an Output, which is printed here.

A function that prompts a person, or reads a file that may be a terminal, must not be a coroutine: in an event loop
Ctrl-C would not interrupt it.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from inspect import iscoroutine
from types import SimpleNamespace
from typing import Any, TypeAlias

import click
import msgspec

from idemconsumer.cli.flags import Words, as_json, database, together
from idemconsumer.errors import ConfigurationError
from idemconsumer.process.child import Exit
from idemconsumer.settings import Settings, load


class Given(SimpleNamespace):
    """The typed values, by the names of their parameters."""

    @cached_property
    def settings(self) -> Settings:
        """The settings, with those that are among the parameters."""
        return load(**{name: value for name, value in vars(self).items() if name in Settings.__struct_fields__})

    @property
    def database(self) -> tuple[str, str]:
        """The address and the schema, as everything in `admin` takes them. Without an address, a ConfigurationError
        that says what to write."""
        return need_dsn(self.settings), self.settings.schema


@dataclass(frozen=True, slots=True)
class Output:
    """The output of a verb: `json` with --json; else `text` on stdout and `notes` on stderr. `warnings` go to stderr in
    any case. `code` is the exit code of the process."""

    json: object = None
    text: str | Iterable[str] = ()
    notes: Sequence[str] = ()
    warnings: Sequence[str] = ()
    code: Exit = Exit.DONE


Act: TypeAlias = Callable[[Given], Awaitable[Output | None] | Output | None]


class Verbs(click.Group):
    """A group of verbs about one subject."""

    def verb(self, name: str, *words: Words, ends: Words | None = None) -> Callable[[Act], click.Command]:
        """See `verb`."""

        def made(act: Act) -> click.Command:
            command = verb(name, *words, ends=ends)(act)
            self.add_command(command)
            return command

        return made


def verb(name: str, *words: Words, ends: Words | None = None) -> Callable[[Act], click.Command]:
    """A command with these arguments and options, in this order. Last come `ends`, or --dsn, --schema and --json unless
    given. A function that has printed everything itself returns None."""

    def made(act: Act) -> click.Command:
        def command(**given: Any) -> None:
            typed = Given(**given)
            answer = act(typed)
            if iscoroutine(answer):
                answer = asyncio.run(answer)
            if isinstance(answer, Output):
                _print(answer, as_json=getattr(typed, "as_json", False))

        return click.command(name, help=act.__doc__)(together(*words, ends or together(database, as_json))(command))

    return made


def _print(answer: Output, *, as_json: bool) -> None:
    if as_json:
        print_json(answer.json)
    else:
        for line in [answer.text] if isinstance(answer.text, str) else answer.text:
            click.echo(line)
    for line in (*(() if as_json else answer.notes), *answer.warnings):
        click.echo(line, err=True)
    if answer.code is not Exit.DONE:
        sys.exit(answer.code)


def print_json(value: object) -> None:
    """One JSON document on stdout."""
    click.echo(msgspec.json.encode(value).decode())


def need_dsn(settings: Settings) -> str:
    """The database's address. Without one, a ConfigurationError that says how to give it."""
    if settings.dsn is None:
        raise ConfigurationError(
            "no database is given; set IDEMCONSUMER_DSN, or write --dsn postgresql://user@host:5432/name"
        )
    return settings.dsn
