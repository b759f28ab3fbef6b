"""Choosing things by ids and options, and the messages for a choice that matches nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

import click
from click import argument, option

from idemconsumer.admin.dead_letters import unknown_handler
from idemconsumer.cli.flags import ID, Words, flag, together
from idemconsumer.cli.layout import listed, printable
from idemconsumer.cli.verbs import Given, Output
from idemconsumer.handlers.durations import parse_duration
from idemconsumer.process.child import Exit

_DURATIONS = ("since", "until")


class Choice:
    """Chooses things of one kind: by ids, by options that must all match, or all of them."""

    def __init__(self, thing: str, such_as: str, *options: tuple[str, str | None, str]) -> None:
        """`options`: flags, metavar and help text of each; `such_as`: an example of one."""
        self.words: Words = together(*(option(*names.split(), metavar=of, help=text) for names, of, text in options))
        self._names = [names.split()[-1].removeprefix("--") for names, *_ in options]
        self._thing = thing
        self._such_as = such_as

    def with_ids(self, every: str) -> Words:
        """The arguments and options of a verb that acts on the chosen things."""
        everything = flag("--all", "everything", help=every)
        return together(argument("ids", metavar="[ID]…", type=ID, nargs=-1), self.words, everything)

    def given(self, given: Given) -> dict[str, Any]:
        """The values that were typed, durations in seconds."""
        typed = {name: getattr(given, name) for name in self._names}
        typed |= {name: seconds(typed[name]) for name in _DURATIONS if name in typed}
        return typed | {"ids": getattr(given, "ids", None) or None}

    def need(self, given: Given) -> None:
        """Refuse a command that chooses nothing."""
        named = [f"--{name}" for name in self._names if getattr(given, name) is not None]
        if given.everything and (given.ids or named):
            raise click.UsageError(f"--all takes no {named[0] if named else 'ids'}; leave out one of them")
        if not (given.everything or given.ids or named):
            raise click.UsageError(f"give ids, or options such as {self._such_as}, or --all")

    async def need_found(self, given: Given, found: int) -> None:
        """Exit 1 if ids or options were given and nothing matches: a script that misspells a handler must notice."""
        ids = set(getattr(given, "ids", ()))
        if found and (missing := len(ids) - found) > 0:
            click.echo(f"skipped {missing} of these ids: no matching {self._thing} has them", err=True)
        if found or not (ids or any(getattr(given, name) is not None for name in self._names)):
            return
        click.echo(f"no {self._thing} matches", err=True)
        for line in await _unknown(given):
            click.echo(line, err=True)
        raise click.exceptions.Exit(Exit.ERROR)

    def delete(self, given: Given, found: int, discard: Callable[[], Coroutine[Any, Any, int]]) -> int:
        """Delete the chosen things for good, or only count them. Returns how many are deleted, or would be."""
        if given.dry_run:
            return found
        if not given.yes and found:
            click.confirm(f"delete {found} {self._thing}s for good?", abort=True, err=True)
        return asyncio.run(discard())


def seconds(duration: str | None) -> float | None:
    """The seconds of an optional duration."""
    return None if duration is None else parse_duration(duration)


def need_key(given: Given, lists: str) -> None:
    """Require exactly one of the two ways to give a key."""
    text = given.handler is None and given.key is None
    if (given.prefix is None) == text or (given.handler is None) != (given.key is None):
        raise click.UsageError(f"give KEY (the first digits, as `{lists}` shows them) or --handler NAME --key TEXT")


async def listing(
    given: Given, found: Sequence[object], columns: str, rows: Iterable[Iterable[object]], none: str, *, more: str = ""
) -> Output:
    """The output of a list. If it is empty, a note says what may be wrong; if it is full and `more` is given, a note
    says how to continue after its last item."""
    notes = [] if found or given.as_json else await _unknown(given)
    if more and len(found) == given.limit:
        notes.append(f"there may be more: {more.format(found[-1])}")
    return Output(found, listed(columns, rows, none), notes)


async def _unknown(given: Given) -> list[str]:
    """If nothing is stored under the given handler's name: a note with the names that exist."""
    if (handler := getattr(given, "handler", None)) is None:
        return []
    text = await unknown_handler(*given.database, handler)
    return [] if text is None else [printable(text)]
