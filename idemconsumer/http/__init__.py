"""The front door: one key from a request to its effect and its response, for ASGI and WSGI. A framework is imported
only in the module that is named after it."""

from idemconsumer.http.accept_later import AcceptLater
from idemconsumer.http.asgi import IdempotencyMiddleware
from idemconsumer.http.current import SyncRows, SyncTx, current_key, current_sync_tx, current_tx
from idemconsumer.http.exchanged import Request, Response
from idemconsumer.http.idempotency import Idempotency
from idemconsumer.http.policy import Route
from idemconsumer.ports.requests import LostRequest

__all__ = [
    "AcceptLater",
    "Idempotency",
    "IdempotencyMiddleware",
    "LostRequest",
    "Request",
    "Response",
    "Route",
    "SyncRows",
    "SyncTx",
    "current_key",
    "current_sync_tx",
    "current_tx",
]
