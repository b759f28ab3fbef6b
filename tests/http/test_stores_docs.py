"""The reconcile job of docs/stores.md, as printed (H35, H36)."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from starlette.responses import JSONResponse

from idemconsumer import App, Done, NotDone, Unknown
from idemconsumer.http import Idempotency, LostRequest, Response, Route, current_key
from tests.http.site import by_header, client, replayed, service
from tests.support import ROOT
from tests.support.servers.redis import RedisServer
from tests.support.waiting import PATIENCE

PAGE = (ROOT / "docs" / "stores.md").read_text("utf-8")


class Gateway:
    """Charges; an answer may never come."""

    def __init__(self) -> None:
        self.charges: dict[str, Any] = {}
        self.charged = asyncio.Event()
        self.answers = False

    async def charge(self, order: Any, reference: str) -> Any:
        self.charges[reference] = SimpleNamespace(receipt=b'{"charge": 1}')
        self.charged.set()
        if not self.answers:
            await asyncio.Event().wait()
        return {"charge": 1}

    async def charge_of(self, reference: str) -> Any:
        return self.charges.get(reference)


@pytest.fixture
async def printed(redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Any]:
    redis_server.ask("FLUSHALL")
    monkeypatch.setenv("IDEMCONSUMER_REDIS", redis_server.address)
    (code,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    module = ModuleType("printed")
    monkeypatch.setitem(sys.modules, "printed", module)
    vars(module).update(
        App=App, Done=Done, NotDone=NotDone, Unknown=Unknown, Idempotency=Idempotency, LostRequest=LostRequest,
        Response=Response, Route=Route, current_key=current_key, JSONResponse=JSONResponse, datetime=datetime, UTC=UTC,
        timedelta=timedelta, account=by_header, gateway=Gateway(),
    )  # fmt: skip
    exec(code.replace("/charges", "/orders"), vars(module))
    yield module
    await module.idempotency.close()


async def test_the_job_settles_what_was_charged_and_releases_what_was_not(
    printed: Any, redis_server: RedisServer
) -> None:
    async with client(service(printed.idempotency, printed.charge)) as shop:
        first = asyncio.create_task(shop.post())
        await asyncio.wait_for(printed.gateway.charged.wait(), PATIENCE)
        (name,) = redis_server.ask("KEYS", "*")
        kept = redis_server.ask("DUMP", name)
        first.cancel()  # which releases the key, as a killed process would not
        await asyncio.wait({first})
        await printed.idempotency.close()
        redis_server.ask("RESTORE", name, 60_000, kept, "REPLACE")
        redis_server.ask("HSET", name, "u", 0)

        assert [lost.key for lost in await printed.idempotency.lost()] == list(printed.gateway.charges)
        await printed.job()
        got = await shop.post()
        assert (got.status_code, got.json(), replayed(got)) == (201, {"charge": 1}, True)

        redis_server.ask("RESTORE", name, 60_000, kept, "REPLACE")
        redis_server.ask("HSET", name, "u", 0)
        printed.gateway.charges.clear()
        await printed.job()
        assert len(await printed.idempotency.lost()) == 1, "it may be on its way"
        began = int(redis_server.ask("HGET", name, "b"))
        redis_server.ask("HSET", name, "b", began - 3_600_000_000)
        await printed.job()
        assert await printed.idempotency.lost() == []
        printed.gateway.answers = True
        assert not replayed(await shop.post())
