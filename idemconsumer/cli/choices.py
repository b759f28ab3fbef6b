"""What is chosen by options, and what is said where that is nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import click

from idemconsumer.admin.dead_letters import unknown_handler
from idemconsumer.cli.verbs import Given, Output, listed, printable
from idemconsumer.handlers.durations import parse_duration
from idemconsumer.process.child import Exit


def seconds(duration: str | None) -> float | None:
    """One that may be left out."""
    return None if duration is None else parse_duration(duration)


def need_choice(given: Given, options: Sequence[str], such_as: str) -> None:
    """Something has to be chosen: by ids, by options of which all hold, or all there is."""
    named = [f"--{name.replace('_', '-')}" for name in options if getattr(given, name) is not None]
    if given.everything and (given.ids or named):
        raise click.UsageError(f"--all takes no {named[0] if named else 'ids'}; leave out one of them")
    if not (given.everything or given.ids or named):
        raise click.UsageError(f"give ids, or options such as {such_as}, or --all")


async def need_found(given: Given, options: Sequence[str], found: int, what: str) -> None:
    """Exit 1 where something was chosen and nothing is there: a script that misspells a handler has to learn of it."""
    ids = set(getattr(given, "ids", ()))
    if found and (missing := len(ids) - found) > 0:
        click.echo(f"left: {missing} of these ids; no {what} that this applies to has them", err=True)
    if found or not (ids or any(getattr(given, name) is not None for name in options)):
        return
    click.echo(f"no {what} is chosen by this", err=True)
    for line in await unknown(given):
        click.echo(line, err=True)
    raise click.exceptions.Exit(Exit.ERROR)


async def unknown(given: Given) -> list[str]:
    """Which names there are, where nothing is stored under that of the handler."""
    if (handler := getattr(given, "handler", None)) is None:
        return []
    text = await unknown_handler(*given.database, handler)
    return [] if text is None else [printable(text)]


def need_key(given: Given, lists: str) -> None:
    """It is chosen in one of two ways."""
    text = given.handler is None and given.key is None
    if (given.prefix is None) == text or (given.handler is None) != (given.key is None):
        raise click.UsageError(f"give KEY (the first digits, as `{lists}` shows them) or --handler NAME --key TEXT")


async def listing(
    given: Given, found: Sequence[object], columns: str, rows: Iterable[Iterable[object]], none: str, *, more: str = ""
) -> Output:
    """Of a list, with what may be wrong where it is empty, and how it goes on behind its last one if it has `more`."""
    notes = [] if found or given.as_json else await unknown(given)
    if more and len(found) == given.limit:
        notes.append(f"there may be more: {more.format(found[-1])}")
    return Output(found, listed(columns, rows, none), notes)
