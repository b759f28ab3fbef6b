"""Options that several verbs share, and how their values become settings."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, TypeVar

import click
import msgspec

from idemconsumer.errors import ConfigurationError
from idemconsumer.settings import Settings

ID: Final = click.IntRange(1, 2**63 - 1)  # of a row
ANY_ID: Final = click.IntRange(0, 2**63 - 1)  # or the place before the first one


class Finite(click.FloatRange):
    """Python reads "nan" and "inf" as numbers, and no bound refuses the first."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number; write one such as 50", param, ctx)
        return number


RATE: Final = Finite(0, min_open=True)  # in a second

F = TypeVar("F", bound=Callable[..., Any])


def database(command: F) -> F:
    """--dsn and --schema."""
    command = click.option("--schema", help="The schema of idemconsumer's tables.  [default: idemconsumer]")(command)
    text = "The Postgres database: postgresql://user@host:5432/name. With a password, use IDEMCONSUMER_DSN: "
    return click.option("--dsn", metavar="URL", help=f"{text}other users see options in ps.")(command)


def _who(_context: click.Context, _option: click.Parameter, given: str | None) -> str:
    from idemconsumer.admin.audit import user  # only here: who starts workers needs none of it

    return given or user()


deciding = click.option(
    "--by", metavar="NAME", callback=_who,
    help="Who decided, for `audit`.  [default: your account and machine]",
)  # fmt: skip
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def need_dsn(settings: Settings) -> str:
    """The database's address, or a ConfigurationError that says how to give it."""
    if settings.dsn is None:
        raise ConfigurationError(
            "no database is given; set IDEMCONSUMER_DSN, or write --dsn postgresql://user@host:5432/name"
        )
    return settings.dsn


def need_choice(ids: Collection[int], options: Mapping[str, object], *, everything: bool, such_as: str) -> None:
    """Something has to be chosen: by ids, by options of which all hold, or all there is."""
    given = [f"--{name.replace('_', '-')}" for name, value in options.items() if value is not None]
    if everything and (ids or given):
        raise click.UsageError(f"--all takes no {given[0] if given else 'ids'}; leave out one of them")
    if not (everything or ids or given):
        raise click.UsageError(f"give ids, or options such as {such_as}, or --all")


def say_left(ids: Collection[int], found: int, what: str) -> None:
    """On stderr, of how many of these ids nothing was found."""
    if found and (missing := len(set(ids)) - found) > 0:
        click.echo(f"left: {missing} of these ids; no {what} that this applies to has them", err=True)


def print_json(value: object) -> None:
    """One JSON document on stdout."""
    click.echo(msgspec.json.encode(value).decode())


def printable(text: str) -> str:
    """Text from elsewhere that cannot steer a terminal: what is not printable is escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "replace").decode() for c in text)
