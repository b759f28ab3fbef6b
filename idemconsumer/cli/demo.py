"""`demo`: duplicate messages and killed workers, and a ledger that has each payment once."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import click
import msgspec
import psycopg
from click import option
from psycopg.conninfo import make_conninfo

from idemconsumer.brokers.postgres_broker import PostgresBroker
from idemconsumer.brokers.postgres_session import VISIBILITY
from idemconsumer.cli.demo_app import LEDGER, PAUSE, QUEUE, Payment
from idemconsumer.cli.flags import as_json, count
from idemconsumer.cli.verbs import Given, Output, verb
from idemconsumer.embedded.postgres import EmbeddedPostgres
from idemconsumer.errors import IdemConsumerError
from idemconsumer.ports.broker import Outgoing
from idemconsumer.process.child import LIFELINE, WORKER, Exit
from idemconsumer.settings import PREFIX, Settings
from idemconsumer.stores.migrations import migrate

_DUPLICATES: Final = 0.3  # share of the payments that are published twice
_CONCURRENCY: Final = 8
_WORK_SECONDS: Final = 4.0  # roughly the duration without kills; with a shorter one the work would end before the kills
_PAUSES: Final = 0.002, 0.25  # seconds; bounds of the duration of one booking
_KILLS_BETWEEN: Final = 0.05, 0.65  # share of the payments applied; each later kill would cost one more wait
_STALLED_SECONDS: Final = 60.0
_POLL_SECONDS: Final = 0.05
_BAR: Final = 30  # characters

# The queue deletes a message when it is settled. This table keeps how often the message had been delivered by then.
_COUNT_DELIVERIES: Final = """
create table delivered (deliveries bigint not null);
create function count_deliveries() returns trigger language plpgsql as $$
begin
    insert into delivered select sum(deliveries) from gone having count(*) > 0;
    return null;
end
$$;
create trigger settled after delete on idemconsumer.queue
    referencing old table as gone for each statement execute function count_deliveries();
"""
# An open, idle transaction belongs to a handler that is in the middle of its work.
_IN_HAND: Final = (
    "select application_name, count(*) from pg_stat_activity"
    " where application_name like 'demo-%' and state = 'idle in transaction' group by 1"
)


class DemoReport(msgspec.Struct, frozen=True):
    """What the demo counted. `deliveries` = `messages` + `duplicates` + redeliveries after a kill."""

    messages: int
    deliveries: int
    kills: int
    applied: int
    duplicates: int
    lost: int
    twice: int
    seconds: float

    @property
    def passed(self) -> bool:
        return self.lost == 0 and self.twice == 0


@verb(
    "demo",
    count("--messages", "Payments.", 1_000),
    count("--kills", "Workers to kill.", 5, least=0, most=50),
    count("--workers", "Worker processes.", 2, most=16),
    option("--seed", type=int, help="Random seed; it decides the duplicates."),
    ends=as_json,
)
def demo(given: Given) -> Output:
    """Run a demonstration: payments arrive twice, workers are killed, each payment is applied once.

    Starts a throwaway Postgres, publishes N payments to its queue, about 30% of them twice, and kills workers with
    SIGKILL while they process payments. Then it counts the rows in the ledger, which has no unique constraint. Needs
    only pip install 'idemconsumer[demo]'.

    --json prints one object. `messages`: payments; `duplicates`: extra copies published; `deliveries`: how often the
    queue delivered a payment or a copy to a worker; `applied`: rows in the ledger; `lost`: payments not in the ledger;
    `twice`: payments in the ledger more than once.

    Exit code 0: none lost, none twice. 1: some were, or the demo itself failed. 2: wrong usage, or Postgres cannot be
    started.
    """
    seed = random.randrange(1_000_000) if given.seed is None else given.seed
    with ExitStack() as stack:
        report = Demo(stack, given.messages, given.kills, given.workers, seed).run()
    return Output(report, verdict(report), code=Exit.DONE if report.passed else Exit.ERROR)


class Demo:
    """One run. Everything it starts ends with `stack`, and also if this process is killed."""

    def __init__(self, stack: ExitStack, messages: int, kills: int, workers: int, seed: int) -> None:
        self._stack = stack
        self._chance = random.Random(seed)
        self._messages = messages
        self._workers = workers
        self._seed = seed
        low, high = (share * messages for share in _KILLS_BETWEEN)
        self._kills = sorted(self._chance.uniform(low, high) for _ in range(kills))  # payments applied before each kill
        self._killed = 0
        self._crew: list[subprocess.Popen[bytes]] = []

    def run(self) -> DemoReport:
        began = time.monotonic()
        server = self._stack.enter_context(EmbeddedPostgres())
        migrate(server.dsn, "idemconsumer")
        self._db = self._stack.enter_context(psycopg.connect(server.dsn, autocommit=True))
        self._db.execute(LEDGER)
        self._db.execute(_COUNT_DELIVERIES)
        _say(f"Postgres runs on port {server.port} until the demo ends.  (--seed {self._seed})")
        payments, published = self._publish(server.dsn)
        _say(f"Published {self._messages:,} payments, {len(published) - len(payments):,} of them twice.")
        self._start_workers(server.dsn, len(published))
        self._watch()
        ledger = Counter(name for (name,) in self._db.execute("select payment from ledger"))
        return DemoReport(
            messages=self._messages,
            # Messages that are still in the queue (none, unless messages were lost) were delivered as well.
            deliveries=self._number("select sum(deliveries) from (table delivered union all"
                                    " select deliveries from idemconsumer.queue) all_of_them"),
            kills=self._killed,
            applied=ledger.total(),
            duplicates=len(published) - len(payments),
            lost=sum(payment.id not in ledger for payment in payments),
            twice=sum(times > 1 for times in ledger.values()),
            seconds=round(time.monotonic() - began, 1),
        )  # fmt: skip

    def _publish(self, dsn: str) -> tuple[list[Payment], list[Outgoing]]:
        chance = self._chance
        payments = [Payment(f"payment-{n:06}", chance.randint(1, 100_000)) for n in range(self._messages)]
        places = [(float(place), payment) for place, payment in enumerate(payments)]
        places += [
            # Some copies arrive at once, others long after the first copy was applied.
            (place + chance.uniform(0, self._messages / 4), payment)
            for place, payment in places
            if chance.random() < _DUPLICATES
        ]
        places.sort(key=lambda placed: placed[0])
        published = [Outgoing(msgspec.json.encode(payment)) for _, payment in places]
        asyncio.run(PostgresBroker(Settings(dsn=dsn)).publish(QUEUE, published))
        return payments, published

    # ------------------------------------------------------------------------------------------------- the workers
    def _start_workers(self, dsn: str, published: int) -> None:
        self._folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="idemconsumer-demo-")))
        self._lifeline, write_end = os.pipe()
        self._stack.callback(os.close, self._lifeline)
        self._stack.callback(os.close, write_end)
        self._stack.callback(self._end_workers)
        shortest, longest = _PAUSES
        pause = min(max(_WORK_SECONDS * self._workers * _CONCURRENCY / published, shortest), longest)
        # The caller's own settings must not reach these workers.
        clean = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
        self._environment = clean | {PAUSE: str(pause), LIFELINE: str(self._lifeline)}
        self._dsn = dsn
        for index in range(self._workers):
            self._crew.append(self._start(index))

    def _start(self, index: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "idemconsumer", "run", "idemconsumer.cli.demo_app:app"]
        command += ["--until-empty", f"--concurrency={_CONCURRENCY}", "--log-format=json"]
        dsn = make_conninfo(self._dsn, application_name=f"demo-{index}")
        with (self._folder / f"worker-{index}.log").open("ab") as log:
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self._folder,
                env=self._environment | {f"{PREFIX}DSN": dsn, WORKER: str(index)},
                pass_fds=(self._lifeline,), process_group=0,
            )  # fmt: skip

    def _end_workers(self) -> None:
        for worker in self._crew:
            worker.kill()
            worker.wait()

    def _watch(self) -> None:
        """Kill workers as planned; return when all have exited by themselves, because the queue is empty."""
        before, changed, explained = (-1, -1), time.monotonic(), False
        while any(worker.poll() is None for worker in self._crew):
            applied, queued = (
                self._number("select count(*) from ledger"),
                self._number("select count(*) from idemconsumer.queue"),
            )
            if (applied, queued) != before:
                before, changed = (applied, queued), time.monotonic()
            if time.monotonic() - changed > _STALLED_SECONDS:
                _say(f"No progress for {_STALLED_SECONDS:.0f} s; counting the payments now.")
                return
            if self._kills[self._killed :] and applied >= self._kills[self._killed]:
                self._kill_one()
            if self._killed and queued and not explained and time.monotonic() - changed > 1.0:
                explained = True
                _say(f"  messages of killed workers are redelivered {VISIBILITY:.0f} s after they were fetched")
            _show(applied, self._messages, queued)
            self._raise_if_failed()
            time.sleep(_POLL_SECONDS)
        _clear()
        self._raise_if_failed()

    def _kill_one(self) -> None:
        """Kill a worker with payments in flight. Just after a start there may be none; the next poll kills one."""
        in_hand: dict[str, int] = dict(self._db.execute(_IN_HAND).fetchall())
        ready = [index for index in range(self._workers) if in_hand.get(f"demo-{index}")]
        if not ready:
            return
        index = self._chance.choice(ready)
        victim = self._crew[index]
        victim.send_signal(signal.SIGKILL)
        if victim.wait() != -signal.SIGKILL:
            return
        self._killed += 1
        _say(
            f"  kill {self._killed} of {len(self._kills)}: worker {index + 1} (pid {victim.pid}) with "
            f"{in_hand[f'demo-{index}']} payments in hand"
        )
        self._crew[index] = self._start(index)

    def _raise_if_failed(self) -> None:
        for index, worker in enumerate(self._crew):
            if worker.returncode:
                output = (self._folder / f"worker-{index}.log").read_text(errors="replace")
                raise IdemConsumerError(f"demo: worker {index + 1} failed ({worker.returncode}):\n{output[-2000:]}")

    def _number(self, query: Any) -> int:
        row = self._db.execute(query).fetchone()
        return int(row[0] or 0) if row is not None else 0


# --------------------------------------------------------------------------------------------------------------- output
def _show(applied: int, total: int, queued: int) -> None:
    """A progress line that overwrites itself; on a terminal only."""
    if sys.stderr.isatty():
        full = _BAR * min(applied, total) // total
        bar = click.style("█" * full, fg="green") + "░" * (_BAR - full)
        _clear()
        click.echo(f"  {bar} {applied:,} of {total:,} applied, {queued:,} in the queue", err=True, nl=False)


def _clear() -> None:
    if sys.stderr.isatty():
        click.echo("\r\033[K", err=True, nl=False)


def _say(line: str) -> None:
    _clear()
    click.echo(line, err=True)


def verdict(report: DemoReport) -> str:
    """The counts, and what they mean, as text."""
    again = report.deliveries - report.messages - report.duplicates
    lines: Iterable[tuple[str, int, str]] = (
        ("payments", report.messages, ""),
        ("duplicates", report.duplicates, "published a second time"),
        ("redeliveries", again, "were held by a worker when it was killed"),
        ("kills", report.kills, "workers killed with SIGKILL in the middle of their work"),
        ("applied", report.applied, "rows in the ledger, which has no unique constraint"),
        ("lost", report.lost, ""),
        ("twice", report.twice, ""),
    )
    width = len(f"{report.deliveries:,}")
    table: Sequence[str] = [f"  {name:<13}{number:>{width},}  {text}".rstrip() for name, number, text in lines]
    if report.passed:
        end = click.style(" PASSED ", bg="green", fg="black", bold=True)
        end += f" Every payment was applied exactly once ({report.seconds:.1f} s)."
    else:
        end = click.style(" FAILED ", bg="red", fg="white", bold=True)
        end += f" {report.lost:,} payments were lost and {report.twice:,} were applied more than once."
    return "\n".join(["", *table, "", end])
