"""Ask whether something was done: a call with an unknown outcome, or the saga of a lost worker."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

from idemconsumer.errors import SagaMisused
from idemconsumer.handlers.handler import BoundHandler, Call
from idemconsumer.message import codecs
from idemconsumer.message.message import StoredResult
from idemconsumer.ports.handler import Done, NotDone, Unknown
from idemconsumer.ports.leases import LeasedSaga
from idemconsumer.ports.observer import Point
from idemconsumer.rules.saga import refusal
from idemconsumer.sagas.functions import GRACE, StepFunctions, left_behind
from idemconsumer.sagas.step import StepCall, StepSpec
from idemconsumer.stores.leases import PostgresLeases
from idemconsumer.user_code.call import call_in_transaction, call_user_code
from idemconsumer.user_code.cancellation import run_isolated, run_mortal

ReconcileAnswer: TypeAlias = Done[Any] | NotDone | Unknown


async def ask_remote(
    functions: StepFunctions, spec: StepSpec, call: StepCall, fail_on: tuple[type[Exception], ...]
) -> ReconcileAnswer:
    """Ask a call's `reconcile` whether the remote has done it. Raises what it raises, and SagaMisused for a refusal:
    the handler would take it for the call's outcome, which is still unknown."""
    assert spec.reconcile is not None
    asked = f"reconcile of step {spec.name!r}"
    try:
        asking = functions.begin(spec.reconcile, call, *spec.args, gets="step")
        answer = await call_user_code(asking, functions.limit(spec.limits.timeout))
    except Exception as error:
        if refusal(error, fail_on) is None:
            raise
        raise SagaMisused(
            f"{asked} raised {type(error).__name__}, but a reconcile cannot refuse; "
            "return Done(result), NotDone() or Unknown()"
        ) from error
    return checked_answer(asked, answer)


async def ask_remote_of_undo(
    functions: StepFunctions, spec: StepSpec, call: StepCall, output: object
) -> ReconcileAnswer:
    """Ask a call's `reconcile_undo` whether the remote has undone it. Raises what it raises."""
    assert spec.reconcile_undo is not None
    asking = functions.begin(spec.reconcile_undo, call, output, *spec.args, gets="step and the step's output")
    answer = await call_user_code(asking, functions.limit(spec.limits.timeout))
    return checked_answer(f"reconcile_undo of step {spec.name!r}", answer)


async def complete_if_done(
    leases: PostgresLeases,
    saga: LeasedSaga,
    handler: BoundHandler,
    call: Call,
    functions: StepFunctions,
    at: Callable[[Point], None],
) -> Done[StoredResult | None] | NotDone | Unknown:
    """Ask the handler's `reconcile` whether the saga was done before its worker was lost; if so, COMPLETED with that
    result.

    Asked in the transaction that completes the saga (L16), so that no other worker can continue it meanwhile.
    """
    async with leases.completion(saga) as opened:

        def accept(ended: tuple[object, BaseException | None]) -> ReconcileAnswer:
            given, error = ended
            if isinstance(error, Exception):
                raise error
            answer = checked_answer("reconcile", given if error is None else error)
            opened.check()
            return answer

        left = partial(left_behind, handler.reconcile)
        asking = run_mortal(run_isolated(handler.reconcile(call, opened.tx(), saga.attempt)), GRACE, left)
        answer = await call_in_transaction(opened.claims, asking, functions.limit_in_transaction(), accept)
        if not isinstance(answer, Done):
            return answer
        result = codecs.encode(answer.result, compared=False)
        at(Point.SEALING)
        await opened.finish(result)
        at(Point.COMMITTED)
        return Done(result)


def checked_answer(asked: str, answer: object) -> ReconcileAnswer:
    """The answer of the reconcile that `asked` names. Raises SagaMisused for anything else."""
    if isinstance(answer, Done | NotDone | Unknown):
        return answer
    given = f"the class {answer.__name__}" if isinstance(answer, type) else type(answer).__name__
    raise SagaMisused(f"{asked} returned {given}; return Done(result), NotDone() or Unknown()")
