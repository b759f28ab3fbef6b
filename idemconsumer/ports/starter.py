"""What a saga asks of its app: to start other sagas, and to cancel them."""

from __future__ import annotations

from typing import Any, Protocol

from idemconsumer.ports.handler import Tx


class Starter(Protocol):
    async def start(self, handler: Any, payload: Any, *, key: str, tenant: str | None, tx: Tx, parent: bytes) -> None:
        """Begin a saga with the transaction of `tx`, on behalf of the one under the stored key `parent` (L80)."""
        ...

    async def cancel(self, key: bytes, *, undo: bool) -> object:
        """Request it of the saga under this stored key, which need not be that of a handler of this app any more;
        committed on return, unless its end came first."""
        ...
