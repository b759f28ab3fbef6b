"""A handler whose messages are signals: the signal is stored with the message's record, and so only once (L44)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import TypeAlias, cast

from idemconsumer.errors import HandlerError
from idemconsumer.handlers.arguments import Saga, Tx
from idemconsumer.handlers.handler import HandlerPlan
from idemconsumer.message import extraction
from idemconsumer.message.keys import KeySpec
from idemconsumer.message.message import Message

# Arguments: the handler's transaction, the saga's tenant and key, and the return value of the function.
Send: TypeAlias = Callable[[Tx, str | None, str, object], Awaitable[object]]


def signalling(plan: HandlerPlan, saga: HandlerPlan, saga_key: KeySpec, send: Send) -> HandlerPlan:
    """The plan of a handler that sends the return value of its function to `saga` as a signal, in its own transaction.
    Its result is what `send` returns. Raises HandlerError for a function that takes Saga or Batch, a key that its
    payload does not have, or messages without a tenant if every saga has one."""
    signature = plan.signature
    if signature.needs_saga or signature.batch:
        what = "Saga" if signature.needs_saga else "Batch"
        raise HandlerError(plan.name, f"it sends signals and takes {what}", "take the payload of one message")
    if saga.tenant_spec is not None and plan.tenant_spec is None:
        raise HandlerError(
            plan.name,
            f"it has no `tenant`, but each saga of {saga.name!r} has one, so its signals would reach none of them",
            "write tenant= here too, with the place where its messages have it",
        )
    read = extraction.compile_key(saga_key, signature.payload_type, handler=plan.name, option="saga_key")

    async def invoke(
        payload: object, tx: Tx | Saga | None, message: Message, resources: Mapping[type, object]
    ) -> object:
        given = await signature.invoke(payload, tx, message, resources)
        return await send(cast(Tx, tx), message.tenant, read(message, payload), given)

    return replace(plan, signature=replace(signature, needs_tx=True, needs_message=True, invoke=invoke))
