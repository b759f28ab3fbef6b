"""Replies: the decision of a handler with `reply=` is sent to the requester before the delivery is settled (D21)."""

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

_SHOWN: Final = 100  # characters of an address to log, since a producer has chosen it
_FORGET: Final = 4 * LONGEST_PAUSE


class Replies:
    """The replies of one process. `brokers`: its clients by scheme; a reply goes to the broker of its request."""

    def __init__(self, brokers: Mapping[str, Broker]) -> None:
        self._brokers = brokers
        self._waiting: dict[str, dict[str, float]] = {}  # by scheme and id: when the reply was last tried

    async def send(self, decided: Sequence[tuple[Work, Outcome]]) -> list[bool]:
        """Answer all requests that ask for a reply, at once. Returns for each whether it may be settled. It may if its
        reply is confirmed, if there is no reply to send, or if nobody can receive it (D23)."""
        replies = [self._reply(work, outcome) for work, outcome in decided]
        unsent: dict[str, Unsent | None] = {}
        for scheme in dict.fromkeys(reply.address.scheme for reply in replies if reply is not None):
            # The same request twice in a group gets one reply: a broker's client identifies replies by their ids.
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
        # A resumed saga has no delivery: its reply goes with the one that is held, or that is redelivered (L20).
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
        # The broker has taken back the requests of replies that are no longer tried.
        self._waiting[scheme] = {id: since for id, since in waiting.items() if now - since < _FORGET}
        if waited and not self._waiting[scheme]:
            log.info("replies can be sent again", broker=scheme)
        return found

    def _give_up(self, work: Work, reply: Reply, unsent: Unsent) -> None:
        say = log.info if unsent.gone else log.error
        say("reply given up", handler=work.handler.name, source=work.message.source, position=work.message.position,
            address=reply.address.to[:_SHOWN], error=unsent.text)  # fmt: skip
