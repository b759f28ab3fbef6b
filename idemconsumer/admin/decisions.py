"""A person's answer for a call of unknown outcome (L52)."""

from __future__ import annotations

from typing import Any, Final

from idemconsumer.admin.audit import note_saga
from idemconsumer.errors import ConfigurationError
from idemconsumer.message import codecs
from idemconsumer.ports.handler import Done, NotDone
from idemconsumer.rules.values import StepState
from idemconsumer.stores.claims import PostgresClaims

_STATEMENTS: Final = {
    (StepState.INTENT, True): ("decide_done", "done"),
    (StepState.INTENT, False): ("decide_not_done", "not done"),
    (StepState.UNDO_INTENT, True): ("decide_undone", "undone"),
    (StepState.UNDO_INTENT, False): ("decide_not_undone", "not undone"),
}


async def decide(
    claims: PostgresClaims, key: bytes, step: str, answer: Done[Any] | NotDone, attempt: int | None, by: str | None
) -> None:
    """In a transaction that holds the saga's row, and that the caller completes. `answer` is about the undo, if that is
    what was begun. Raises ConfigurationError when that step has no call of unknown outcome, or another `attempt` of it
    is open, and TypeError when the result is not JSON. `by`: the person who decides, if one does."""
    rows = await claims.send("open_calls", {"key": key})
    open_calls = {name: (StepState(state), begun) for name, state, begun in rows}
    state, begun = open_calls.get(step, (None, 0))
    if state is None:
        there = ", ".join(map(repr, open_calls)) or "no step"
        raise ConfigurationError(
            f"saga {key.hex()[:12]}: step {step!r} is not a call of unknown outcome; these are: {there}"
        )
    if attempt is not None and attempt != begun:
        raise ConfigurationError(
            f"saga {key.hex()[:12]}: attempt {begun} of step {step!r} is open, not {attempt}, so the answer is out of "
            "date; ask the remote again"
        )
    done = answer if isinstance(answer, Done) else None
    if state is StepState.UNDO_INTENT and done is not None and done.result is not None:
        raise ConfigurationError(f"step {step!r} was being undone, and an undo has no output; write null")
    output = None if done is None else codecs.encode(done.result, "output", "give", compared=False)
    statement, word = _STATEMENTS[state, done is not None]
    body, content_type = (None, None) if output is None else (output.body, output.content_type)
    await claims.send("note", {"key": key, "what": "decided", "detail": f"step {step}: {word}"})
    if by is not None:
        await note_saga(claims, key, by, "decide", f"step {step}: {word}")
    await claims.send(statement, {"key": key, "name": step, "output": body, "content_type": content_type})
