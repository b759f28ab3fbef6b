"""Dead letters on their way to where `dead_letter_to` says (O19). The row is the truth; this tells others of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from idemconsumer.duty import Duty
from idemconsumer.errors import BadMessage, ConfigurationError, StoreUnavailable, Unavailable
from idemconsumer.logs import log
from idemconsumer.message.delivered import with_delivered
from idemconsumer.message.headers import decode_headers
from idemconsumer.message.message import Message
from idemconsumer.message.reply_address import MESSAGE_ID
from idemconsumer.ports.broker import Broker, Outgoing
from idemconsumer.ports.observer import Point
from idemconsumer.redaction import error_text
from idemconsumer.rules.backoff import backoff
from idemconsumer.rules.session_pause import SOON
from idemconsumer.stores.pool import Pool
from idemconsumer.user_code.cancellation import ends_this_task
from idemconsumer.worker.outage import said_by_lanes

_TOGETHER: Final = 16  # letters in one publish
_SWEEP: Final = 15.0  # seconds between two looks for what other workers have left
_TAKEN: Final = 60.0  # seconds until others may take what this one is sending; a publish has 30 s
_LONGEST: Final = 60.0  # seconds between two tries
_UNFIT: Final = (BadMessage, ConfigurationError)
"""What a broker's adapter says of a message that cannot be sent as it is. Nothing else is a message's fault (X10)."""
_GROUP: Final = "MessageGroupId"


@dataclass(frozen=True, slots=True)
class Letter:
    """A dead letter as it is forwarded. `round`: how many times it was written. `body` may be the beginning only;
    `size` and `sha256` are of the whole. `error` is the type of the exception, if one is to blame."""

    id: int
    round: int
    handler: str
    source: str
    position: str
    reason: str
    error: str | None
    body: bytes
    headers: bytes
    delivered: bytes | None
    size: int
    sha256: bytes


def outgoing(letter: Letter, app: str, destination: str, *, whole: bool = True) -> Outgoing:
    """The message as it arrived, with headers that say what became of it. Of a header that came more than once it has
    the last value. Without `whole` it has neither body nor headers of its own.

    Its message id is that of the letter, the same each time that it is sent; after a redrive with the round's number.
    """
    message = with_delivered(Message(letter.source, letter.body, decode_headers(letter.headers)), letter.delivered)
    body = message.body if whole else b""
    number = f"{app}-dead-{letter.id}" + (f".{letter.round}" if letter.round > 1 else "")
    headers: dict[str, str | bytes] = {
        **(message.headers if whole else {}),
        MESSAGE_ID: number,
        "idemconsumer-dead-letter": str(letter.id),
        "idemconsumer-dead-handler": letter.handler,
        "idemconsumer-dead-reason": letter.reason,
        "idemconsumer-dead-source": letter.source,
        "idemconsumer-dead-position": letter.position,
    }
    if letter.error is not None:
        headers["idemconsumer-dead-error"] = letter.error
    if len(body) < letter.size:
        headers["idemconsumer-dead-truncated"] = str(letter.size)
        headers["idemconsumer-dead-sha256"] = letter.sha256.hex()
    if message.message_id is not None:
        headers["idemconsumer-dead-message-id"] = message.message_id
    if message.record_key is not None and not destination.startswith("kafka:"):
        headers["idemconsumer-dead-record-key"] = message.record_key
    if destination.startswith("sqs:") and destination.endswith(".fifo"):
        headers[_GROUP] = message.headers.get(_GROUP, number)
    return Outgoing(body, headers, number, record_key=message.record_key)


class Forwarder:
    """Forwards the letters of an app's handlers that have one destination."""

    def __init__(
        self,
        pool: Pool,
        app: str,
        handlers: Sequence[str],
        destination: str,
        broker: Broker,
        at: Callable[[Point, str, Sequence[bytes]], None],
    ) -> None:
        self._pool = pool
        self._app = app
        self._handlers = list(handlers)
        self._destination = destination
        self._name = destination.partition(":")[2]
        self._broker = broker
        self._at = at
        self._duty = Duty(
            self._forward,
            _SWEEP,
            spread=True,
            again=partial(backoff, first=1.0, cap=_LONGEST),
            failed=self._say_failed,
            works=self._say_works,
            proves=False,  # that there was none to send tells nothing of its destination
        )

    def wake(self) -> None:
        """This process has written a letter."""
        self._duty.wake()

    def stop(self) -> None:
        """`run` returns, after one more look if the destination can be reached."""
        self._duty.stop()

    async def run(self) -> None:
        """Until it is stopped or cancelled. An outage, of the destination too, only delays it."""
        await self._duty.run()

    async def _forward(self) -> float | None:
        sent = _TOGETHER
        try:
            while sent == _TOGETHER:
                if (sent := await self._some()) > 0:
                    self._duty.worked()
        except StoreUnavailable as error:
            if not said_by_lanes(error):
                raise
            return SOON  # no failure of the destination: a letter that is written now, or a drain, is a reason to look
        return None

    async def _some(self) -> int:
        """Forward what is due, up to `_TOGETHER`, and return how many that were. Raises what publishing raises."""
        given = {"app": self._app, "handlers": self._handlers, "limit": _TOGETHER, "taken": _TAKEN}
        rows = await self._pool.alone("take_forwards", given)
        letters = [Letter(*row[1:]) for row in rows]
        if not letters:
            return 0
        try:
            await self._send(letters)
        except BaseException as error:
            if ends_this_task(error):
                raise
            after = backoff(max(row[0] for row in rows), first=0.5, cap=_LONGEST)
            await self._pool.alone("forward_later", _named(letters) | {"after": after})
            raise
        self._at(Point.FORWARDED, self._handlers[0], ())
        await self._pool.alone("forwarded", _named(letters))
        return len(letters)

    async def _send(self, letters: Sequence[Letter]) -> None:
        try:
            messages = [outgoing(letter, self._app, self._destination) for letter in letters]
            await self._broker.publish(self._name, messages)
        except _UNFIT:  # one of them: its size, the name of a header
            for letter in letters:
                await self._send_alone(letter)

    async def _send_alone(self, letter: Letter) -> None:
        try:
            await self._broker.publish(self._name, [outgoing(letter, self._app, self._destination)])
        except _UNFIT as error:
            log.warning("dead letter forwarded without its message", handler=letter.handler, letter=letter.id,
                        destination=self._destination, error=type(error).__name__)  # fmt: skip
            await self._broker.publish(self._name, [outgoing(letter, self._app, self._destination, whole=False)])

    def _say_failed(self, error: BaseException) -> None:
        text = error_text(error) if isinstance(error, Unavailable) else type(error).__name__
        log.error("dead letters cannot be forwarded, will retry", destination=self._destination, error=text)

    def _say_works(self) -> None:
        log.info("dead letters are forwarded again", destination=self._destination)


def _named(letters: Sequence[Letter]) -> dict[str, Any]:
    return {"letters": [letter.id for letter in letters], "rounds": [letter.round for letter in letters]}
