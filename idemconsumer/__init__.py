"""Process every message once, even when it arrives twice.

Each public name is imported from its module at its first use, because the launcher needs none of them to start workers.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from idemconsumer.admin.decisions import Cancellation
    from idemconsumer.admin.saga_views import SagaStatus, SagaStep
    from idemconsumer.app.accepting import Accepted
    from idemconsumer.app.app import App
    from idemconsumer.errors import (
        BadMessage,
        BrokerUnavailable,
        ConfigurationError,
        HandlerError,
        IdemConsumerError,
        Reject,
        Retry,
        SignalTimeout,
        StoreUnavailable,
    )
    from idemconsumer.handlers.arguments import Batch, Child, Done, First, NotDone, Rows, Saga, Step, Tx, Unknown
    from idemconsumer.handlers.decorator import Handler, idempotent_handler
    from idemconsumer.message.keys import Key
    from idemconsumer.message.message import Message, Result
    from idemconsumer.rules.backoff import Backoff
    from idemconsumer.rules.progress import Progress
    from idemconsumer.rules.values import Outcome, OutcomeKind, Signalled
else:
    _HOMES = {
        "admin.decisions": ["Cancellation"],
        "admin.saga_views": ["SagaStatus", "SagaStep"],
        "app.accepting": ["Accepted"],
        "app.app": ["App"],
        "errors": [
            "BadMessage",
            "BrokerUnavailable",
            "ConfigurationError",
            "HandlerError",
            "IdemConsumerError",
            "Reject",
            "Retry",
            "SignalTimeout",
            "StoreUnavailable",
        ],
        "handlers.decorator": ["Handler", "idempotent_handler"],
        "rules.progress": ["Progress"],
        "rules.backoff": ["Backoff"],
        "message.keys": ["Key"],
        "message.message": ["Message", "Result"],
        "handlers.arguments": ["Batch", "Child", "Done", "First", "NotDone", "Rows", "Saga", "Step", "Tx", "Unknown"],
        "rules.values": ["Outcome", "OutcomeKind", "Signalled"],
    }

    def __getattr__(name):
        for home, names in _HOMES.items():
            if name in names:
                value = globals()[name] = getattr(import_module(f"{__name__}.{home}"), name)
                return value
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__():
        return __all__


__all__ = [
    "Accepted",
    "App",
    "Backoff",
    "BadMessage",
    "Batch",
    "BrokerUnavailable",
    "Cancellation",
    "Child",
    "ConfigurationError",
    "Done",
    "First",
    "Handler",
    "HandlerError",
    "IdemConsumerError",
    "Key",
    "Message",
    "NotDone",
    "Outcome",
    "OutcomeKind",
    "Progress",
    "Reject",
    "Result",
    "Retry",
    "Rows",
    "Saga",
    "SagaStatus",
    "SagaStep",
    "SignalTimeout",
    "Signalled",
    "Step",
    "StoreUnavailable",
    "Tx",
    "Unknown",
    "idempotent_handler",
]
