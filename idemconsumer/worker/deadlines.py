"""Rejects accepted messages that have not started in time (H44), unless the handler's reconcile decides otherwise
(H47). Several workers may sweep at the same time: each row is handled by one of them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, TypeAlias

from idemconsumer.duty import Duty
from idemconsumer.engine import decoding as reading
from idemconsumer.engine.blame import rejection_of, said
from idemconsumer.errors import IdemConsumerError, Interrupted, NotReadNow, Retry, StoreChanged, StoreUnavailable
from idemconsumer.handlers.arguments import Done, NotDone, Unknown
from idemconsumer.handlers.durations import retry_delay
from idemconsumer.handlers.handler import BoundHandler
from idemconsumer.logs import log
from idemconsumer.message import codecs
from idemconsumer.message.message import StoredResult
from idemconsumer.redaction import error_text
from idemconsumer.rules.progress import NOT_IN_TIME, NOT_IN_TIME_STATUS
from idemconsumer.rules.verdicts import refused
from idemconsumer.stores.acceptance import reject, time_out
from idemconsumer.stores.overdue import Overdue, ask_later, asking, complete, take_overdue
from idemconsumer.stores.pool import Pool
from idemconsumer.stores.sharing import PARTY
from idemconsumer.user_code.call import call_in_transaction, without_exit
from idemconsumer.user_code.cancellation import isolated, uninterrupted
from idemconsumer.user_code.time_limit import TimeLimit
from idemconsumer.worker.outage import said_by_lanes

_SWEEP: Final = 5.0  # seconds between two sweeps
_TOGETHER: Final = 200
_BEYOND: Final = 30.0  # seconds beyond the reconcile's time limit until another sweeper may ask about a row
_Answer: TypeAlias = Done[object] | NotDone | Unknown
_REJECTION: Final = codecs.encode_rejection(NOT_IN_TIME, None, NOT_IN_TIME_STATUS)


class Deadlines:
    """Sweeps the accepted messages of the handlers that have a `max_age`."""

    def __init__(self, pool: Pool, handlers: Sequence[BoundHandler]) -> None:
        self._pool = pool
        bounded = [handler for handler in handlers if handler.options.max_age]
        self._names = [handler.identity for handler in bounded if not handler.reconciles]
        self._asked = {handler.identity: handler for handler in bounded if handler.reconciles}
        self._taken = max((each.options.timeout for each in self._asked.values()), default=0.0) + _BEYOND

    async def run(self) -> None:
        """Run until cancelled. An outage only delays it."""
        sweeps = [sweep for sweep, has in ((self._sweep_all, self._names), (self._ask_all, self._asked)) if has]
        duties = [Duty(sweep, _SWEEP, spread=True, failed=_say_failed, quiet=_quiet) for sweep in sweeps]
        await asyncio.gather(*(duty.run() for duty in duties))

    async def _sweep_all(self) -> None:
        while (ended := await self.sweep()) is not None and len(ended) == _TOGETHER:
            pass

    async def _ask_all(self) -> None:
        while await self.ask() is not None:
            pass

    async def sweep(self) -> list[bytes] | None:
        """See `stores.accepting.time_out`."""
        ended = await time_out(self._pool, self._names, _TOGETHER, _REJECTION)
        if ended:
            log.warning("accepted message not started in time", messages=len(ended))
        return ended

    async def ask(self) -> bytes | None:
        """Ask the reconcile of one overdue message; returns its key, or None if there is none. Raises StoreUnavailable,
        CommitUnknown and Contention: the message is asked about again later."""
        if (taken := await take_overdue(self._pool, list(self._asked), self._taken)) is None:
            return None
        if not taken.waits:
            return taken.key
        handler = self._asked[taken.name]
        nobody = taken.message is None  # it was accepted when the handler had no reconcile
        if nobody or taken.failed > handler.options.max_attempts:  # or every process that asked died of it
            await self._reject(handler, taken, _REJECTION)
            return taken.key
        try:
            answer = await self._answer(handler, taken)
        except (StoreUnavailable, Interrupted, asyncio.CancelledError) as error:
            if not (isinstance(error, IdemConsumerError) and error.by_function):
                await self._uncount(taken)
                raise
            await self._failed(handler, taken, error)
        except Retry as retry:
            await self._later(handler, taken, retry)
        except NotReadNow as not_now:  # raised by its decode= (D26: a message that cannot be read now has not failed)
            await self._later(handler, taken, not_now.error if isinstance(not_now.error, Retry) else None)
        except Exception as error:  # noqa: BLE001 - of the user's function
            await self._failed(handler, taken, error)
        else:
            if isinstance(answer, NotDone | StoredResult):
                await self._reject(handler, taken, _REJECTION if isinstance(answer, NotDone) else answer)
            elif isinstance(answer, Unknown):
                await self._later(handler, taken)
            elif answer is None:
                await self._uncount(taken)
        return taken.key

    async def _answer(self, handler: BoundHandler, taken: Overdue) -> _Answer | StoredResult | None:
        """The answer of the reconcile, or the rejection that it raises.

        If the answer is Done, it is committed together with the function's writes; otherwise nothing is. Returns None
        if a worker has the message in flight, or it has ended.
        """
        assert taken.message is not None
        call = await reading.read(handler, taken.message)
        PARTY.set(handler.name)  # its function takes time and a connection (D13: each handler has a share of the pool)
        async with asking(self._pool, taken) as claims:
            if claims is None:
                return None

            def accept(value: object) -> tuple[_Answer, StoredResult | None]:
                if not isinstance(value, Done | NotDone | Unknown):
                    what = "Done(result), NotDone() or Unknown(), or raise Reject or Retry"
                    raise TypeError(f"reconcile returned {type(value).__name__}; return {what}")
                claims.check()
                return value, codecs.encode_result(value.result) if isinstance(value, Done) else None

            tx = claims.tx()
            running = isolated(without_exit(handler.reconcile(call, tx, taken.asked)))
            limit = TimeLimit(handler.options.timeout)
            try:
                answer, result = await call_in_transaction(claims, running, limit, accept)
            except Exception as error:
                if not refused(error, handler.options.fail_on):
                    raise
                return codecs.encode_rejection(*rejection_of(error))
            if isinstance(answer, Done):
                await complete(claims, taken, result)
                log.info("accepted message not started in time, already done", handler=handler.name, key=taken.key)
            return answer

    async def _failed(self, handler: BoundHandler, taken: Overdue, error: Exception) -> None:
        of = {"handler": handler.name, "key": taken.key, "failures": taken.failed, **said(error)}
        log.error("reconcile of an accepted message failed", **of)
        if taken.failed < handler.options.max_attempts:
            await self._later(handler, taken, failed=taken.failed)
        else:
            await self._reject(handler, taken, _REJECTION)

    async def _uncount(self, taken: Overdue) -> None:
        """Take back the counted failure: the message was not asked about, or the worker or the database went away."""
        with suppress(StoreUnavailable):
            await uninterrupted(ask_later(self._pool, taken, self._taken, taken.failed - 1))

    async def _later(
        self, handler: BoundHandler, taken: Overdue, retry: Retry | None = None, *, failed: int = 0
    ) -> None:
        after = handler.options.backoff.delay(taken.asked, random.random())
        if retry is not None and retry.after is not None:
            after = retry_delay(retry.after, handler.name)
        # At least _SWEEP, or the message would be asked about without a pause.
        await ask_later(self._pool, taken, max(after, _SWEEP), failed)

    async def _reject(self, handler: BoundHandler, taken: Overdue, rejection: StoredResult) -> None:
        if await reject(self._pool, [taken.key], rejection, asked=taken.asked):
            log.warning("accepted message not started in time", handler=handler.name, key=taken.key)


def _quiet(error: BaseException) -> bool:
    """Errors not to log: an interrupted statement may have committed, and the next sweep sees its result."""
    return said_by_lanes(error) or isinstance(error, Interrupted)


def _say_failed(error: BaseException) -> None:
    text = error_text(error) if isinstance(error, StoreChanged) else type(error).__name__
    log.error("deadlines could not be checked, will retry", error=text)
