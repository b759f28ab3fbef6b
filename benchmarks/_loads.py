"""What arrives in the store-path parts: the bodies of a run, made anew from a seed by whoever needs them."""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Iterator

import msgspec


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """`count` deliveries. Each inserts a row, or takes one from the stock of one of `hot` articles.

    `duplicates` is the share of deliveries whose message was delivered before in the same run. `rejected` is the share
    that a rule of the business refuses after its write, for good; `failing` the share whose first attempt fails after
    its write and whose second goes through. Nothing new arrives once `seconds` are over. `does`: "two", it inserts and
    takes from the stock; "read", it looks at the stock and then inserts: each of the `hot` articles in turn.
    """

    prefix: str
    count: int
    hot: int = 0
    duplicates: float = 0.0
    rejected: float = 0.0
    failing: float = 0.0
    result: bool = False
    does: str = ""
    seconds: float = math.inf

    @property
    def handler(self) -> str:
        """Which of the engine's handlers takes it."""
        if self.rejected or self.failing:
            return "trouble"
        if self.does:
            return self.does
        return "result" if self.result else "plain"

    def bodies(self) -> Iterator[bytes]:
        chance = random.Random(self.prefix)
        fresh = 0
        end = time.monotonic() + self.seconds
        for _ in range(self.count):
            if time.monotonic() > end:
                return
            if fresh and chance.random() < self.duplicates:
                number = chance.randrange(max(0, fresh - 1_000), fresh)  # redelivered soon, as brokers do
            else:
                number, fresh = fresh, fresh + 1
            yield self._body(number)

    def _body(self, number: int) -> bytes:
        payment: dict[str, object] = {"id": f"{self.prefix}-{number}", "amount": number % 1_000}
        if self.does:
            payment |= {"does": self.does, "sku": number % self.hot}
            return json.dumps(payment).encode()
        mine = random.Random(f"{self.prefix}-{number}") if self.hot or self.rejected or self.failing else None
        if mine is not None:
            if self.hot:
                payment["sku"] = mine.randrange(self.hot)
            trouble = mine.random()
            if trouble < self.rejected:
                payment["trouble"] = "reject"
            elif trouble < self.rejected + self.failing:
                payment["trouble"] = "once"
        return json.dumps(payment).encode()

    def part(self, share: int, shares: int) -> Load:
        """As much of it as one of several processes takes."""
        return msgspec.structs.replace(self, prefix=f"{self.prefix}.{share}", count=self.count // shares)
