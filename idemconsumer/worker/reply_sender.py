"""Replies: what a handler with `reply=` has decided is told to whoever asks for it, before settlement (D21)."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Final

from idemconsumer.engine.work import Work
from idemconsumer.logs import log
from idemconsumer.message.reply_address import address_of
from idemconsumer.ports.broker import Broker, Reply, Replying, Unsent
from idemconsumer.rules.replies import LONGEST_PAUSE, answer_of, reply_id
from idemconsumer.rules.values import Outcome

_SHOWN: Final = 100  # characters of an address, which a producer has chosen
_FORGET: Final = 4 * LONGEST_PAUSE


class Replies:
    """Those of one process. `brokers` are its clients by scheme: a reply goes to the broker of its request."""

    def __init__(self, brokers: Mapping[str, Broker]) -> None:
        self._brokers = brokers
        self._waiting: dict[str, dict[str, float]] = {}  # by scheme and id: when it was tried last

    async def send(self, decided: Sequence[tuple[Work, Outcome]]) -> list[bool]:
        """Answer those that ask for it, all at once. For each whether it may be settled: its reply is confirmed, or
        there is none to send, or nobody there who takes it (D23)."""
        replies = [self._reply(work, outcome) for work, outcome in decided]
        unsent: dict[str, Unsent | None] = {}
        for scheme in dict.fromkeys(reply.address.scheme for reply in replies if reply is not None):
            # Of the same request twice in a group one reply goes out: a broker's client tells them apart by their ids.
            theirs = {each.id: each for each in replies if each is not None and each.address.scheme == scheme}
            unsent |= await self._send(scheme, list(theirs.values()))
        settled = []
        for (work, _), reply in zip(decided, replies, strict=True):
            found = None if reply is None else unsent[reply.id]
            if reply is not None and found is not None and found.final:
                self._give_up(work, reply, found)
            settled.append(found is None or found.final)
        return settled

    def _reply(self, work: Work, outcome: Outcome) -> Reply | None:
        allowed = work.handler.options.reply
        # A saga that this worker continues has no delivery: the one that is held, or comes again, is answered (L20).
        if allowed is None or (work.saga is not None and work.saga.resumed):
            return None
        if (answer := answer_of(outcome)) is None:
            return None
        message = work.message
        address = address_of(message)
        if address is None or not isinstance(self._brokers.get(address.scheme), Replying):
            log.debug("no reply address", handler=work.handler.name, key=work.key.hex()[:12])
            return None
        if allowed.fullmatch(address.to) is None:
            log.warning("reply address not allowed", handler=work.handler.name, source=message.source,
                        position=message.position, address=address.to[:_SHOWN])  # fmt: skip
            return None
        return Reply(address, reply_id(work.key, address, answer), answer.body, answer.content_type, answer.outcome)

    async def _send(self, scheme: str, replies: Sequence[Reply]) -> dict[str, Unsent | None]:
        broker = self._brokers[scheme]
        assert isinstance(broker, Replying)
        found = dict(zip([each.id for each in replies], await broker.reply(replies), strict=True))
        now = asyncio.get_running_loop().time()
        waited = bool(waiting := self._waiting.setdefault(scheme, {}))
        for id, unsent in found.items():
            waiting.pop(id, None)
            if unsent is not None and not unsent.final:
                waiting[id] = now
                if not waited:
                    log.error("replies cannot be sent, waiting", broker=scheme, error=unsent.text)
                    waited = True
        # What is tried no more was taken back by its broker.
        self._waiting[scheme] = {id: since for id, since in waiting.items() if now - since < _FORGET}
        if waited and not self._waiting[scheme]:
            log.info("replies can be sent again", broker=scheme)
        return found

    def _give_up(self, work: Work, reply: Reply, unsent: Unsent) -> None:
        say = log.info if unsent.gone else log.error
        say("reply given up", handler=work.handler.name, source=work.message.source, position=work.message.position,
            address=reply.address.to[:_SHOWN], error=unsent.text)  # fmt: skip
