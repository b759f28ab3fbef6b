"""Arguments and options that several verbs share, and their types."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Final, TypeAlias

import click
from click import argument, option

Words: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]

_MOST: Final = 2**63 - 1
ID: Final = click.IntRange(1, _MOST)  # the id of a row


class Finite(click.FloatRange):
    """A number that must be finite: Python parses "nan" and "inf" as floats, and no bound excludes "nan"."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number; write one such as 50", param, ctx)
        return number


def together(*words: Words) -> Words:
    """Several words as one, in this order."""

    def applied(command: Callable[..., Any]) -> Callable[..., Any]:
        for word in reversed(words):
            command = word(command)
        return command

    return applied


def count(name: str, text: str, default: int, *, least: int = 1, most: int | None = 1_000_000) -> Words:
    """An option for a number of things."""
    bounds = click.IntRange(least, most)
    return option(name, type=bounds, default=default, metavar="N", help=f"{text}  [default: {default}]")


def behind(name: str, least: int) -> Words:
    """An option for the id after which a list continues."""
    text = "Continue after this id; the last line of the previous output names it."
    return option(name, type=click.IntRange(least, _MOST), metavar="ID", help=text)


def _who(_context: click.Context, _option: click.Parameter, given: str | None) -> str:
    from idemconsumer.admin.audit import user  # imported here, because starting workers does not need it

    return given or user()


flag = partial(option, is_flag=True)
database = together(
    option(
        "--dsn",
        metavar="URL",
        help="The Postgres database: postgresql://user@host:5432/name. With a password, use IDEMCONSUMER_DSN: "
        "other users see options in ps.",
    ),
    option("--schema", help="The schema of idemconsumer's tables.  [default: idemconsumer]"),
)
as_json = flag("--json", "as_json", help="Print JSON.")
deciding = option(
    "--by", metavar="NAME", callback=_who, help="Who decided, for `audit`.  [default: your account and machine]"
)
limit = count("--limit", "List at most N.", 50)
number = argument("number", metavar="ID", type=ID)
unasked = flag("--yes", help="Do not ask.")
uncounted = flag("--dry-run", help="Only count; delete nothing.")
key = together(
    argument("prefix", metavar="[KEY]", required=False),
    option("--handler", help="With --key: the handler's name."),
    option("--key", help="With --handler: the key's text, before hashing."),
)
