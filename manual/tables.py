"""What is set and what is reported: options, settings, errors, log events, metrics, exit codes, commands."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, get_type_hints

import click
import msgspec
from prometheus_client import CollectorRegistry

import idemconsumer
from idemconsumer import errors
from idemconsumer.admin.hints import hint
from idemconsumer.cli.main import main
from idemconsumer.cli.run_verb import run
from idemconsumer.handlers.options import Options, UnnamedOptions
from idemconsumer.observe.database import Figures
from idemconsumer.observe.exposition import Numbers
from idemconsumer.observe.fleet import Fleet
from idemconsumer.observe.request_metrics import numbers_in
from idemconsumer.observe.texts import STORED
from idemconsumer.process.child import MEANINGS
from idemconsumer.rules.redriven import REASONS
from idemconsumer.settings import PREFIX, Settings
from manual.events import events
from manual.names import doc
from manual.texts import TEXTS

EVENTS: Final[Mapping[str, Mapping[str, str]]] = TEXTS["events"]
REASONS_SAY: Final[Mapping[str, str]] = TEXTS["reasons"]
_ENTRY: Final = re.compile(r"^\* ((?:`\w+`(?:, )?)+)(?: \(([\w ,]+)\))?: ", re.MULTILINE)


def entries(kind: type) -> dict[str, tuple[str, str]]:
    """What a docstring says of each name that it lists as `* `name`: text`, and of what alone that is."""
    parts = _ENTRY.split(doc(kind))[1:]
    return {
        name: (of or "", _sentence(" ".join(text.split())))
        for names, of, text in zip(parts[::3], parts[1::3], parts[2::3], strict=True)
        for name in re.findall(r"\w+", names)
    }


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def options() -> Iterator[str]:
    types = inspect.get_annotations(UnnamedOptions) | inspect.get_annotations(Options)
    for name, (of, text) in entries(Options).items():
        yield f"## `{name}`\n\n`{_typed(types[name])}`{f' · {of} only' if of else ''}\n\n{text}"


def _typed(annotation: object) -> str:
    return str(getattr(annotation, "__forward_arg__", annotation))


def settings() -> Iterator[str]:
    told, types = entries(Settings), get_type_hints(Settings)
    flags = {each.name: each.opts[0] for each in run.params if isinstance(each, click.Option)}
    for field in msgspec.structs.fields(Settings):
        flag = f" · `{flags[field.name]}`" if field.name in flags else ""
        default = "none" if field.default is None else f"`{_default(field.default)}`"
        facts = f"`{PREFIX}{field.name.upper()}`{flag} · {_kind(types[field.name])} · default: {default}"
        yield f"## `{field.name}`\n\n{facts}\n\n{told[field.name][1]}"


def _default(value: object) -> str:
    return (
        {True: "yes", False: "no"}[value]
        if isinstance(value, bool)
        else f"{value:g}"
        if isinstance(value, float)
        else str(value)
    )


def _kind(hint: Any) -> str:
    named = {str: "text", int: "number", float: "seconds", bool: "yes or no"}
    return " or ".join(named[each] for each in getattr(hint, "__args__", (hint,)) if each in named)


def raised() -> list[type[BaseException]]:
    """Every class of `idemconsumer.errors`, in its order."""
    return [each for each in vars(errors).values() if inspect.isclass(each) and issubclass(each, BaseException)]


def all_errors() -> Iterator[str]:
    own = [each for each in raised() if each.__name__ in idemconsumer.__all__]
    yield "## Errors to catch or to raise\n\nImport these from `idemconsumer`."
    yield from map(_error, own)
    yield (
        "## Errors in logs and dead letters\n\nThese are named in the `error` of a log event, of a dead letter or of "
        "an attempt. Code that calls idemconsumer catches their public base class instead."
    )
    yield from (_error(each) for each in raised() if each not in own)
    yield "## Reasons of dead letters"
    yield from (f"### `{each}`\n\n{REASONS_SAY[each]} {hint(each)}" for each in REASONS)


def _error(kind: type[BaseException]) -> str:
    return f"### `{kind.__name__}`\n\nA kind of `{kind.__bases__[0].__name__}`. {doc(kind)}"


def log_events() -> Iterator[str]:
    found = events()
    for subject, told in EVENTS.items():
        yield f"## {subject}"
        for text, meaning in told.items():
            event = found[text]
            fields = f" · {', '.join(f'`{each}`' for each in event.fields)}" if event.fields else ""
            yield f"### {_quoted(text)}\n\n*{' or '.join(sorted(event.levels))}*{fields}\n\n{meaning}"


def _quoted(text: str) -> str:
    return f"`` {text} ``" if "`" in text else f"`{text}`"


def metrics() -> Iterator[str]:
    for name, kind, labels, text in exported():
        facts = f"{kind} · labels: {', '.join(f'`{each}`' for each in labels) or 'none'}"
        yield f"## `{name}`\n\n{facts}\n\n{text}"


def exported() -> Iterator[tuple[str, str, tuple[str, ...], str]]:
    """Name, type, labels and text of each metric."""
    registry = CollectorRegistry()
    numbers_in(registry).expect("", "", [""])
    stored: Figures = {name: {} for name in STORED} | {"last_prune_timestamp_seconds": {(): 0.0}}
    for family in (*Numbers(Fleet(1), stored, {}, 0.0).collect(), *registry.collect()):
        labels = getattr(family, "_labelnames", None) or [name for name in family.samples[0].labels if name != "le"]
        yield (
            family.name + ("_total" if family.type == "counter" else ""),
            family.type,
            tuple(labels),
            family.documentation,
        )


def exit_codes() -> Iterator[str]:
    rows = (f"| `{code.value}` | {code.name} | {text} |" for code, text in MEANINGS.items())
    yield "\n".join(["| code | | |", "|---|---|---|", *rows])


def commands() -> Iterator[str]:
    for name, command in _commands(main, "idemconsumer"):
        context = click.Context(command, info_name=name, terminal_width=100, max_content_width=100)
        yield f"## `{name}`\n\n```text\n{command.get_help(context)}\n```"


def _commands(command: click.Command, name: str) -> Iterator[tuple[str, click.Command]]:
    yield name, command
    if isinstance(command, click.Group):
        context = click.Context(command, info_name=name)
        for each in command.list_commands(context):
            found = command.get_command(context, each)
            assert found is not None
            yield from _commands(found, f"{name} {each}")
