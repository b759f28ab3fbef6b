"""Process every message once, even when it arrives twice."""

from idemconsumer.app.app import App
from idemconsumer.errors import (
    BadMessage,
    BrokerUnavailable,
    ConfigurationError,
    HandlerError,
    IdemConsumerError,
    Reject,
    Retry,
    StoreUnavailable,
)
from idemconsumer.handlers.decorator import Handler, idempotent_handler
from idemconsumer.handlers.durations import Backoff
from idemconsumer.message.keys import Key
from idemconsumer.message.message import Message
from idemconsumer.ports.handler import Batch, Done, NotDone, Rows, Saga, Step, Tx, Unknown
from idemconsumer.rules.values import Outcome, OutcomeKind

__all__ = [
    "App",
    "Backoff",
    "BadMessage",
    "Batch",
    "BrokerUnavailable",
    "ConfigurationError",
    "Done",
    "Handler",
    "HandlerError",
    "IdemConsumerError",
    "Key",
    "Message",
    "NotDone",
    "Outcome",
    "OutcomeKind",
    "Reject",
    "Retry",
    "Rows",
    "Saga",
    "Step",
    "StoreUnavailable",
    "Tx",
    "Unknown",
    "idempotent_handler",
]
