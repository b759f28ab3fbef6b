"""At its start a worker says which sagas of its app nobody continues (L31)."""

from __future__ import annotations

from collections.abc import Mapping

import structlog

from idemconsumer.admin.orphans import find_orphans
from idemconsumer.errors import IdemConsumerError
from idemconsumer.redaction import error_text

log = structlog.get_logger("idemconsumer")


async def warn_of_orphans(dsn: str, schema: str, app: str, sagas: Mapping[str, str | None]) -> None:
    """Raises nothing: it decides nothing. `sagas` as in `find_orphans`. Those of other apps are for `check`."""
    try:
        found = await find_orphans(dsn, schema, app, sagas)
    except IdemConsumerError as error:
        log.warning("orphaned sagas not looked for", error=error_text(error))
        return
    for orphans in found:
        if orphans.waiting.app == app:
            log.warning("orphaned sagas", handler=orphans.waiting.handler, finding=orphans.text)
