"""Asking whether something was done: a call whose outcome is unknown, or a saga whose worker was lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from idemconsumer.errors import SagaMisused
from idemconsumer.handlers.handler import BoundHandler, Call
from idemconsumer.message import codecs
from idemconsumer.message.message import StoredResult
from idemconsumer.ports.handler import Done, NotDone, Unknown
from idemconsumer.ports.leases import LeasedSaga, LeaseStore
from idemconsumer.ports.observer import Point
from idemconsumer.rules.saga import refusal
from idemconsumer.sagas.functions import StepFunctions, in_transaction
from idemconsumer.sagas.step import StepCall, StepSpec
from idemconsumer.user_code.call import call_user_code
from idemconsumer.user_code.cancellation import run_isolated

ReconcileAnswer: TypeAlias = Done[Any] | NotDone | Unknown


async def ask_remote(
    functions: StepFunctions, spec: StepSpec, call: StepCall, fail_on: tuple[type[Exception], ...]
) -> ReconcileAnswer:
    """Ask a call's `reconcile` whether the remote has done it. Raises what it raises, and SagaMisused for a refusal:
    the handler would take it for the end of the call, which is not known."""
    assert spec.reconcile is not None
    try:
        answer = await functions.call(functions.limit(), spec.reconcile, call, *spec.args, gets="step")
    except Exception as error:
        if refusal(error, fail_on) is None:
            raise
        raise SagaMisused(
            f"reconcile of step {spec.name!r} raised {type(error).__name__}, and it has nothing to refuse; "
            "return Done(result), NotDone() or Unknown()"
        ) from error
    return checked_answer(f"reconcile of step {spec.name!r}", answer)


async def complete_if_done(
    leases: LeaseStore,
    saga: LeasedSaga,
    handler: BoundHandler,
    call: Call,
    functions: StepFunctions,
    at: Callable[[Point], None],
) -> Done[StoredResult | None] | NotDone | Unknown:
    """Ask the handler's `reconcile` what the lost worker has left behind; once it has said Done, the saga is COMPLETED
    with that result.

    Asked in the transaction that completes the saga (L16), so that no other worker can go on with it meanwhile.
    """
    async with leases.completion(saga) as opened:
        limit = functions.limit_in_transaction()

        async def ask() -> ReconcileAnswer:
            asking = run_isolated(handler.reconcile(call, opened.tx(), saga.attempt))
            answer, error = await call_user_code(asking, limit)
            if isinstance(error, Exception):
                raise error
            return checked_answer("reconcile", answer if error is None else error)

        answer = await in_transaction(opened, ask(), limit)
        if not isinstance(answer, Done):
            return answer
        result = codecs.encode(answer.result)
        at(Point.SEALING)
        await opened.finish(result)
        at(Point.COMMITTED)
        return Done(result)


def checked_answer(asked: str, answer: object) -> ReconcileAnswer:
    """The answer of a reconcile, which `asked` names. Raises SagaMisused for what is none."""
    if isinstance(answer, Done | NotDone | Unknown):
        return answer
    given = f"the class {answer.__name__}" if isinstance(answer, type) else type(answer).__name__
    raise SagaMisused(f"{asked} returned {given}; return Done(result), NotDone() or Unknown()")
