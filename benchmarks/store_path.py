"""The store path: one insert of business data a message, with no broker, on four connections.

`bare` is the consumer that people write by hand without deduplication: psycopg, a transaction a message. `by hand` adds
the key to that transaction. `textbook` opens a connection a message and commits the claim first. `pgbench` runs the
per-message protocol from C.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import tempfile
from pathlib import Path

from benchmarks._crew import LANES, Crew, crew
from benchmarks._loads import Load
from benchmarks._measure import Result, Subject, Table, Target, side_by_side
from benchmarks._sizes import OURS
from benchmarks._stage import SCHEMA, Stage
from tests.servers.postgres import system_binaries

GROUPS = ["group 1", "group 32", "group 128", OURS]

# What the engine sends for a group of one message with one insert of business data, statement by statement.
_SCRIPT = f"""
\\set id random(1, 9000000000000000000)
begin isolation level read committed read write;
select set_config('idemconsumer.open', 'bench', true), set_config('lock_timeout', '10s', true);
insert into {SCHEMA}.record (key, scope_id, state, fingerprint, changed_at)
select sha256(int8send(:id)), 1, 3, sha256(int8send(:id)), clock_timestamp() where pg_try_advisory_xact_lock(:id)
on conflict do nothing returning key;
insert into payment (id, amount) values (:id::text, 1);
select {SCHEMA}.seal('bench');
commit;
"""


async def store_path(stage: Stage) -> Result:
    tables = []
    async with crew(stage) as team:
        tables.append(await _inserts(stage, team))
        if not stage.quick:
            tables.append(await _results(stage, team))
            tables.append(await _duplicates(stage, team))
    return Result("store_path", tables)


async def _inserts(stage: Stage, team: Crew) -> Table:
    count, rounds = (1_500, 3) if stage.quick else (20_000, 7)
    load = Load(prefix="", count=count)
    subjects: dict[str, Subject] = {name: team.subject(name, load) for name in ("bare", "by hand")}
    subjects["textbook"] = team.subject("textbook", Load(prefix="", count=count // 20))
    subjects |= {name: team.subject(name, load) for name in GROUPS}
    if pgbench := _pgbench_binary():
        subjects["pgbench"] = lambda number: _pgbench(stage, pgbench, seconds=1 if stage.quick else 5)
    targets = [
        Target(OURS, "bare", 2.0),
        Target(OURS, "by hand", 2.5),
        Target(OURS, "textbook", 25.0),
        Target(OURS, "pgbench"),
        *(Target(name, "bare") for name in GROUPS if name != OURS),
    ]
    return await side_by_side(
        "Inserts", subjects, targets, rounds=rounds, say=stage.say, plot=True, facts={"lanes": LANES, "messages": count}
    )


async def _results(stage: Stage, team: Crew) -> Table:
    load = Load(prefix="", count=20_000)
    subjects = {
        "bare": team.subject("bare", load),
        "no result": team.subject(OURS, load),
        "a result stored": team.subject(OURS, Load(prefix="", count=load.count, result=True)),
    }
    targets = [Target("no result", "bare", 2.0), Target("a result stored", "bare", 1.7)]
    return await side_by_side("With and without a result", subjects, targets, rounds=5, say=stage.say)


async def _duplicates(stage: Stage, team: Crew) -> Table:
    subjects: dict[str, Subject] = {}
    targets = []
    for share in (0.0, 0.3, 0.95):
        load = Load(prefix="", count=20_000, duplicates=share)
        subjects[f"by hand, {share:.0%}"] = team.subject("by hand", load)
        subjects[f"ours, {share:.0%}"] = team.subject(OURS, load)
        targets.append(Target(f"ours, {share:.0%}", f"by hand, {share:.0%}"))
    subjects["ours, 100%"] = _all_again(stage, team)
    targets.append(Target("ours, 100%", "ours, 0%", 5.0))
    facts = {"100%": "every message of a run was applied before, in another run"}
    return await side_by_side("Duplicates", subjects, targets, rounds=5, say=stage.say, plot=True, facts=facts)


def _all_again(stage: Stage, team: Crew) -> Subject:
    async def measured(number: int) -> float:
        load = Load(prefix="again", count=20_000)
        with stage.database() as dsn:
            await team.ask(OURS, load, dsn)
            (answer,) = await team.ask(OURS, load, dsn)
            await team.close()
            return load.count / float(answer["seconds"])

    return measured


# ------------------------------------------------------------------------------------------------------------ pgbench
def _pgbench_binary() -> Path | None:
    if found := shutil.which("pgbench"):
        return Path(found)
    return next((path for path in [system_binaries() / "pgbench"] if path.exists()), None)


async def _pgbench(stage: Stage, pgbench: Path, *, seconds: int) -> float:
    """Transactions a second, on as many connections as there are lanes."""
    with stage.database() as dsn, tempfile.NamedTemporaryFile("w", suffix=".sql") as script:
        script.write(_SCRIPT)
        script.flush()
        process = await asyncio.create_subprocess_exec(
            pgbench, "--no-vacuum", "--protocol=prepared", f"--client={LANES}", f"--time={seconds}",
            f"--file={script.name}", dsn, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        said, errors = await process.communicate()
        rate = re.search(rb"tps = ([\d.]+)", said)
        if process.returncode or rate is None:
            raise RuntimeError(f"pgbench ended with exit code {process.returncode}: {errors.decode()[-500:]}")
        return float(rate[1])
