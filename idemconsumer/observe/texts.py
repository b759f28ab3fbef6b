"""The text of each metric, for its HELP line and the reference; its labels are in braces after its name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

PREFIX: Final = "idemconsumer_"
# Read from the database, by `observe.database`.
_STORED: Final = {
    "sagas{app,handler,state}": "Sagas that have not ended: processing, undoing, or dead, which wait for a person",
    "oldest_saga_seconds{app,handler,state}": "Age of the oldest saga that has not ended",
    "due_sagas{app,handler}": "Sagas that a worker could take now",
    "oldest_due_saga_seconds{app,handler}": "How long the first saga that a worker could take now has been due",
    "retries{app,handler,state}": "Messages that are stored until their next attempt: waiting, or due",
    "oldest_due_retry_seconds{app,handler}": "How long the first stored message has been due for its next attempt",
    "delayed_messages{source}": "Messages of Postgres queues that are not due yet",
    "open_dead_letters{app,handler,reason}": "Dead letters that no person has redriven or discarded",
    "oldest_dead_letter_seconds{app,handler,reason}": "Age of the oldest open dead letter",
    "unforwarded_dead_letters{app,handler}": "Dead letters that are not forwarded yet, or are parked; counted up to "
    "100,000 in total",
    "oldest_unforwarded_dead_letter_seconds{app,handler}": "How long the oldest dead letter has waited to be forwarded",
    "leases{state}": "Leases of workers with sagas: live, or lost with sagas that no worker has taken over",
    "outbox_messages{destination,state}": "Outgoing messages: waiting to be sent, later (with a delay, or between two "
    "tries), or parked for a person; up to 100,000 of each",
    "oldest_outbox_message_seconds{destination}": "How long the oldest outgoing message has waited to be sent",
}
_WRITTEN: Final = _STORED | {
    # counted by workers
    "deliveries{app,handler,source}": "Messages that a source has delivered, for the first time or again",
    "messages{app,handler,outcome}": "Runs of deliveries by outcome: applied, duplicate, conflict, failed (rejected), "
    "dead, retrying, busy, fenced, cancelled; a message that is tried again counts each time",
    "dead_letters{app,handler,reason}": "Dead letters that were written; each reason exists from the start, at 0",
    "handler_duration_seconds{app,handler}": "How long the function took for a message that was applied; in a group "
    "each message counts with the group's mean. Sagas are not measured",
    "group_duration_seconds{app,handler}": "How long a group took, its claim and its commit included; for a saga, an "
    "attempt",
    "group_size{app,handler}": "Messages that were applied in one transaction",
    "pruned_records": "Records past their retention that were deleted",
    "relayed_messages{destination}": "Outgoing messages that their brokers have confirmed",
    "parked_messages{destination}": "Outgoing messages that their brokers refuse for good, and that wait for a person",
    "worker_deaths": "Workers that ended without a request to stop",
    # gauges: the state now
    "ready": "Whether all workers consume, as /readyz reports",
    "source_up{source}": "Whether all workers that have begun are connected to the source",
    "handler_state{app,handler,state}": "Workers in which the handler works, or is held up: paused, database_away, "
    "source_away, locked, fails",
    "workers{state}": "Worker processes by state: starting, consuming, waiting for a broker or the database, draining, "
    "leaving, or vacant (a place whose worker has ended)",
    "lanes{app,handler}": "How many messages or groups of the handler can run at a time, in all workers",
    "busy_lanes{app,handler}": "How many messages or groups of the handler run now, in all workers",
    "in_hand_messages": "Deliveries in flight in all workers",
    "in_hand_bytes": "Bytes of the deliveries in flight in all workers",
    "waiting_room_messages{app,handler}": "Deliveries that wait for a key that another worker has leased",
    "waiting_room_oldest_seconds{app,handler}": "How long the oldest delivery has waited for a key that another worker "
    "has leased",
    "pool_connections_used{pool}": "Connections to the database in use, for handlers and for sagas",
    "pool_connections_max{pool}": "Connections to the database that may be open, for handlers and for sagas",
    "pool_pending_requests{pool}": "Runs that wait for a connection to the database",
    "lag_messages{source}": "Messages of a source that no worker has fetched yet",
    "lag_seconds{source}": "Upper bound of the waiting time of a source's oldest message, where it is known",
    "certificate_expiry_timestamp_seconds{server}": "When the client's certificate expires, by the server that it is "
    "for: kafka, rabbitmq, redis, postgres, postgres-listen",
    "database_up": "Whether the database has just answered the launcher; if not, its own metrics are left out",
    "database_answer_seconds": "How long the database took to answer an empty statement",
    "last_prune_timestamp_seconds": "When a pass of pruning last ended, in any process",
    # counted by web processes
    "http_requests{app,route,outcome}": "Requests that the front door has answered: run, replayed, failed (the "
    "endpoint raised), cancelled, or the name of the problem in the answer; each exists from the start, at 0",
    "http_request_duration_seconds{app,route}": "How long a request took, the endpoint included. Requests refused for "
    "their key, tenant or body do not count",
}
STORED: Final = [name.partition("{")[0] for name in _STORED]
TEXTS: Final[Mapping[str, str]] = {name.partition("{")[0]: text for name, text in _WRITTEN.items()}
LABELS: Final[Mapping[str, tuple[str, ...]]] = {
    name: tuple(labels.removesuffix("}").split(",")) if labels else ()
    for name, _, labels in (each.partition("{") for each in _WRITTEN)
}
