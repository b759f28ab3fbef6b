"""What `deploy/` and the docs name is what is exported."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from idemconsumer.http.watch import OUTCOMES
from idemconsumer.observe.counts import Counts
from idemconsumer.observe.database import Figures
from idemconsumer.observe.exposition import exposition
from idemconsumer.observe.fleet import Fleet
from idemconsumer.observe.reports import HandlerState, PoolState, Report, encoded
from idemconsumer.observe.request_metrics import numbers_in
from idemconsumer.ports.broker import Lag
from idemconsumer.rules.health import Phase
from idemconsumer.rules.values import Outcome, OutcomeKind
from tests.support import ROOT
from tests.support.servers.tls import self_signed

NAME = re.compile(r"idemconsumer_[a-z_]+")


@cache
def exported() -> list[Metric]:
    """All that can be, by a launcher and by web processes."""
    counts, crew = Counts(), Fleet(1)
    take = counts.of("take")
    take.deliveries["kafka:orders"] += 1
    take.ended([Outcome(OutcomeKind.DEAD, reason="conflict")])
    take.handled(1, 0.1)
    counts.relayed["kafka:out"] += 1
    counts.parked["kafka:out"] += 1
    report = Report(
        app="shop", phase=Phase.CONSUMING, patience=5.0, counts=counts,
        handlers={"take": HandlerState(8, 1, 1, 2.0)}, pools={"handlers": PoolState(1, 2, 0)},
        lag={"kafka:orders": Lag(1, 2.0, part=True)}, up={"kafka:orders": True},
    )  # fmt: skip
    crew.begun(0)
    crew.told(0, encoded(report))
    take_dead, of_take, mails = ("shop", "take", "dead"), ("shop", "take"), ("postgres:mails",)
    found: Figures = {
        "sagas": {take_dead: 1}, "oldest_saga_seconds": {take_dead: 2.0},
        "due_sagas": {of_take: 1}, "oldest_due_saga_seconds": {of_take: 2.0},
        "retries": {(*of_take, "waiting"): 1, (*of_take, "due"): 1}, "oldest_due_retry_seconds": {of_take: 2.0},
        "delayed_messages": {mails: 1}, "lag_messages": {mails: 1}, "lag_seconds": {mails: 2.0},
        "open_dead_letters": {take_dead: 1}, "oldest_dead_letter_seconds": {take_dead: 2.0},
        "unforwarded_dead_letters": {of_take: 1}, "oldest_unforwarded_dead_letter_seconds": {of_take: 2.0},
        "leases": {("live",): 1, ("lost",): 0}, "last_prune_timestamp_seconds": {(): 1.0},
        "outbox_messages": {("kafka:out", state): 1 for state in ("waiting", "later", "parked")},
        "oldest_outbox_message_seconds": {("kafka:out",): 2.0},
    }  # fmt: skip
    with TemporaryDirectory() as folder:
        text = exposition(crew, found, {"kafka": str(self_signed(Path(folder)).certificate)}, answer=0.1).decode()
    of_requests = CollectorRegistry()
    numbers_in(of_requests).expect("shop", "POST /orders", OUTCOMES)
    text += generate_latest(of_requests).decode()
    parsed = {each.name: each for each in text_string_to_metric_families(text) if not each.name.endswith("_created")}
    assert all(each.samples and each.documentation for each in parsed.values())
    return list(parsed.values())


def families() -> dict[str, str]:
    """Each name with its type."""
    return {
        each.name + ("_total" if each.type == "counter" and not each.name.endswith("_total") else ""): each.type
        for each in exported()
    }


def unknown(expression: str) -> list[str]:
    """What it names that is not exported: a metric, a label of it, or the value of a label."""
    series: dict[str, list[dict[str, str]]] = {}
    for each in exported():
        for sample in each.samples:
            series.setdefault(sample.name, []).append(sample.labels | dict.fromkeys(("job", "instance"), ""))
    assert expression.count("(") == expression.count(")")
    assert expression.count("{") == expression.count("}")
    named = NAME.findall(expression)
    assert named, expression
    found = [name for name in named if name not in series]
    for name, inside in re.findall(r"(idemconsumer_\w+)\{([^}]*)\}", expression):
        for label, how, value in re.findall(r'(\w+)(=|!=|=~|!~)"([^"]*)"', inside):
            values = [labels.get(label) for labels in series.get(name, ())]
            if None in values or (how == "=" and value not in values):
                found.append(f"{name}: {label}{how}{value}")
    labels = {label for name in named for labels in series.get(name, ()) for label in labels}
    grouped = {
        word.strip() for inside in re.findall(r"\b(?:by|on) \(([^)]*)\)", expression) for word in inside.split(",")
    }
    return found + sorted(grouped - labels)


def test_each_metric_is_in_the_reference_and_no_other() -> None:
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text("utf-8")
    found = re.findall(r"^## `(\w+)`\n\n(\w+) · labels: .+\n\n(.+)$", page, re.MULTILINE)
    assert {name: kind for name, kind, _ in found} == families()
    assert all(text[0].isupper() for _, _, text in found)


def test_the_names_follow_the_conventions() -> None:
    for name, kind in families().items():
        assert name.endswith("_total") == (kind == "counter"), name
        assert not re.search(r"(milli|micro|minutes|hours|percent)", name), "base units"


def test_the_alert_rules_name_what_is_exported() -> None:
    loaded = yaml.safe_load((ROOT / "deploy" / "prometheus" / "alerts.yml").read_text("utf-8"))
    rules: list[dict[str, Any]] = [rule for group in loaded["groups"] for rule in group["rules"]]
    assert len(rules) > 10
    for rule in rules:
        assert not unknown(rule["expr"]), rule["alert"]
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"]["summary"]
        assert rule["annotations"]["description"]


def test_so_does_the_dashboard() -> None:
    board = json.loads((ROOT / "deploy" / "grafana" / "dashboard.json").read_text("utf-8"))
    asked = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    asked += [each["query"] for each in board["templating"]["list"] if each["type"] == "query"]
    assert len(asked) > 20
    for expression in asked:
        assert not unknown(expression), expression
