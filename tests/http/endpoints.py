"""An endpoint that does what the test says."""

from __future__ import annotations

import asyncio

from starlette.requests import Request as StarletteRequest
from starlette.responses import Response


class Counting:
    """Counts its runs; may fail, and may wait."""

    def __init__(self, status: int = 201) -> None:
        self.status = status
        self.runs = 0
        self.error: Exception | None = None
        self.inside, self.go = asyncio.Event(), asyncio.Event()
        self.go.set()
        self.cancelled = False

    async def __call__(self, request: StarletteRequest) -> Response:
        self.runs += 1
        self.inside.set()
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        if self.error is not None:
            raise self.error
        return Response(None if self.status == 204 else f"run {self.runs}", self.status)
