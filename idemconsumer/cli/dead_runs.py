"""`dead runs`: what came of each `dead redrive`, and the way back from it."""

from __future__ import annotations

import asyncio
from typing import Any

import click

from idemconsumer.admin.redrives import Redrives
from idemconsumer.cli.banner import table
from idemconsumer.cli.letters import time_of
from idemconsumer.cli.options import as_json, database, deciding, need_dsn, print_json, printable
from idemconsumer.settings import load


@click.command("runs")
@click.option("--cancel", metavar="RUN", help="Turn this run's messages that have not begun back into dead letters.")
@click.option("--limit", type=click.IntRange(1), default=50, metavar="N", help="List at most N.  [default: 50]")
@deciding
@database
@as_json
def dead_runs(cancel: str | None, limit: int, by: str, as_json: bool, **flags: Any) -> None:
    """List the runs of `dead redrive`, or cancel one.

    The newest come first, with the results of their dead letters. After a cancel, messages that have begun come to
    their end, and resumed sagas go on. A command that is still redriving under this name ends.
    """
    settings = load(**flags)
    redrives = Redrives(need_dsn(settings), settings.schema)
    if cancel is not None:
        letters = asyncio.run(redrives.cancel(cancel, by=by))
        if as_json:
            print_json({"run": cancel, "cancelled": letters})
        else:
            click.echo(f"cancelled: {letters} dead letters")
        return
    runs = asyncio.run(redrives.runs(limit))
    if as_json:
        print_json(runs)
        return
    rows: list[tuple[str, ...]] = [("run", "began", "by", "letters", "came to")]
    for each in runs:
        came_to = ", ".join(f"{count} {outcome}" for outcome, count in sorted(each.outcomes.items()))
        name = f"{each.run} (cancelled)" if each.cancelled else each.run
        cells = (printable(name), time_of(each.began_at), printable(each.by), str(each.letters), came_to or "-")
        rows.append(cells)
    click.echo(table(rows) if runs else "no runs")
