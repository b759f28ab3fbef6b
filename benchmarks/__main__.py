"""`python -m benchmarks [--quick] [PART…]`: run parts of the suite, keep their results as JSON, print the tables."""

from __future__ import annotations

import asyncio
import os
import platform
import subprocess
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import click
import msgspec

from benchmarks import (
    cuts,
    distance,
    end_to_end,
    first_message,
    front_door,
    kept_keys,
    latency,
    long_runs,
    long_sagas,
    neighbours,
    observing,
    old_snapshot,
    outbox,
    pruning,
    report,
    sagas,
    store_path,
    waking,
    workloads,
)
from benchmarks._child import ROOT
from benchmarks._measure import Result
from benchmarks._stage import Stage

Part = Callable[[Stage], Awaitable[Result]]

# With about how many minutes each takes on two idle cores.
PARTS: dict[str, tuple[Part, float]] = {
    "store_path": (store_path.store_path, 6),
    "distance": (distance.distance, 8),
    "hot_rows": (workloads.hot_rows, 10),
    "failures": (workloads.failures, 3),
    "latency": (latency.latency, 2),
    "kafka": (end_to_end.kafka, 8),
    "rabbitmq": (end_to_end.rabbitmq, 9),
    "postgres_queue": (end_to_end.postgres_queue, 5),
    "sqs": (end_to_end.sqs, 4),
    "first_message": (first_message.first_message, 2),
    "fairness": (neighbours.fairness, 5),
    "take_over": (neighbours.take_over, 4),
    "cuts": (cuts.cuts, 25),
    "http": (front_door.front_door, 3),
    "sagas": (sagas.sagas, 4),
    "long_sagas": (long_sagas.long_sagas, 4),
    "million": (long_runs.million, 3),
    "records": (long_runs.records, 15),
    "kept_keys": (kept_keys.kept_keys, 40),
    "pruning": (pruning.pruning, 6),
    "observing": (observing.observing, 7),
    "outbox": (outbox.outbox, 6),
    "old_snapshot": (old_snapshot.old_snapshot, 6),
    "waking": (waking.waking, 2),
}
QUICK = ["store_path", "kafka", "sagas"]
RESULTS = Path(__file__).parent / "results"
PACKAGES = [
    "psycopg",
    "uvloop",
    "aiokafka",
    "aio-pika",
    "aiobotocore",
    "faststream",
    "confluent-kafka",
    "asyncpg",
    "dbos",
    "pgqueuer",
    "procrastinate",
    "fastapi",
    "uvicorn",
    "asgi-idempotency-header",
    "idemkit",
]


def machine() -> str:
    cores = os.cpu_count()
    return f"{cores} cores, {platform.system()} {platform.machine()}, Python {platform.python_version()}"


def commit() -> str:
    """Ours, or its version where git cannot tell."""
    ask = ["git", "rev-parse", "--short", "HEAD"]
    with suppress(OSError, subprocess.CalledProcessError):
        return subprocess.run(ask, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()
    return metadata.version("idemconsumer")


def run(name: str, stage: Stage, where: str, versions: dict[str, str]) -> Result:
    began = time.monotonic()
    result = asyncio.run(_awaited(PARTS[name][0], stage))
    return msgspec.structs.replace(
        result,
        quick=stage.quick,
        seconds=round(time.monotonic() - began, 1),
        when=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        machine=where,
        versions={**versions, **stage.versions()},
    )


async def _awaited(part: Part, stage: Stage) -> Result:
    return await part(stage)


@click.command(help=__doc__)
@click.argument("parts", nargs=-1, metavar="[PART]…")
@click.option("--quick", is_flag=True, help="Small loads; without parts, the core of the suite in under two minutes.")
@click.option("--list", "listed", is_flag=True, help="Name the parts and about how many minutes they take.")
def main(parts: tuple[str, ...], quick: bool, listed: bool) -> None:
    if listed:
        for name, (_, minutes) in PARTS.items():
            click.echo(f"{name:>15}  {minutes:3g} min")
        return
    if unknown := [name for name in parts if name not in PARTS]:
        raise click.UsageError(f"there is no part {unknown[0]!r}; the parts are {', '.join(PARTS)}")
    folder = RESULTS / "quick" if quick else RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    failed = []
    load = os.getloadavg()[0]  # once: later it is our own
    where = f"{machine()}, load before {load:.1f}"
    versions = {"idemconsumer": commit(), **{name: metadata.version(name) for name in PACKAGES}}
    with Stage(quick=quick) as stage:
        if load > 0.5:
            stage.say(f"others use this machine (load {load:.1f}), so read the ratios and not the rates")
        for name in parts or (QUICK if quick else list(PARTS)):
            try:
                result = run(name, stage, where, versions)
            except Exception as error:  # noqa: BLE001 - the others of a long run are still worth having
                stage.say(f"{name} failed: {type(error).__name__}: {error}")
                failed.append(name)
                continue
            (folder / f"{name}.json").write_bytes(msgspec.json.format(msgspec.json.encode(result)) + b"\n")
            click.echo(report.text(result))
    if failed:
        raise click.ClickException(f"without a result: {', '.join(failed)}")


if __name__ == "__main__":
    main()
