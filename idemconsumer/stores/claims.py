"""One transaction of the store: opened, sealed and committed by the engine alone.

It is opened with a seal of its own, which the engine's last statement compares and sets; a deferred trigger refuses
every COMMIT without it (`guard` in migrations/0001). What the server enforces is described in the statements and
migrations; this file only sends the statements in the right order.
"""

from __future__ import annotations

import secrets
import time
import zlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

import psycopg
from psycopg.pq.abc import PGresult

from idemconsumer.errors import CommitUnknown, ConfigurationError, GuardViolated, StoreChanged
from idemconsumer.logs import log
from idemconsumer.message.message import StoredResult
from idemconsumer.redaction import error_text
from idemconsumer.rules.claim import Claim
from idemconsumer.rules.habits import Habits
from idemconsumer.rules.values import Found, Record, State
from idemconsumer.sql.answering import PATIENCE
from idemconsumer.sql.connecting import OwnCursor
from idemconsumer.stores.answers import loaded, outcomes, standing
from idemconsumer.stores.checkout import Lending
from idemconsumer.stores.columns import (
    LoggedDeliveries,
    NewDeadLetter,
    Statement,
    claimed,
    columns_of,
    dead_letter,
    stored_columns,
)
from idemconsumer.stores.literals import clean
from idemconsumer.stores.pool import Pool
from idemconsumer.stores.server import is_durable
from idemconsumer.stores.session import LOCK_TIMEOUT, PoolSession
from idemconsumer.stores.sqlstates import (
    GUARD,
    NOT_DURABLE,
    PRUNED,
    diagnosed,
    may_be_changed,
    not_durable,
    translate,
)  # fmt: skip
from idemconsumer.stores.tx import PostgresTx
from idemconsumer.user_code.cancellation import uninterrupted

_GROUP_LOCK_TIMEOUT: Final = "50ms"  # G12: rather than wait for another lane's rows, a group is rerun in smaller ones

_RESET: Final = "session reset, a function, trigger or view had changed its settings"
_LATELY: Final = 30.0  # seconds: during an outage some lane tries again every two seconds, or is frozen for longer
_GATE_TIMEOUT: Final = "30s"  # J22: long enough for the groups ahead, each of which is limited in time


@asynccontextmanager
async def transaction(pool: Pool, *, group: int, gate: str | None = None) -> AsyncIterator[PostgresClaims]:
    """See `PostgresStore.transaction`."""
    async with pool.connection() as connection:
        claims = PostgresClaims(pool, connection, group, gate)
        try:
            yield claims
        finally:
            if not claims.committed:
                await claims.abandon()


class PostgresClaims:
    """One open transaction for one group: its effects, records and results are one commit (R4). The methods of
    `OpenTransaction` are described there. Statements of sagas and admin commands use it too, under the same guard."""

    def __init__(self, pool: Pool, connection: PoolSession, group: int, gate: str | None) -> None:
        self._pool = pool
        self._queries = pool.queries
        self._connection = connection
        self._lock_timeout = _GROUP_LOCK_TIMEOUT if group > 1 else LOCK_TIMEOUT
        self._group = group
        self._gate = gate
        self._seal = ""
        self._lending = lending = Lending(connection, self._kept)
        self.end, self.check, self.settled, self.abandon = lending.end, lending.check, lending.settled, lending.abandon
        self._began = time.monotonic()
        self.committed = False

    # ------------------------------------------------------------------------------------------------------ the opening
    async def begin(self, *first: Statement) -> list[list[tuple[Any, ...]]]:
        """Open the transaction, send these statements after that, and return their rows. `claim` opens by itself."""
        if self._seal and not first:
            return []

        def opening() -> bytes:
            return b"; ".join([self._opening(), *(self._written(*each) for each in first)])

        answers = await self._opened(opening, -1 - len(first))
        return [self.rows(answer) for answer in answers[len(answers) - len(first) :]]

    async def begin_step(self, params: dict[str, Any]) -> int | None:
        """Open the transaction, lock the saga's row and begin its step. None: fenced; 0: the step has ended already."""

        def opening() -> bytes:
            self._seal = secrets.token_hex(8)
            given = params | {"seal": self._seal, "lock_timeout": self._lock_timeout}
            return b"; ".join([*self._beginning(), self._written("begin_step", given)])

        begun = (await self._opened(opening, -1))[-1].get_value(0, 0)
        return None if begun is None else int(begun)

    async def scope_ids(self, claims: Sequence[Claim]) -> list[int]:
        """As `Pool.scope_ids`, before the transaction is opened."""
        return await self._pool.scope_ids(self._connection, claims)

    async def claim(self, claims: Sequence[Claim], *, state: State = State.COMPLETED) -> list[Found]:
        """Claim all keys with one atomic insert, in order. Keys within one call must differ.

        Never waits for a rival (another worker): a key whose claim is not committed is `Mark.BUSY`. `Mark.CLAIMED`: the
        key is ours, and the handler is to run.
        """
        given = {"claims": claimed(claims, await self.scope_ids(claims)), "state": int(state)}
        statement = self._written("claim", given)
        # One round trip, as with a pipeline. But psycopg ends a pipeline with a Flush after its Sync, after which the
        # server no longer enforces idle_in_transaction_session_timeout (J6, J11).
        if not self._seal:
            answers = await self._opened(lambda: self._opening() + b"; " + statement, -2)
        else:
            try:
                answers = await self._connection.simple(statement)
            except psycopg.Error as error:
                raise self._ours(error) from error
        return outcomes(answers[-1], [claim.key for claim in claims])

    async def claim_one(self, claim: Claim, state: State) -> Record | None:
        """Claim one key. None: it is ours, in this state. Raises Contention when a rival holds the key."""
        return standing((await self.claim([claim], state=state))[0])

    async def _opened(self, opening: Callable[[], bytes], at: int) -> list[PGresult]:
        """Open the transaction and return the answers; the one at index `at` shows the state of the session.

        In a session that was changed nothing is done: it is reset, and the transaction is opened again (J25).
        """
        connection = self._connection
        try:
            answers = await connection.simple(opening())
            if connection.opened(answers[at]):
                return answers
        except psycopg.Error as error:
            if not may_be_changed(connection, error):
                raise self._ours(error) from error
        try:
            await self._pool.reset(connection)
            answers = await connection.simple(opening())
        except psycopg.Error as error:
            raise self._ours(error) from error
        connection.opened(answers[at])
        log.warning(_RESET)
        return answers

    def _ours(self, error: psycopg.Error) -> Exception:
        """The exception for an error of a statement of the engine."""
        if error.sqlstate == PRUNED:
            self._pool.forget_scopes()
        cause = translate(self._connection, error, ours=True)
        if isinstance(cause, StoreChanged):
            self._pool.missed_at = time.monotonic()
        return cause

    def _opening(self, *, sealed: bool = False) -> bytes:
        self._seal = secrets.token_hex(8)
        statements = self._beginning()
        if self._gate is not None:
            self._connection.patience = self._pool.longest_answer + PATIENCE  # R20: a group ahead may run that long
            gate = {"gate": zlib.crc32(self._gate.encode()) - 2**31, "gate_timeout": _GATE_TIMEOUT}
            statements.append(self._written("gate", gate))
        mark = {"seal": self._seal, "lock_timeout": self._lock_timeout, "session": self._connection.state}
        statements.append(self._written("open_sealed" if sealed else "open", mark))
        return b"; ".join(statements)

    def _beginning(self) -> list[bytes]:
        begin = self._queries["begin"]
        return [begin, self._queries["unchanged"]] if self._connection.pooled else [begin]

    def _written(self, name: str, params: dict[str, Any]) -> bytes:
        return self._pool.written(self._connection, name, params)

    # ------------------------------------------------------------------------------------------------ statements inside
    def rows(self, answer: PGresult) -> list[tuple[Any, ...]]:
        """The rows that a statement of the engine returned (R14)."""
        return loaded(self._connection, answer)

    async def send(self, name: str, params: dict[str, Any]) -> list[tuple[Any, ...]]:
        """Send one more statement of the engine in this transaction, and return its rows."""
        try:
            cursor = await OwnCursor(self._connection).execute(self._queries[name], params)
            return await cursor.fetchall() if cursor.description else []
        except psycopg.Error as error:
            raise translate(self._connection, error, ours=True) from error

    async def count_attempt(self, claim: Claim, error: str) -> int:
        """As `PostgresStore.count_attempt`, for a key that this transaction has claimed."""
        params = {"key": claim.key, "scope": claim.scope, "error": clean(error)}
        return int((await self.send("count_attempt", params))[0][0])

    async def write_letter(self, letter: NewDeadLetter, key: bytes | None) -> int:
        """Write a dead letter and return its id. It may be an existing one, which is counted once more."""
        await self.begin()
        ((number,),) = await self.send(*dead_letter(letter, key))
        return int(number)

    def tx(self, habits: Habits | None = None) -> PostgresTx:
        self.end()
        # R20: from now until COMMIT a statement, or a deferred trigger, may take as long as a handler.
        self._connection.patience = self._pool.longest_answer
        ahead = self._connection.ahead
        if habits is not None:
            ahead.seconds = habits.timeout
        self._connection.statements.prepare(by_itself=habits is not None and self._pool.prepares)
        tx = PostgresTx(self._lending, habits)
        self._lending.to(tx, eager=habits is None)
        return tx

    @property
    def lasting(self) -> bool:
        """Whether a handler has changed the transaction in a way that `restore` cannot undo (G6)."""
        return self._lending.lasting

    async def restore(self) -> None:
        lending, shared = self._lending, self._group > 1
        if not (lending.changed or (lending.passing and shared)):
            return
        self.end()
        connection = self._connection
        now = shared or connection.pooled  # else after the commit (`Pool.connection`)
        mark = secrets.token_hex(8)
        if lending.changed:
            statement = self._restoring("restore", mark) if now else self._queries["own_role"]
        else:
            statement = self._restoring("restore_local", mark)
        try:
            await lending.answered(connection.ahead.seconds)  # J26: these are the handler's pipelined statements
            connection.ahead.check()
            connection.patience = min(connection.patience, PATIENCE)  # R20: no statement of the handler runs now
            await connection.simple(statement)
        except psycopg.Error as error:
            raise await self._whose(error, [statement]) from error
        connection.patience = self._pool.longest_answer
        if now:
            self._seal = mark
        if lending.changed:
            if now:
                connection.statements.dropped()
            connection.changed = not now
        lending.changed = lending.passing = False

    def _restoring(self, name: str, mark: str) -> bytes:
        return self._kept(name, mark) + self._connection.again

    def _kept(self, name: str, mark: str = "") -> bytes:
        """A statement that keeps the seal, or sets it to `mark`, and keeps the lock timeout."""
        marks = {"seal": self._seal, "mark": mark or self._seal}
        return self._written(name, marks | {"lock_timeout": self._lock_timeout})

    async def waits_for_lock(self) -> bool:
        return await self._pool.waits_for_lock(self._connection)

    def diagnose(self, error: Exception) -> Exception:
        return diagnosed(self._connection, error)

    # ---------------------------------------------------------------------------------------------------------- the end
    async def complete(
        self,
        results: Sequence[tuple[bytes, StoredResult]],
        forget: Sequence[bytes],
        *,
        failed: tuple[Claim, str] | None = None,
        logged: LoggedDeliveries | None = None,
        more: Sequence[Statement] = (),
        last: Statement | None = None,
    ) -> int:
        """Store results, delete the attempt rows of `forget`, seal and COMMIT, as one act.

        `failed`: a message that failed after these, and its error. One attempt of it is counted in the same commit, and
        its attempts so far are returned, else 0. `logged` goes into the delivery log, in this commit; if the log cannot
        be written, all else is committed without it (O22). `more` are sent with it, and so is `last`, which seals, and
        whose value is returned.

        Runs to its end even when the caller is cancelled, then re-raises the cancellation. Raises GuardViolated when
        the transaction is not the one that was opened, Contention, CommitUnknown when the answer of COMMIT was lost,
        or the database's own error (a deferred constraint); in all but CommitUnknown nothing was committed.
        """
        self.end()
        await self.restore()
        connection = self._connection

        async def complete() -> int:
            statements = [self._written(*each) for each in more]
            if failed is not None:
                claim, error = failed
                attempt = {"key": claim.key, "scope": claim.scope, "error": clean(error)}
                statements.append(self._written("count_attempt", attempt))
            if results:
                columns = stored_columns([result for _, result in results])
                statements.append(self._written("store_results", {"keys": [key for key, _ in results], **columns}))
            if forget:
                statements.append(self._written("forget_attempts", {"keys": list(forget)}))
            log_at = len(statements)
            if logged is not None:
                statements.append(self._written("log_deliveries", columns_of(logged)))
            statements += self._pool.standby
            seal = {"seal": self._seal, "session": connection.state}
            name, params = last or ("seal_group" if self._group > 1 else "seal", {})
            statements.append(self._written(name, params | seal))
            answers = await self._committed(lambda: [*statements, b"COMMIT"])
            if logged is not None:
                self._pool.unlogged.heard(self.rows(answers[log_at])[0][0])
            if last is not None:
                return int(answers[-2].get_value(0, 0) or 0)
            return 0 if failed is None else int(answers[len(more)].get_value(0, 0) or 0)

        # J4: a connection that goes back to the pool in use would commit later.
        return await uninterrupted(complete(), hurry=connection.hurry)

    async def commit(self, statements: Sequence[Statement]) -> list[PGresult]:
        """A whole transaction in one round trip: no user code runs in it, so it is sealed as it opens. Raises as
        `complete`.

        Behind a pooler BEGIN goes first: to query what a COMMIT waits for, the session's process id must be known
        (R23).
        """
        connection = self._connection
        if connection.pooled:
            await self.begin()
        begun = bool(self._seal)

        def message() -> list[bytes]:
            mark = {"seal": self._seal, "session": connection.state}
            opening = self._written("seal_group", mark) if begun else self._opening(sealed=True)
            return [opening, *self._pool.standby, *(self._written(*each) for each in statements), b"COMMIT"]

        async def commit() -> list[PGresult]:
            if not begun and not connection.as_reported:
                await self._reset()
            answers = await self._committed(message, again=not begun)
            if not begun:
                connection.opened(answers[1])
            return answers[-1 - len(statements) : -1]

        return await uninterrupted(commit(), hurry=connection.hurry)  # J4: as in `complete`

    async def _committed(self, message: Callable[[], list[bytes]], *, again: bool = False) -> list[PGresult]:
        """Send `message`, which ends with COMMIT. `again`: it begins with BEGIN, and if it is refused because the
        session was changed, it is sent once more after a reset (J25)."""
        connection = self._connection
        connection.slow_commit = self._pool.slow_commits.add
        try:
            try:
                answers = await connection.last(message())
            except psycopg.Error as error:
                if not again or not (may_be_changed(connection, error) or error.sqlstate == GUARD):
                    raise
                await self._reset()
                answers = await connection.last(message())
        except psycopg.Error as error:
            if connection.closed:
                raise CommitUnknown(f"the answer to COMMIT was lost: {error_text(error)}") from error
            if error.sqlstate == NOT_DURABLE and not await is_durable(connection, self._pool.require_standby):
                raise ConfigurationError(not_durable(error)) from error
            raise await self._whose(error, message()[:-1]) from error
        finally:
            connection.slow_commit = None
        # Postgres answers the COMMIT of a failed transaction with ROLLBACK, and without an error (J9).
        if (tag := answers[-1].command_status) != b"COMMIT":
            raise GuardViolated(f"COMMIT was answered by {tag!r}: the transaction had failed before")
        self.committed = True
        return answers

    async def _whose(self, error: psycopg.Error, statements: Sequence[bytes]) -> Exception:
        """The exception for an error of these statements of the engine. User code that ran before may be at fault: its
        deferred triggers, or its changes of our tables. To tell, the statements are sent in a transaction without user
        code: if they fail there too, our tables are not as they should be."""
        connection = self._connection
        if not self._lending.runs:
            return self._ours(error)
        cause = translate(connection, error)
        if cause is error:
            given = {"seal": self._seal, "lock_timeout": self._lock_timeout}
            alone = [*self._beginning(), self._written("open", given), *statements, b"ROLLBACK"]
            try:
                await connection.rollback()
                await connection.simple(b"; ".join(alone))
            except psycopg.Error as again:
                return self._ours(again)
            met_lately = self._pool.missed_at >= self._began - _LATELY
            if met_lately and isinstance(ours := translate(connection, error, ours=True), StoreChanged):
                return ours  # other transactions have met the same problem lately, and it is mended by now
        return cause

    async def _reset(self) -> None:
        await self._pool.reset(self._connection)
        log.warning(_RESET)
