"""A worker process that dies at a point, or does not: `python -m tests.worker.crashing_worker [POINT[:NTH]]`.

It consumes a queue in Postgres, or CRASH_SOURCE; with CRASH_BATCHES in batches, with CRASH_SCHEDULED one after another
and with its retries stored, with CRASH_REPLY as one that answers, with CRASH_PUBLISH as one that publishes there, with
CRASH_ACCEPTS as one whose front door is elsewhere.
"""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import dataclass

from idemconsumer import App, Batch, Key, Message, Reject, Tx
from idemconsumer.brokers.sqs import sqs_client as sqs_client
from idemconsumer.process.child import launch
from idemconsumer.settings import load
from idemconsumer.testing.crash import CrashAt

PAYMENTS, BOMBS, LETTERS = "payments", "bombs", "letters"
SOURCE, DEAD = os.environ.get("CRASH_SOURCE", f"postgres:{PAYMENTS}"), f"postgres:{LETTERS}"

app = App("crashing")


@dataclass
class Payment:
    amount: int
    id: str | None = None


# Many attempts, since the death of its worker costs a message one.
@app.idempotent_handler(SOURCE, key="id", group_size=4, max_attempts=20, backoff="10ms, 10ms", dead_letter_to=DEAD)
async def pay(payment: Payment, tx: Tx, message: Message) -> dict[str, int]:
    """The payment's name decides what it does."""
    assert payment.id is not None
    await tx.execute("insert into effect values (%s, %s)", (payment.id, payment.amount))
    if payment.id.startswith("refused"):
        raise Reject("no_funds", {"amount": payment.amount})
    if payment.id.startswith("poison") or (payment.id.startswith("flaky") and message.attempt == 1):
        raise ValueError(payment.id)
    return {"paid": payment.amount}


async def pay_all(payments: Batch[Payment], tx: Tx) -> None:
    """As `pay`, for a batch."""
    await tx.connection.cursor().executemany(
        "insert into effect values (%s, %s)", [(payment.id, payment.amount) for payment in payments]
    )
    for i, payment in enumerate(payments):
        assert payment.id is not None
        if payment.id.startswith("poison"):
            raise ValueError(payment.id)
        if payment.id.startswith("refused"):
            payments.reject(i, "no_funds", {"amount": payment.amount})
        elif payment.id.startswith("flaky") and payments.message(i).attempt == 1:
            payments.retry(i)
        else:
            payments.result(i, {"paid": payment.amount})


if "CRASH_BATCHES" in os.environ:
    app = App("crashing")
    app.idempotent_handler(
        SOURCE, key="id", group_size=4, max_attempts=20, backoff="10ms, 10ms", name="pay", dead_letter_to=DEAD
    )(pay_all)


if "CRASH_SCHEDULED" in os.environ:
    app = App("crashing")
    app.idempotent_handler(SOURCE, key="id", group_size=1, concurrency=1, max_attempts=4, backoff="1h, 1h")(pay)


if "CRASH_PUBLISH" in os.environ:
    app = App("crashing")

    @app.idempotent_handler(SOURCE, key="id", group_size=4, concurrency=1)
    async def forward(payment: Payment, tx: Tx) -> None:
        """Its customer is what its name begins with."""
        assert payment.id is not None
        await tx.execute("insert into effect values (%s, %s)", (payment.id, payment.amount))
        to = os.environ["CRASH_PUBLISH"]
        key = payment.id.partition("-")[0] if to.startswith("kafka:") else None
        await app.publish(to, {"id": payment.id, "entity": ""}, key=key, tx=tx)


if "CRASH_ACCEPTS" in os.environ:
    app = App("crashing")
    app.idempotent_handler(SOURCE, key=Key.header("Idempotency-Key"), tenant=Key.header("Account"), max_attempts=20)(
        pay
    )


if "CRASH_REPLY" in os.environ:
    app = App("crashing")
    app.idempotent_handler(SOURCE, key="id", reply=True)(pay)


@app.idempotent_handler(f"postgres:{BOMBS}", key="id", group_size=4, max_attempts=2)
async def explode(payment: Payment, tx: Tx) -> None:
    await tx.execute("insert into effect values (%s, %s)", (payment.id, payment.amount))
    if payment.id == "bomb":
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> int:
    if SOURCE.startswith("sqs:"):
        # The next worker waits until what a dead one held is visible again.
        sqs_client.LEAST_VISIBILITY = 3  # type: ignore[misc]
    crash = CrashAt.parse(sys.argv[1]) if len(sys.argv) > 1 else None
    return launch(lambda: app.worker(load(until_empty=True, concurrency=2), crash), drain_timeout=20.0)


if __name__ == "__main__":
    sys.exit(main())
