"""`python -m examples.incident.walk [MESSAGES]`: a release with two bugs, from the first sign to no letter left.

A person's commands are run as they stand in docs/operations.md, and printed. Exit code 1 if in the end a payment was
lost or applied twice, or a letter is left. The database is a throwaway Postgres.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg

from examples.incident.app import TABLES
from idemconsumer.embedded.postgres import EmbeddedPostgres
from idemconsumer.stores.migrations import migrate

ROOT = Path(__file__).parents[2]
PATIENCE = 120.0  # seconds without any progress
MESSAGES = 62_500  # 50,000 of them before anybody looks
BAD = 100  # every so many messages one has no rate, or a note that is too long
DURING = 0.2  # the share of the messages that arrives while letters are redriven
RATE = 200


def payment(number: int) -> dict[str, Any]:
    francs, talkative = number % (2 * BAD) == 7, number % (2 * BAD) == 107
    note = "a note that is longer than anybody had thought of" if talkative else "thanks"
    return {"id": f"p-{number}", "currency": "CHF" if francs else "EUR", "amount": number % 90 + 1, "note": note}


class Company:
    """A database, and workers of one release at a time."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._environment = os.environ | {"IDEMCONSUMER_DSN": dsn}

    @contextmanager
    def running(self, *, mended: bool) -> Iterator[None]:
        command = [sys.executable, "-m", "idemconsumer", "run", "examples.incident.app:app"]
        release = {"INCIDENT_MENDED": "1" if mended else "0"}
        # Its log would stand between what is shown here.
        launcher = subprocess.Popen(command, cwd=ROOT, env=self._environment | release, stderr=subprocess.DEVNULL)
        try:
            yield
        finally:
            launcher.terminate()
            launcher.wait()

    def run(self, command: str, *, show: int = 12) -> str:
        """What a person types; its output, of which so many lines are shown."""
        done = subprocess.run(
            [sys.executable, "-m", *command.split()],
            cwd=ROOT, env=self._environment, check=True, capture_output=True, text=True,
        )  # fmt: skip
        lines = done.stdout.splitlines()
        if show:
            print(f"\n$ {command}", *lines[:show], *(["…"] if len(lines) > show else []), sep="\n", flush=True)
        return done.stdout

    def ask(self, command: str) -> Any:
        return json.loads(self.run(f"{command} --json", show=0))

    def publish(self, numbers: range) -> None:
        with psycopg.connect(self._dsn) as connection:
            for start in range(numbers.start, numbers.stop, 500):
                bodies = [json.dumps(payment(n)) for n in numbers[start - numbers.start :][:500]]
                connection.execute(
                    "select idemconsumer.publish('payments', b::jsonb) from unnest(%s::text[]) as b", (bodies,)
                )
                connection.commit()

    def count(self, query: str) -> int:
        with psycopg.connect(self._dsn) as connection:
            row = connection.execute(query.encode()).fetchone()
            return int(row[0]) if row else 0

    def until(self, count: str, reached: int) -> None:
        most, deadline = 0, 0.0
        while (seen := self.count(count)) < reached:
            if seen > most or not deadline:
                most, deadline = seen, time.monotonic() + PATIENCE
            elif time.monotonic() > deadline:
                raise TimeoutError(f"{seen} of {reached}, and no more for {PATIENCE:g} s: {count}")
            time.sleep(0.1)


APPLIED = "select count(distinct id) from payment"
ENDED = "select (select count(distinct id) from payment) + (select count(*) from idemconsumer.dead_letter)"


def say(text: str) -> None:
    print(f"\n# {text}", flush=True)


def walk(company: Company, messages: int) -> bool:
    first = range(round(messages * (1 - DURING)))
    say(f"{len(first):,} payments arrive, and the release has two bugs.")
    with company.running(mended=False):
        company.publish(first)
        company.until(ENDED, len(first))
        say("Letters appear. What are they?")
        company.run("idemconsumer status")
        company.run("idemconsumer dead groups")
        say("A customer asks for payment p-7.")
        company.run("idemconsumer explain --handler book --key p-7", show=30)
    groups = company.ask("idemconsumer dead groups")
    letters = sum(group["letters"] for group in groups)

    say("Both are mended and deployed. The letters go back while payments keep arriving.")
    with company.running(mended=True):
        arriving = threading.Thread(target=company.publish, args=(range(first.stop, messages),))
        arriving.start()
        company.run("idemconsumer dead redrive --reason attempts_exhausted --dry-run")
        company.run(f"idemconsumer dead redrive --reason attempts_exhausted --rate {RATE} --by ann")
        arriving.join()
        company.until(APPLIED, messages)
        say("And p-7?")
        company.run("idemconsumer explain --handler book --key p-7", show=30)
    left = company.ask("idemconsumer dead list")
    rows = company.count("select count(*) from payment")
    applied = company.count(APPLIED)
    say(
        f"{letters} letters of {len(groups)} causes, {len(left)} left; "
        f"{messages:,} payments: {messages - applied} lost, {rows - applied} applied twice."
    )
    return (len(groups), len(left), applied, rows) == (2, 0, messages, messages) and letters == len(first) // BAD


def main() -> int:
    messages = int(sys.argv[1]) if len(sys.argv) > 1 else MESSAGES
    with EmbeddedPostgres() as server:
        migrate(server.dsn, "idemconsumer")
        with psycopg.connect(server.dsn, autocommit=True) as connection:
            connection.execute(TABLES)
        passed = walk(Company(server.dsn), messages)
    print("PASSED" if passed else "FAILED")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
