"""An SQS that does what the real one is allowed to do, and ElasticMQ never does. In this process, over HTTP.

Always: only the latest receipt handle of a message deletes or extends it; an older one is accepted and does nothing.
On demand: partial `Failed[]`, throttling, messages delivered again for no reason (in flight or deleted), answers that
come late. Nothing becomes visible by itself: `lapse` says when, so that no test waits for a clock.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

Json = dict[str, Any]


@dataclass
class Stored:
    id: str
    entry: Json
    handle: str = ""
    receives: int = 0
    visible: bool = True


@dataclass
class SqsDouble:
    """One queue, of any name. `requests` counts what was asked; `extended` is how often each message was."""

    attributes: dict[str, str] = field(default_factory=lambda: {"VisibilityTimeout": "10"})
    requests: Counter[str] = field(default_factory=Counter)
    extended: Counter[str] = field(default_factory=Counter)
    batches: list[int] = field(default_factory=list)
    throttling: Counter[str] = field(default_factory=Counter)
    refuse: Callable[[str, str], Json | None] = lambda operation, message: None
    repeat: Callable[[Stored], bool] = lambda message: False
    answers: asyncio.Event = field(default_factory=asyncio.Event)
    address: str = ""

    def __post_init__(self) -> None:
        self.answers.set()
        self.messages: dict[str, Stored] = {}
        self.graveyard: dict[str, Stored] = {}
        self._numbers = itertools.count(1)
        self._arrived = asyncio.Event()

    # ----------------------------------------------------------------------------------------------- what tests ask for
    def put(self, body: str, **entry: Any) -> str:
        stored = Stored(f"m{next(self._numbers)}", {"MessageBody": body, **entry})
        self.messages[stored.id] = stored
        self._arrived.set()
        return stored.id

    def lapse(self, *messages: str) -> None:
        """The visibility timeout of these, or of all, is over."""
        for message in messages or list(self.messages):
            self.messages[message].visible = True
        self._arrived.set()

    def resurrect(self) -> None:
        """A server that was down comes back, and knows nothing of what was deleted meanwhile."""
        for stored in self.graveyard.values():
            stored.visible = True
            self.messages[stored.id] = stored
        self.graveyard.clear()
        self._arrived.set()

    @property
    def empty(self) -> bool:
        return not self.messages

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[SqsDouble]:
        app = web.Application(client_max_size=2**24)
        app.router.add_post("/", self._answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        self.address = f"http://{host}:{port}"
        try:
            yield self
        finally:
            await runner.cleanup()

    # ----------------------------------------------------------------------------------------------------- the protocol
    async def _answer(self, request: web.Request) -> web.Response:
        operation = request.headers["X-Amz-Target"].partition(".")[2]
        self.requests[operation] += 1
        if self.throttling[operation] > 0:
            self.throttling[operation] -= 1
            return _json({"__type": "com.amazonaws.sqs#RequestThrottled", "message": "Rate exceeded"}, status=400)
        asked: Json = json.loads(await request.read())
        answer = getattr(self, f"_{operation}")(asked)
        return _json(answer if isinstance(answer, dict) else await answer)

    def _GetQueueUrl(self, asked: Json) -> Json:  # noqa: N802
        return {"QueueUrl": f"{self.address}/queue/{asked['QueueName']}"}

    def _GetQueueAttributes(self, asked: Json) -> Json:  # noqa: N802
        visible = sum(stored.visible for stored in self.messages.values())
        counts = {
            "ApproximateNumberOfMessages": str(visible),
            "ApproximateNumberOfMessagesNotVisible": str(len(self.messages) - visible),
        }
        return {"Attributes": self.attributes | counts}

    def _SendMessageBatch(self, asked: Json) -> Json:  # noqa: N802
        done, failed = [], []
        for entry in asked["Entries"]:
            if (refusal := self.refuse("send", entry["MessageBody"])) is not None:
                failed.append({"Id": entry["Id"], **refusal})
            else:
                done.append({"Id": entry["Id"], "MessageId": self.put(entry.pop("MessageBody"), **entry)})
        return {"Successful": done, "Failed": failed}

    async def _ReceiveMessage(self, asked: Json) -> Json:  # noqa: N802
        deadline = asyncio.get_running_loop().time() + asked["WaitTimeSeconds"]
        while not (taken := self._take(asked["MaxNumberOfMessages"])):
            self._arrived.clear()
            try:
                async with asyncio.timeout_at(deadline):
                    await self._arrived.wait()
            except TimeoutError:
                break
        await self.answers.wait()
        return {"Messages": [_received(stored, handle) for stored, handle in taken]}

    def _take(self, count: int) -> list[tuple[Stored, str]]:
        taken: list[tuple[Stored, str]] = []
        for stored in list(self.messages.values()):
            if len(taken) < count and (stored.visible or self.repeat(stored)):
                stored.visible = False
                stored.receives += 1
                stored.handle = f"{stored.id}/{stored.receives}"
                taken.append((stored, stored.handle))
        return taken

    def _DeleteMessageBatch(self, asked: Json) -> Json:  # noqa: N802
        def delete(stored: Stored, _: Json) -> None:
            self.graveyard[stored.id] = self.messages.pop(stored.id)

        self.batches.append(len(asked["Entries"]))
        return self._each("delete", asked, delete)

    def _ChangeMessageVisibilityBatch(self, asked: Json) -> Json:  # noqa: N802
        def change(stored: Stored, entry: Json) -> None:
            if entry["VisibilityTimeout"]:
                self.extended[stored.id] += 1
            else:
                self.lapse(stored.id)

        return self._each("change", asked, change)

    def _each(self, operation: str, asked: Json, act: Callable[[Stored, Json], None]) -> Json:
        done, failed = [], []
        for entry in asked["Entries"]:
            message = entry["ReceiptHandle"].partition("/")[0]
            if (refusal := self.refuse(operation, message)) is not None:
                failed.append({"Id": entry["Id"], **refusal})
                continue
            stored = self.messages.get(message)
            if stored is not None and stored.handle == entry["ReceiptHandle"]:
                act(stored, entry)
            done.append({"Id": entry["Id"]})
        return {"Successful": done, "Failed": failed}


BUSY: Json = {"SenderFault": False, "Code": "InternalError", "Message": "try again"}


def _received(stored: Stored, handle: str) -> Json:
    system = {"ApproximateReceiveCount": str(stored.receives)}
    for name in ("MessageGroupId", "MessageDeduplicationId"):
        if name in stored.entry:
            system[name] = stored.entry[name]
    return {
        "MessageId": stored.id,
        "ReceiptHandle": handle,
        "Body": stored.entry["MessageBody"],
        "Attributes": system,
        "MessageAttributes": stored.entry.get("MessageAttributes", {}),
    }


def _json(answer: Json, status: int = 200) -> web.Response:
    return web.json_response(answer, status=status, content_type="application/x-amz-json-1.0")
