"""Findings that are logged at a start: messages that a source would lose, or redeliver after their records are gone.
`check` reports them too. Also logged are sagas that no worker continues (L31)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final, Protocol, runtime_checkable

from idemconsumer.admin.orphans import Sagas, find_orphans
from idemconsumer.errors import IdemConsumerError
from idemconsumer.handlers.handler import BoundHandler
from idemconsumer.logs import log
from idemconsumer.message.message import Subscription
from idemconsumer.ports.broker import Broker, Finding
from idemconsumer.redaction import error_text

_SPARE_DELIVERIES: Final = 10
_DAY: Final = 86_400.0
_MARGIN: Final = _DAY  # messages fetched in the last moment are still in flight, and brokers delete late


@runtime_checkable
class Retaining(Protocol):
    """A broker that keeps messages for a known time, and could redeliver them within it."""

    async def retention_seconds(self, subscription: Subscription) -> float | None: ...


@runtime_checkable
class Redriving(Protocol):
    """A broker that may move a message away after too many deliveries."""

    async def max_receives(self, subscription: Subscription) -> int | None: ...


@runtime_checkable
class SharedSource(Protocol):
    """A broker where the subscriptions of one program may conflict."""

    async def check_together(self, subscriptions: Sequence[Subscription]) -> list[Finding]: ...


async def source_findings(handler: BoundHandler, subscription: Subscription, broker: Broker) -> list[Finding]:
    """What the broker would do to this handler's messages."""
    found = list(await broker.check(subscription))
    if isinstance(broker, Retaining) and all(finding.level != "error" for finding in found):
        found += _retention(handler, subscription, await broker.retention_seconds(subscription))
    if isinstance(broker, Redriving) and all(finding.level != "error" for finding in found):
        found += _redrive(handler, subscription, await broker.max_receives(subscription))
    return found


async def warn_of_sources(
    handlers: Mapping[str, BoundHandler], subscriptions: Sequence[Subscription], broker: Broker
) -> None:
    """Log the warnings and errors of `check`. Raises nothing: it decides nothing, and feeds report their errors."""
    for subscription in subscriptions:
        try:
            found = await source_findings(handlers[subscription.handler], subscription, broker)
        except IdemConsumerError as error:
            log.warning("source not checked", source=subscription.source, error=error_text(error))
            continue
        for finding in found:
            if finding.level != "ok":
                say = log.error if finding.level == "error" else log.warning
                say("source at risk", source=finding.subject, finding=finding.text)


async def warn_of_orphans(dsn: str, schema: str, app: str, sagas: Sagas) -> None:
    """Log sagas that no worker continues. Raises nothing: it decides nothing. `sagas` as in `find_orphans`. Orphans of
    apps that are in none of these names are left to `check`."""
    try:
        found = await find_orphans(dsn, schema, app, sagas)
    except IdemConsumerError as error:
        log.warning("orphaned sagas could not be checked", error=error_text(error))
        return
    for orphans in found:
        if orphans.waiting.app in {app, *(its for its, _ in sagas)}:
            log.warning("orphaned sagas", handler=orphans.waiting.handler, finding=orphans.text)


def _retention(handler: BoundHandler, subscription: Subscription, kept: float | None) -> list[Finding]:
    """A message that outlives its record would count as new when it is redelivered."""
    retain = handler.options.retain
    if kept is None or math.isinf(kept) or kept + _MARGIN <= retain:
        return []
    text = f"keeps messages for {kept / _DAY:g} days, but records are kept for {retain / _DAY:g} days"
    if kept <= retain:
        text += ", which leaves less than a day for messages in flight at the end"
    text += f'; write retain="{math.ceil((kept + _MARGIN) / _DAY)}d"'
    return [Finding("error" if kept > retain else "warning", subscription.source, text)]


def _redrive(handler: BoundHandler, subscription: Subscription, most: int | None) -> list[Finding]:
    """Each worker that dies or drains costs its fetched messages one delivery, so some deliveries must be spare."""
    needed = handler.options.max_attempts + _SPARE_DELIVERIES
    if most is None:
        return []
    if most >= needed:
        return [Finding("ok", subscription.source, f"its redrive policy removes a message after {most} receives")]
    text = (
        f"its redrive policy removes a message after {most} receives, which may be before {handler.name} has finished "
        f"it (max_attempts={handler.options.max_attempts}, and each restart counts); set maxReceiveCount to {needed} "
        "or more"
    )
    return [Finding("warning", subscription.source, text)]
