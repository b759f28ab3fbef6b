"""What a step costs by the number of steps that are recorded of its saga."""

from __future__ import annotations

import secrets

from benchmarks._child import child
from benchmarks._measure import Result, Subject, Target, side_by_side
from benchmarks._stage import Stage

RECORDED = (100, 1_000, 10_000)


async def long_sagas(stage: Stage) -> Result:
    """A saga is begun, resumed, and goes on; the steps after the recorded ones are timed."""
    count = 100 if stage.quick else 1_000
    with stage.database() as dsn:
        environment = {"IDEMCONSUMER_DSN": dsn, "IDEMCONSUMER_CONCURRENCY": "4"}
        async with child("benchmarks.rivals.long_saga", environment=environment) as process:

            def subject(recorded: int) -> Subject:
                async def rate(number: int) -> float:
                    return count / float(await process.ask(id=secrets.token_hex(8), recorded=recorded, count=count))

                return rate

            await subject(100)(0)
            sizes = RECORDED[:2] if stage.quick else RECORDED
            names = [f"after {recorded:,} steps" for recorded in sizes]
            table = await side_by_side(
                "Steps of one saga by the number of recorded ones",
                {name: subject(recorded) for name, recorded in zip(names, sizes, strict=True)},
                [Target(name, names[0], 0.8) for name in names[1:]],
                rounds=2 if stage.quick else 5,
                say=stage.say,
                unit="steps/s",
                facts={"steps measured": count},
            )
    return Result("long_sagas", [table])
