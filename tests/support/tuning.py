"""The constants of the package that tests change: the one place that knows in which module each of them lives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from importlib import import_module
from types import ModuleType
from typing import Any, Final, NamedTuple

import pytest


class _Kept(NamedTuple):
    """What tests give is in seconds, or a number of things; `unit` makes of it what the package keeps there."""

    places: tuple[str, ...]
    unit: Callable[[Any], object] | None = None


def at(*places: str, unit: Callable[[Any], object] | None = None) -> _Kept:
    return _Kept(places, unit)


def _in_milliseconds(seconds: float) -> int:
    return round(seconds * 1000)


def _as_setting(seconds: float) -> str:
    """As Postgres reads a time."""
    return f"{_in_milliseconds(seconds)}ms"


# Seconds, unless a comment says what else. More than one place: modules that have imported one constant by its value.
CONSTANTS: Final[Mapping[str, _Kept]] = {
    # connections to Postgres
    "lookout_pause": at("stores.connection._LOOK_OUT"),
    "cancel_patience": at("stores.connection._CANCEL_SECONDS"),
    "commit_is_slow_after": at("stores.connection._SLOW_COMMIT"),
    "slow_commit_pause": at("stores.slow_commits._ASK_EVERY"),
    "answer_patience": at("stores.pool.PATIENCE", "stores.claims.PATIENCE", "stores.checkout.PATIENCE"),
    "connection_patience": at("stores.pool._ACQUIRE_SECONDS"),
    "pool_patience": at("stores.pool.PATIENCE"),
    "claim_patience": at("stores.claims.PATIENCE"),
    "spare_answer_time": at("stores.pool._SPARE_SECONDS"),
    "ready_patience": at("stores.pool._READY_SECONDS"),
    "schema_calm": at("stores.pool._CALM"),
    "known_scopes": at("stores.pool._SCOPES"),  # a number
    "scopes_known_for": at("stores.pool._SCOPES_FOR"),
    "prepared_statements": at("stores.prepared._MOST"),  # a number
    "passing_names": at("stores.prepared._PASSING"),  # a number
    "unfinished_pause": at("stores.unfinished._PAUSE"),
    "unfinished_patience": at("stores.unfinished._LAST"),
    # locks in Postgres
    "claim_lock_patience": at("stores.claims.LOCK_TIMEOUT", unit=_as_setting),
    "session_lock_patience": at("stores.session.LOCK_TIMEOUT", unit=_as_setting),
    "gate_patience": at("stores.claims._GATE_TIMEOUT", unit=_as_setting),
    "lock_waits_pause": at("stores.lock_waits._LOOK"),
    "lock_wait_is_long_after": at("stores.lock_waits._LONG"),
    "migration_lock_pause": at("stores.waiting_for_locks._LOOKS"),
    # decisions
    "runs_before_ahead": at("rules.habits._RUNS"),  # a number
    "failures_in_a_row": at("rules.breaker.IN_A_ROW"),  # a number
    "failing_is_free_for": at("rules.breaker.FREE"),
    "next_probe_pause": at("rules.breaker.NEXT"),
    "failed_probe_pause": at("rules.breaker.AGAIN"),
    "probe_hangs_after": at("rules.breaker.HANGS"),
    "doubt": at("engine.endings.DOUBT"),
    "locks_are_scarce_for": at("rules.group_size._SCARCE"),
    # user code
    "cancel_again_pause": at("user_code.cancellation._AGAIN"),
    "function_grace": at("sagas.steps.GRACE", "sagas.activity.GRACE"),
    # a worker
    "worker_standstill": at("worker.worker._SPARE"),
    "loop_hiccup": at("worker.reporting._HICCUP"),
    "longest_poll": at("worker.feed._LONGEST_POLL"),
    "lane_room": at("worker.capacity.ROOM"),  # a number
    "turn_look_pause": at("worker.turns._LOOK"),
    "turn_patience": at("worker.turns._PATIENCE"),
    "spread_bytes": at("worker.strands._MOST_BYTES"),  # a number
    "delivery_log_pause": at("engine.delivery_log._PAUSE"),
    "delivery_log_farewell": at("engine.delivery_log._FAREWELL"),
    "schedule_retry_pause": at("worker.schedule_starter._AGAIN"),
    "steering_pause": at("worker.steering.EVERY"),
    "steering_retry_pause": at("worker.steering._AGAIN"),
    "steering_notice_pause": at("worker.steering._SOONEST"),
    "steering_farewell": at("worker.steering._FAREWELL"),
    "outgoing_messages": at("worker.outgoing.MOST"),  # a number
    "pool_idle": at("stores.pool._IDLE_SECONDS"),
    "outgoing_bytes": at("worker.outgoing.BYTES"),  # a number
    "retention_blocks": at("worker.retention._BLOCKS"),  # a number
    "retention_lock_patience": at("worker.retention._LOCK_TIMEOUT", unit=_as_setting),
    # sagas
    "due_saga_pause": at("brokers.due_sagas._AGAIN"),
    "due_saga_longest_pause": at("brokers.due_sagas._LONGEST"),
    "due_queue_patience": at("brokers.due_sagas._HELD_UP"),
    "looks_kept_out": at("brokers.due_sagas._MOST_KEPT_OUT"),  # a number
    "longest_probe_pause": at("sagas.probes._LONGEST"),
    # an app without a worker
    "accepting_patience": at("app.accepting._PATIENCE"),
    "inline_keys": at("app.inline._MAX_ATTEMPTS"),  # a number
    # HTTP
    "request_patience": at("http.problems.PATIENCE"),
    "response_patience": at("http.leased_request._PATIENCE"),
    "response_retry_pause": at("http.leased_request._AGAIN"),
    "endpoint_grace": at("http.exchange._GRACE"),
    "heartbeat_retry_pause": at("stores.heartbeat._AGAIN"),
    "redis_asked_every": at("stores.redis.redis_checks.EVERY"),
    "reconcile_grace": at("http.lost._GRACE"),
    "closing_grace": at("http.opened_stores._GRACE"),
    # the queue in Postgres
    "queue_visibility": at("brokers.postgres_session.VISIBILITY"),
    "queue_long_in_hand": at("brokers.postgres_session._LONG"),  # a number
    "queue_few_listening": at("brokers.waking._FEW"),  # a number
    "queue_lead_pause": at("brokers.waking._FIRST", "brokers.waking._LEAD"),
    "queue_others_look_for": at("brokers.waking._ALL"),
    "queue_look_pause": at("brokers.postgres_session._LOOK"),
    "listening_probe_pause": at("brokers.listening.PROBE"),
    # Kafka
    "kafka_poll": at("brokers.kafka.kafka_session.POLL"),
    "kafka_commit_pause": at("brokers.kafka.kafka_session.COMMIT_EVERY"),
    "kafka_commit_patience": at("brokers.kafka.kafka_session.COMMIT_TIMEOUT"),
    "kafka_probe_pause": at("brokers.kafka.kafka_session.PROBE_EVERY"),
    "kafka_probe_patience": at("brokers.kafka.kafka_client.PROBE_TIMEOUT"),
    "kafka_confirmed_within": at("brokers.kafka.publishing.PUBLISH_TIMEOUT", "brokers.kafka.publishing.CONFIRM"),
    "kafka_given_up_after": at("brokers.kafka.kafka_health.GIVE_UP"),
    "kafka_place_pause": at("brokers.kafka.reading.PLACE_AGAIN"),
    "kafka_confirm_patience": at("brokers.kafka.publishing.CONFIRM"),
    "kafka_metadata_age": at("brokers.kafka.kafka_broker.METADATA_MAX_AGE_MS", unit=_in_milliseconds),
    "unreadable_look_pause": at("brokers.kafka.unreadable.LOOK_AGAIN"),
    "unreadable_log_pause": at("brokers.kafka.unreadable.SAY_AGAIN"),
    # RabbitMQ
    "rabbitmq_heartbeat": at("brokers.rabbitmq.link.HEARTBEAT"),
    "rabbitmq_farewell": at("brokers.rabbitmq.link.FAREWELL"),
    "rabbitmq_confirm_patience": at("brokers.rabbitmq.rabbitmq_broker.CONFIRM"),
    # SQS
    "sqs_calls": at("brokers.sqs.sqs_client.CALLS"),  # a number
    "sqs_read_patience": at("brokers.sqs.sqs_client.READ_TIMEOUT"),
    "sqs_silent_after": at("brokers.sqs.sqs_session.SILENT"),
    "sqs_visibility": at("brokers.sqs.sqs_client.LEAST_VISIBILITY"),
    "sqs_backoff": at("brokers.sqs.sqs_session._BACKOFF"),  # two: the first pause, the longest
    "sqs_calm": at("brokers.sqs.sqs_session._CALM"),
    "sqs_farewell": at("brokers.sqs.sqs_session._FAREWELL"),
    "sqs_retries": at("brokers.sqs.sqs_session._PATIENCE"),  # a number
    # what a person asks for, and what is said
    "letters_of_a_page": at("admin.dead_letters._PAGE", "admin.dead_letters._WHOLE"),  # a number
    "letters_of_a_redrive": at("admin.redrives._TOGETHER"),  # a number
    "status_rows": at("admin.status.MOST"),  # a number
    "transaction_is_long_after": at("admin.doctor.LONG"),
    "messages_of_a_step": at("cli.message_verbs._BATCH"),  # a number
    "scrape_patience": at("observe.database.DEADLINE"),
    "look_patience": at("observe.database._PATIENCE"),
    "pause_between_looks": at("observe.database.AGAIN"),
    "summing_pause": at("observe.summing._LOOK"),
    "summed_kinds": at("observe.summing._MOST"),  # a number
}


def tuned(monkeypatch: pytest.MonkeyPatch, **constants: object) -> None:
    """Until the test ends: `tuned(monkeypatch, commit_is_slow_after=0.1, lookout_pause=0.02)`."""
    for module, name, value in _settled(constants):
        monkeypatch.setattr(module, name, value)


def tuned_for_good(**constants: object) -> None:
    """In a process that a test has started."""
    for module, name, value in _settled(constants):
        setattr(module, name, value)


def tuning_source(**constants: object) -> str:
    """The same as source text, for an app that cannot import the tests."""
    return "".join(
        f"import {module.__name__}\n{module.__name__}.{name} = {value!r}\n"
        for module, name, value in _settled(constants)
    )


def as_it_is(constant: str) -> Any:
    """What the package keeps there now, in its own unit."""
    module, name = next(_found(constant))
    return getattr(module, name)


def _settled(constants: Mapping[str, object]) -> list[tuple[ModuleType, str, object]]:
    """A list: what is unknown is refused before anything is changed."""
    return [
        (module, name, value if (unit := CONSTANTS[constant].unit) is None else unit(value))
        for constant, value in constants.items()
        for module, name in _found(constant)
    ]


def _found(constant: str) -> Iterator[tuple[ModuleType, str]]:
    if constant not in CONSTANTS:
        near = get_close_matches(constant, CONSTANTS, n=3)
        meant = f"write {' or '.join(near)}, or add" if near else "add"
        raise LookupError(f"no constant is called {constant}: {meant} a line for it to CONSTANTS in {__name__}")
    for place in CONSTANTS[constant].places:
        path, _, name = place.rpartition(".")
        says = f"write in CONSTANTS in {__name__} where {constant} lives now"
        try:
            module = import_module(f"idemconsumer.{path}")
        except ModuleNotFoundError as error:
            if error.name is None or not error.name.startswith("idemconsumer"):
                raise  # a driver is not installed
            raise LookupError(f"there is no module idemconsumer.{path}: {says}") from error
        if not hasattr(module, name):
            raise LookupError(f"idemconsumer.{path} has no {name}: {says}")
        yield module, name
