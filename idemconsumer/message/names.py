"""The name under which a handler is stored (L68)."""

from __future__ import annotations

from typing import NamedTuple

from idemconsumer.message import keys
from idemconsumer.message.sources import own_source, retry_source


class StoredName(NamedTuple):
    """App and handler as they appear in keys, scopes, names of queues and rows of sagas."""

    app: str
    handler: str

    def __str__(self) -> str:
        return f"{self.app}/{self.handler}"

    def digest(self, tenant: str | None, key: str) -> bytes:
        return keys.digest(self.app, tenant, self.handler, key)

    def scope(self, tenant: str | None = None) -> str:
        return keys.scope_name(self.app, tenant, self.handler)

    @property
    def own_source(self) -> str:
        return own_source(self.app, self.handler)

    @property
    def retry_source(self) -> str:
        return retry_source(self.app, self.handler)
