"""What each metric says, for its HELP line and the reference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

PREFIX: Final = "idemconsumer_"
TEXTS: Final[Mapping[str, str]] = {
    # counted by workers
    "deliveries": "Messages that a source has delivered, for the first time or again",
    "messages": "Runs of deliveries by outcome: applied, duplicate, conflict, failed (rejected), dead, "
    "retrying, busy, fenced, cancelled; a message that is tried again counts each time",
    "dead_letters": "Dead letters that were written; each reason exists from the start, at 0",
    "handler_duration_seconds": "How long the function took for a message that was applied; in a group each message "
    "counts with the mean. Not for sagas",
    "group_duration_seconds": "How long a group took, its claim and its commit included; for a saga, an attempt",
    "group_size": "Messages that were applied in one transaction",
    "pruned_records": "Records past their retention that were deleted",
    "relayed_messages": "Outgoing messages that their brokers have confirmed",
    "parked_messages": "Outgoing messages that their brokers refuse for good, and that wait for a person",
    "worker_deaths": "Workers that ended without a request to stop",
    # of now, by workers
    "ready": "Whether all workers consume, as /readyz reports",
    "source_up": "Whether all workers that have begun are connected to the source",
    "handler_state": "Workers in which the handler works, or is held up: paused, database_away, source_away, "
    "locked, fails",
    "workers": "Worker processes by state: starting, consuming, waiting for a broker or the database, "
    "draining, leaving, and vacant, a place whose worker has ended",
    "lanes": "How many messages or groups of the handler can run at a time, in all workers",
    "busy_lanes": "How many messages or groups of the handler run now, in all workers",
    "in_hand_messages": "Deliveries in flight in all workers",
    "in_hand_bytes": "Bytes of the deliveries in flight in all workers",
    "waiting_room_messages": "Deliveries that wait for a key that another worker has leased",
    "waiting_room_oldest_seconds": "How long the oldest delivery has waited for a key that another worker has leased",
    "pool_connections_used": "Connections to the database in use, for handlers and for sagas",
    "pool_connections_max": "Connections to the database that may be open, for handlers and for sagas",
    "pool_pending_requests": "Runs that wait for a connection to the database",
    "lag_messages": "Messages of a source that no worker has fetched yet",
    "lag_seconds": "How long at most the oldest message of a source has waited, where that is known",
    "certificate_expiry_timestamp_seconds": "When the client's certificate expires, by the server that it is for: "
    "kafka, rabbitmq, redis, postgres, postgres-listen",
    # asked of the database
    "database_up": "Whether the database has just answered the launcher; if not, its own metrics are left out",
    "database_answer_seconds": "How long the database took to answer an empty statement",
    "sagas": "Sagas that have not ended: processing, undoing, or dead, which wait for a person",
    "oldest_saga_seconds": "Age of the oldest saga that has not ended",
    "due_sagas": "Sagas that a worker could take now",
    "oldest_due_saga_seconds": "How long the first saga that a worker could take now has been due",
    "retries": "Messages that are stored until their next attempt: waiting, or due",
    "oldest_due_retry_seconds": "How long the first stored message has been due for its next attempt",
    "delayed_messages": "Messages of Postgres queues that are not due yet",
    "open_dead_letters": "Dead letters that no person has redriven or discarded",
    "oldest_dead_letter_seconds": "Age of the oldest open dead letter",
    "unforwarded_dead_letters": "Dead letters not yet forwarded to dead_letter_to, up to 100,000 of all",
    "oldest_unforwarded_dead_letter_seconds": "How long the oldest dead letter has waited to be forwarded",
    "outbox_messages": "Outgoing messages: waiting to be sent, later (with a delay, or between two tries), or "
    "parked for a person; up to 100,000 of each",
    "oldest_outbox_message_seconds": "How long the oldest outgoing message has waited to be sent",
    "leases": "Leases of workers with sagas: live, or lost while no worker has taken their sagas",
    "last_prune_timestamp_seconds": "When a pass of pruning last ended, in any process",
    # counted by web processes
    "http_requests": "Requests that the front door has answered: run, replayed, failed (the endpoint raised), "
    "cancelled, or the name of the problem in the answer; each exists from the start, at 0",
    "http_request_duration_seconds": "How long a request took, the endpoint included. Requests refused for their "
    "key, tenant or body do not count",
}
