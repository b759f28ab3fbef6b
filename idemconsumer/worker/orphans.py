"""At its start a worker says which sagas of its app nobody continues (L31)."""

from __future__ import annotations

from idemconsumer.admin.orphans import Sagas, find_orphans
from idemconsumer.errors import IdemConsumerError
from idemconsumer.logs import log
from idemconsumer.redaction import error_text


async def warn_of_orphans(dsn: str, schema: str, app: str, sagas: Sagas) -> None:
    """Raises nothing: it decides nothing. `sagas` as in `find_orphans`. Those of apps that are in none of these names
    are for `check`."""
    try:
        found = await find_orphans(dsn, schema, app, sagas)
    except IdemConsumerError as error:
        log.warning("orphaned sagas could not be checked", error=error_text(error))
        return
    for orphans in found:
        if orphans.waiting.app in {app, *(its for its, _ in sagas)}:
            log.warning("orphaned sagas", handler=orphans.waiting.handler, finding=orphans.text)
