"""The store path: one insert of business data a message, with no broker, on four connections.

`bare` is the consumer that people write by hand without deduplication: psycopg, a transaction a message. `by hand` adds
the key to that transaction; with autocommit the insert is the transaction. `textbook` opens a connection a message and
commits the claim first. `pgbench` runs the per-message protocol from C.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import tempfile

from benchmarks._crew import LANES, Crew, crew
from benchmarks._loads import Load
from benchmarks._measure import Result, Subject, Table, Target, side_by_side
from benchmarks._sizes import OURS
from benchmarks._stage import SCHEMA, Stage
from benchmarks.rivals.applying import AUTOCOMMIT

GROUPS = ["group 1", "group 32", "group 128", OURS]

# What the engine sends for a group of one message with one insert of business data, in as many round trips: BEGIN with
# the claim, the handler's insert, the seal with COMMIT.
SCRIPT = f"""
\\set id random(1, 9000000000000000000)
\\startpipeline
begin isolation level read committed read write;
select pg_catalog.set_config('idemconsumer.open', 'bench', true),
    pg_catalog.set_config('lock_timeout', '10s', true),
    pg_catalog.concat_ws('|', current_user, pg_catalog.current_setting('search_path'),
    pg_catalog.current_setting('session_replication_role'), pg_catalog.current_setting('statement_timeout')),
    pg_catalog.pg_backend_pid();
select * from {SCHEMA}.claim(array[row(sha256(int8send(:id)), 1, sha256(int8send(:id)),
    substring(sha256(int8send(:id)) for 16), null, false, null, false)::{SCHEMA}.claim], 3::smallint, true);
\\endpipeline
insert into payment (id, amount) values (:id::text, 1);
\\startpipeline
select {SCHEMA}.seal('bench');
commit;
\\endpipeline
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
    count, rounds = (1_500, 3) if stage.quick else (20_000, 5)
    load = Load(prefix="", count=count)
    subjects: dict[str, Subject] = {name: team.subject(name, load) for name in ("bare", AUTOCOMMIT, "by hand")}
    subjects["textbook"] = team.subject("textbook", Load(prefix="", count=count // 20))
    subjects |= {name: team.subject(name, load) for name in GROUPS}
    if binary := shutil.which("pgbench"):
        subjects["pgbench"] = _pgbench(stage, binary, seconds=1 if stage.quick else 5)
    targets = [
        Target(OURS, "bare", 2.0),
        Target(OURS, AUTOCOMMIT),
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
    return await side_by_side("With and without a result", subjects, targets, rounds=3, say=stage.say)


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
    return await side_by_side("Duplicates", subjects, targets, rounds=3, say=stage.say, plot=True, facts=facts)


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
def _pgbench(stage: Stage, binary: str, *, seconds: int) -> Subject:
    async def measured(number: int) -> float:
        with stage.database() as dsn:
            return await pgbench(binary, dsn, seconds=seconds)

    return measured


async def pgbench(binary: str, dsn: str, *, seconds: int) -> float:
    """Transactions a second, on as many connections as there are lanes."""
    with tempfile.NamedTemporaryFile("w", suffix=".sql") as script:
        script.write(SCRIPT)
        script.flush()
        process = await asyncio.create_subprocess_exec(
            binary, "--no-vacuum", "--protocol=prepared", f"--client={LANES}", f"--time={seconds}",
            f"--file={script.name}", dsn, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        said, errors = await process.communicate()
        rate = re.search(rb"tps = ([\d.]+)", said)
        if process.returncode or rate is None:
            raise RuntimeError(f"pgbench ended with exit code {process.returncode}: {errors.decode()[-500:]}")
        return float(rate[1])
