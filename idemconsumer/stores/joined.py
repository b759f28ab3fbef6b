"""Claims in the transaction of their effects, and the small commits besides, on Postgres 14 and newer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from idemconsumer.errors import Fenced
from idemconsumer.message.delivered import storable_text
from idemconsumer.message.headers import encode_headers
from idemconsumer.message.message import Message, StoredResult
from idemconsumer.message.origin import Pending, with_origin
from idemconsumer.rules.claim import Claim
from idemconsumer.rules.values import Record, State
from idemconsumer.stores.agreed_hashing import settle_hashing
from idemconsumer.stores.checks import check_database
from idemconsumer.stores.claims import PostgresClaims, transaction
from idemconsumer.stores.columns import LoggedDeliveries, NewDeadLetter, NextAttempt, columns_of
from idemconsumer.stores.grants import Kind
from idemconsumer.stores.literals import clean
from idemconsumer.stores.pool import Pool
from idemconsumer.stores.shared_reads import Looks
from idemconsumer.stores.suspect_readings import PostgresReading


class PostgresStore:
    """Claims in the transaction of their effects. Every method raises StoreUnavailable when the database is down.

    A method with a commit of its own may also raise CommitUnknown; then call it again. `most_locks`: how many keys all
    lanes together may hold at once (G4). `open` refuses a database that would lose what it acknowledges (R6).
    """

    def __init__(self, pool: Pool, most_locks: int) -> None:
        self.pool = pool
        self.most_locks = most_locks
        self._looks = Looks(pool)
        self.cut_within, self.server_started = pool.cut_within, pool.server_started

    @classmethod
    async def open(
        cls,
        dsn: str,
        schema: str,
        *,
        connections: int,
        longest_run: float,
        lease: float | None = None,
        beside: float | None = None,
        require_standby: bool = False,
        parties: Iterable[str] = (),
        hasty: bool = False,
        kind: Kind = "worker",
        most_locks: int | None = None,
    ) -> PostgresStore:
        """Check and open; see `check_database` and `Pool` for the parameters. `most_locks`: the result of an earlier
        check of the same database, which is then not checked again.

        Raises ConfigurationError (see `check_database`) or StoreUnavailable.
        """
        if most_locks is None:
            most_locks = await check_database(
                dsn, schema, longest_run=longest_run, lease=lease, beside=beside, require_standby=require_standby,
                kind=kind,
            )  # fmt: skip
        pool = Pool(
            dsn,
            schema,
            connections=connections,
            longest_run=longest_run,
            lease=lease,
            beside=beside,
            require_standby=require_standby,
            parties=parties,
            hasty=hasty,
        )
        await pool.open()
        try:
            await settle_hashing(pool, schema)
        except BaseException:
            await pool.close()
            raise
        return cls(pool, most_locks)

    async def close(self) -> None:
        await self.pool.close()

    def transaction(self, *, group: int, gate: str | None = None) -> AbstractAsyncContextManager[PostgresClaims]:
        """A transaction for `group` messages. Leaving without `complete` rolls back; a broken connection is dropped.

        Transactions with the same `gate` take turns, across all processes: the first claim waits, before it claims,
        until no other one is open. That wait counts as no collision, however short a group's lock timeout is.
        """
        return transaction(self.pool, group=group, gate=gate)

    @property
    def full(self) -> bool:
        """Whether a transaction that is opened now has to wait for a connection."""
        return self.pool.full

    async def peek(self, keys: Sequence[bytes]) -> list[Record | None]:
        """The committed records of these keys. Claims nothing."""
        return [await self._looks.record(keys[0])] if len(keys) == 1 else await self._looks.records(keys)

    async def differs(self, claim: Claim) -> bool:
        """Whether a rival (another worker) holds this key, uncommitted, and has shown another fingerprint
        (`Claim.shown`). False if that is unknown."""
        if not claim.fingerprint:
            return False
        return bool((await self.pool.alone("differs", {"key": claim.key, "fingerprint": claim.fingerprint}))[0][0])

    async def log_deliveries(self, rows: Sequence[LoggedDeliveries]) -> None:
        """Write these into the delivery log, each in a commit of its own. If the log cannot be written, nothing is
        raised; an outage is raised, and some rows may be written then (O23)."""
        for row in rows:
            async with self.pool.connection() as connection:  # first, since the row is sent with ages, not times
                ((problem,),) = await self.pool.run(connection, "log_deliveries", columns_of(row))
            self.pool.unlogged.heard(problem)

    # --------------------------------------------------------------------------------------------------------- attempts
    async def mark_attempts(self, claims: Sequence[Claim]) -> set[bytes]:
        """Record that these are about to run, in one commit and without counting an attempt.

        Returns the keys that had no row before, neither marked nor counted.
        """
        async with self.pool.connection() as connection:
            scopes = await self.pool.scope_ids(connection, claims)
            params = {"keys": [claim.key for claim in claims], "scopes": scopes}
            return {row[0] for row in await self.pool.run(connection, "mark_attempts", params)}

    async def unmark_attempts(self, keys: Sequence[bytes]) -> None:
        """Delete marks. Attempts that were counted since stay."""
        await self.pool.alone("unmark_attempts", {"keys": list(keys)})

    async def count_attempt(self, claim: Claim, error: str | None) -> int:
        """Add one attempt, in a commit of its own; returns how many there are now."""
        async with self.pool.connection() as connection:
            await self.pool.scope_ids(connection, [claim])  # so that the scope exists
            params = {"key": claim.key, "scope": claim.scope, "error": None if error is None else clean(error)}
            return int((await self.pool.run(connection, "count_attempt", params))[0][0])

    async def uncount_attempt(self, claim: Claim) -> None:
        """Undo the count of one attempt that was counted before a run which was then cancelled."""
        await self.pool.alone("uncount_attempt", {"key": claim.key})

    async def forget_attempts(self, keys: Sequence[bytes]) -> None:
        """Delete marks and counts."""
        await self.pool.alone("forget_attempts", {"keys": list(keys)})

    async def note_error(self, claim: Claim, error: str) -> int:
        """Store the error of an attempt that was counted beforehand; returns how many attempts there are."""
        rows = await self.pool.alone("note_error", {"key": claim.key, "error": clean(error)})
        return int(rows[0][0]) if rows else await self.count_attempt(claim, error)

    # --------------------------------------------------------------------------------------------------------- readings
    @asynccontextmanager
    async def reading(self, claims: Sequence[Claim], reader: int) -> AsyncIterator[PostgresReading]:
        """Record that these are about to be decoded, without counting. `reader` is a unique number; with the same one
        the call can be repeated after an error. Records that are not ended stay."""
        async with self.pool.connection() as connection:
            reading = PostgresReading(self.pool, connection, reader)
            await reading.begin(claims)
            yield reading

    @asynccontextmanager
    async def reading_alone(self, claim: Claim, reader: int) -> AsyncIterator[PostgresReading]:
        """As `reading`, for a message whose reader is gone: it is counted."""
        async with self.pool.connection() as connection:
            reading = PostgresReading(self.pool, connection, reader)
            await reading.take_over(claim)
            yield reading

    async def end_reading(self, claims: Sequence[Claim], reader: int) -> None:
        """Delete these records, if they still belong to this reader."""
        params = {"keys": [claim.key for claim in claims], "reader": reader}
        await self.pool.alone("end_reading", params)
        self.pool.readers.discard(reader)

    # ---------------------------------------------------------------------------------------------- ends and hand-overs
    async def take_over(self, queue: str, message: Message) -> None:
        """Put a message that its broker would soon drop into the queue in Postgres. Committed on return."""
        headers = encode_headers(with_origin(message).headers).decode()
        await self.pool.alone("enqueue", {"name": queue, "body": message.body, "key": None, "headers": headers})

    async def put_off(self, claim: Claim, later: NextAttempt) -> Record | int:
        """Store the message with its record, PENDING, and count the attempt, all in one commit (D18).

        Returns how many attempts have failed now; if none is left, nothing was stored. Or returns the record of a rival
        that was faster. Raises Contention when a rival holds the key, and Fenced when another worker has `row` by now.
        """
        async with self.transaction(group=1) as claims:
            if (found := await claims.claim_one(claim, State.PENDING)) is not None:
                return found
            attempts = later.attempts
            if later.error is not None:
                attempts = await claims.count_attempt(claim, later.error)
            if attempts >= later.max_attempts:
                return attempts
            pending = Pending(claim.key, claim.scope, attempts, later.own_id and storable_text(later.own_id))
            number, token = later.row or (None, None)
            stored = {
                "name": later.queue,
                "message_id": None,
                "body": later.message.body,
                "headers": encode_headers(with_origin(later.message, pending, later.letter).headers),
                "after": later.after,
                "id": number,
                "token": token,
            }
            if not await claims.send("put_off", stored):
                raise Fenced("another worker holds the message")
            await claims.complete((), ())
            return attempts

    async def reject(self, claim: Claim, rejection: StoredResult) -> Record | None:
        """Store FAILED and its rejection in a transaction of its own, after claiming anew.

        Returns None if it was stored, or the record of a rival that was faster. Raises Contention when a rival
        holds the key.
        """
        found = await self._finalise(claim, State.FAILED, rejection, None)
        return found if isinstance(found, Record) else None

    async def bury(self, letter: NewDeadLetter, claim: Claim | None, *, forget: Sequence[bytes] = ()) -> Record | int:
        """Write the dead letter and, if a claim is given, the record DEAD, in one transaction; its attempts, and
        those of `forget`, are deleted in it.

        Returns the id of the dead letter that was written (or counted once more), or the final record of a rival that
        was faster.
        """
        return await self._finalise(claim, State.DEAD, None, letter, forget)

    async def count_dead(self, key: bytes) -> tuple[int, str] | None:
        """Count one more arrival of a message whose record is DEAD. Returns the id and the reason of its newest dead
        letter; None if it has none any more."""
        rows = await self.pool.alone("count_dead", {"key": key})
        return (rows[0][0], rows[0][1]) if rows else None

    async def _finalise(
        self,
        claim: Claim | None,
        state: State,
        result: StoredResult | None,
        letter: NewDeadLetter | None,
        forget: Sequence[bytes] = (),
    ) -> Record | int:
        """The id of the dead letter, 0 without one; or the record of a rival."""
        number = 0
        async with self.transaction(group=1) as claims:
            if claim is not None and (found := await claims.claim_one(claim, state)) is not None:
                return found
            if letter is not None:
                number = await claims.write_letter(letter, None if claim is None else claim.key)
            results = [] if claim is None or result is None else [(claim.key, result)]
            await claims.complete(results, [*forget, *([] if claim is None else [claim.key])])
            return number
