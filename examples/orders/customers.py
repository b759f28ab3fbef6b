"""Clients, as they should be: a post without an answer is sent again, with its key."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress

import httpx

POSTS = 3  # of each order, at once, through both doors
PAUSE = 0.1  # seconds before a client asks again
ANN = {"x-customer": "ann"}


class Customers:
    """What they have ordered, and which order each of their keys was answered with."""

    def __init__(self, doors: Iterable[int]) -> None:
        self._ports = list(doors)
        self._doors = [f"http://127.0.0.1:{port}" for port in self._ports]
        self._http = httpx.AsyncClient(timeout=10.0)
        self.answered: dict[str, set[str]] = {}
        self.repeated = 0

    async def welcome(self) -> bool:
        """Whether every door is open."""
        with suppress(OSError):
            for port in self._ports:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.close()
            return True
        return False

    def served(self, orders: int) -> bool:
        """Whether so many are answered."""
        return len(self.answered) >= orders

    async def order(self, refs: Iterable[str]) -> None:
        for ref in refs:
            self.answered[ref] = set(await asyncio.gather(*(self._placed(ref, number) for number in range(POSTS))))

    async def _placed(self, ref: str, number: int) -> str:
        """Send it until it is taken, as a client does that has no answer: the id of the order, once it is placed."""
        headers = {"idempotency-key": f'"{ref}"', **ANN}
        while True:
            door = self._doors[(number + self.repeated) % len(self._doors)]
            body = {"ref": ref, "sku": "lamp", "quantity": 1}
            with suppress(httpx.TransportError):
                answer = await self._http.post(f"{door}/orders", json=body, headers=headers)
                if answer.status_code == 202:
                    return await self._answer(answer.headers["location"])
                if answer.status_code == 201:  # by now it is placed
                    return str(answer.json()["id"])
                if answer.status_code < 500:
                    raise RuntimeError(f"{ref}: {answer.status_code} {answer.text}")
            self.repeated += 1
            await asyncio.sleep(PAUSE)

    async def _answer(self, url: str) -> str:
        """The id of the order, once it is placed."""
        asked = 0
        while True:
            asked += 1
            door = self._doors[asked % len(self._doors)]
            with suppress(httpx.TransportError):
                answer = await self._http.get(door + url, headers=ANN)
                if answer.status_code == 201:
                    return str(answer.json()["id"])
                if answer.status_code not in (202, 503):
                    raise RuntimeError(f"{url}: {answer.status_code} {answer.text}")
            await asyncio.sleep(PAUSE)

    async def close(self) -> None:
        await self._http.aclose()
