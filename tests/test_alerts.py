"""The alert rules, run by Prometheus's own tool over series that end as each rule says (O31)."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from starlette.requests import Request
from starlette.responses import Response

from idemconsumer import App
from idemconsumer.admin.hints import hint
from idemconsumer.http import Idempotency, Route
from idemconsumer.observe.counts import Counts
from idemconsumer.observe.exposition import exposition
from idemconsumer.observe.fleet import Fleet
from idemconsumer.observe.reports import Report, encoded
from idemconsumer.rules.health import Phase
from idemconsumer.rules.redriven import REASONS
from idemconsumer.rules.values import Outcome, OutcomeKind
from tests.http.fake_requests import FakeRequests
from tests.http.site import by_header, client, problem, service
from tests.support import ROOT

RULES = ROOT / "deploy" / "prometheus" / "alerts.yml"
ALL: Mapping[str, Mapping[str, Any]] = {
    rule["alert"]: rule for group in yaml.safe_load(RULES.read_text("utf-8"))["groups"] for rule in group["rules"]
}
PLACE = 'job="shop",instance="a"'
OF = f'{{{PLACE},app="shop",handler="take"'
OF_ROUTE = f'{{{PLACE},app="shop",route="POST /orders"'
HANDLER = {"app": "shop", "handler": "take"}
ROUTE = {"app": "shop", "route": "POST /orders"}
DAY = 24 * 60


class Case(NamedTuple):
    """`series` by the minute, in promtool's notation: 0x9 is ten times 0, and _ is no sample. It fires at the minute
    `at`, with these labels, and not yet at the minute before `since`."""

    alert: str
    series: Mapping[str, str]
    at: int
    labels: Mapping[str, str]
    since: int = 1


CASES = [
    Case("NothingConsumes", {f'workers{{{PLACE},state="consuming"}}': "2 0x20"}, 7,
         {"job": "shop", "instance": "a"}, since=5),
    Case("NotScraped", {f"worker_deaths_total{{{PLACE}}}": "0x20"}, 7, {}, since=5),
    Case("SourceAway", {f'source_up{{{PLACE},source="s"}}': "1 0x20"}, 3,
         {"job": "shop", "instance": "a", "source": "s"}, since=1),
    Case("NotReady", {f"ready{{{PLACE}}}": "1 0x30"}, 17, {"job": "shop", "instance": "a"}, since=15),
    Case("WorkersDie", {f"worker_deaths_total{{{PLACE}}}": "0x5 1 2 3x20"}, 9, {"job": "shop", "instance": "a"}, 6),
    Case("DatabaseAway", {f"database_up{{{PLACE}}}": "1 0x20"}, 4, {"job": "shop", "instance": "a"}, since=2),
    Case("DatabaseSlow", {f"database_answer_seconds{{{PLACE}}}": "0.01x9 0.6x20"}, 13, {"job": "shop", "instance": "a"},
         since=11),
    Case("CertificateExpires",
         {f'certificate_expiry_timestamp_seconds{{{PLACE},server="kafka"}}': f"{8 * 86400}x{2 * DAY}"},
         DAY + 2, {"server": "kafka"}, since=DAY - 1),
    Case("Behind", {f'lag_seconds{{{PLACE},source="s"}}': "0 601x30"}, 12, {"source": "s"}, since=10),
    Case("StandsStill", {f'lag_messages{{{PLACE},source="s"}}': "1x60", f'deliveries_total{OF},source="s"}}': "0 5x60"},
         34, {"source": "s"}, since=29),
    Case("DeadLetters", {f'dead_letters_total{OF},reason="conflict"}}': "0x5 1x30"}, 7,
         HANDLER | {"reason": "conflict"}, since=5),
    Case("DeadLettersForgotten", {f'oldest_dead_letter_seconds{OF},reason="r"}}': "0 604801x9"}, 2,
         HANDLER | {"reason": "r"}),
    Case("HandlerFails",
         {f'messages_total{OF},outcome="retrying"}}': "0+6x60", f'messages_total{OF},outcome="applied"}}': "0+5x60"},
         13, HANDLER, since=10),
    Case("HandlerHeldUp",
         {f'handler_state{OF},state="locked"}}': "0x9 1x9", f'handler_state{OF},state="paused"}}': "1x20"},
         11, HANDLER | {"state": "locked"}, since=11),
    Case("HandlerPaused", {f'handler_state{OF},state="paused"}}': "0x9 1x9"}, 11, HANDLER, since=11),
    Case("SagasWaitForAPerson", {f'sagas{OF},state="dead"}}': "0 1x30"}, 17, HANDLER, since=15),
    Case("SagasNotTaken", {f"oldest_due_saga_seconds{OF}}}": "0 301x30"}, 7, HANDLER, since=5),
    Case("LeasesLost", {f'leases{{{PLACE},state="lost"}}': "0 1x30"}, 12, {}, since=10),
    Case("RetriesNotTaken", {f"oldest_due_retry_seconds{OF}}}": "0 301x30"}, 7, HANDLER, since=5),
    Case("OutboxStuck", {f'oldest_outbox_message_seconds{{{PLACE},destination="d"}}': "0 301x30"}, 7,
         {"destination": "d"}, since=5),
    Case("OutgoingMessagesParked", {f'outbox_messages{{{PLACE},destination="d",state="parked"}}': "0 1x9"}, 2,
         {"destination": "d"}),
    Case("DeadLettersNotForwarded", {f"oldest_unforwarded_dead_letter_seconds{OF}}}": "0 901x9"}, 2, HANDLER),
    Case("KeysHeldElsewhere", {f"waiting_room_oldest_seconds{OF}}}": "0 901x9"}, 2, HANDLER),
    Case("PoolTooSmall", {f'pool_pending_requests{{{PLACE},pool="handlers"}}': "0x9 1x30"}, 22,
         {"job": "shop", "instance": "a", "pool": "handlers"}, since=15),
    Case("FrontDoorUnavailable", {
         f'http_requests_total{OF_ROUTE},outcome="unavailable"}}': "0x9 0+2x20",
         f'http_requests_total{OF_ROUTE},outcome="run"}}': "0+10x30"}, 15, {"app": "shop"}, since=13),
    Case("RequestOutcomeUnknown", {f'http_requests_total{OF_ROUTE},outcome="outcome-unknown"}}': "0x5 1x30"}, 7, ROUTE,
         since=5),
    Case("RequestsRefused", {
         f'http_requests_total{OF_ROUTE},outcome="key-reused"}}': "0+2x60",
         f'http_requests_total{OF_ROUTE},outcome="run"}}': "0+9x60"}, 13, ROUTE | {"outcome": "key-reused"}, since=10),
    Case("NotPruned", {f"last_prune_timestamp_seconds{{{PLACE}}}": f"0x{DAY}"}, 362, {}, since=359),
]  # fmt: skip


def expected(alert: str, labels: Mapping[str, str]) -> dict[str, Any]:
    rule = ALL[alert]
    texts = {
        name: re.sub(r"{{ \$labels\.(\w+) }}", lambda found: labels[found[1]], text)
        for name, text in rule["annotations"].items()
    }
    return {"exp_labels": dict(labels) | rule["labels"], "exp_annotations": texts}


Passes = Callable[[list[dict[str, Any]]], None]


@pytest.fixture
def promtool(tmp_path: Path) -> Passes:
    """Without it the tests are skipped, or fail where CI is set: `tests.support.missing`."""
    program = shutil.which("promtool")
    assert program, "promtool is not installed: apt-get install prometheus"

    def passes(tests: list[dict[str, Any]]) -> None:
        file = tmp_path / "tests.yml"
        file.write_text(yaml.safe_dump({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": tests}))
        ended = subprocess.run([program, "test", "rules", file], capture_output=True, text=True)
        assert ended.returncode == 0, ended.stdout + ended.stderr

    return passes


def run_of(series: Mapping[str, str], *at: tuple[int, str, list[dict[str, Any]]]) -> dict[str, Any]:
    return {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "alert_rule_test": [
            {"eval_time": f"{minute}m", "alertname": alert, "exp_alerts": alerts} for minute, alert, alerts in at
        ],
    }


def test_each_alert_fires_when_it_should_and_not_before(promtool: Passes) -> None:
    assert sorted(f"Idemconsumer{case.alert}" for case in CASES) == sorted(ALL)
    tests = []
    for case in CASES:
        alert = f"Idemconsumer{case.alert}"
        series = {f"idemconsumer_{name}": values for name, values in case.series.items()}
        tests.append(run_of(series, (case.since - 1, alert, []), (case.at, alert, [expected(alert, case.labels)])))
    promtool(tests)


def scraped(exposed: bytes) -> dict[str, float]:
    """Each series with its value, as it is written."""
    return {
        sample.name + "{" + ",".join(f'{name}="{value}"' for name, value in sample.labels.items()) + "}": sample.value
        for family in text_string_to_metric_families(exposed.decode())
        for sample in family.samples
    }


def test_the_first_dead_letter_of_each_reason_is_seen(promtool: Passes) -> None:
    """What a launcher exports before it and behind it, with nothing made up."""
    assert not [reason for reason in REASONS if hint(reason) == hint("no reason")]
    counts, crew = Counts(), Fleet(1)
    take = counts.of("take")
    scrapes = []
    crew.begun(0)
    for _ in range(2):
        crew.told(0, encoded(Report(app="shop", phase=Phase.CONSUMING, patience=5.0, counts=counts)))
        scrapes.append(scraped(exposition(crew, None)))
        take.ended([Outcome(OutcomeKind.DEAD, reason=reason) for reason in REASONS])
    before, behind = scrapes
    series = {name: f"{before.get(name, '_')}x5 {value}x9" for name, value in behind.items() if "dead_letters" in name}
    assert len(series) == len(REASONS)
    alert = "IdemconsumerDeadLetters"
    fires = [expected(alert, HANDLER | {"reason": reason}) for reason in REASONS]
    promtool([run_of(series, (4, alert, []), (8, alert, fires))])


async def test_what_a_front_door_in_trouble_counts_raises_its_alerts(promtool: Passes) -> None:
    """A store that is away, a lease that is lost, a key that is used twice, and one that comes again too soon."""
    registry, store, inside, go = CollectorRegistry(), FakeRequests(), asyncio.Event(), asyncio.Event()

    async def endpoint(request: Request) -> Response:
        match (await request.json())["id"]:
            case "frozen":
                store.lose()
                await asyncio.Event().wait()
            case "slow":
                inside.set()
                await go.wait()
        return Response("done", 201)

    routes = {"POST /orders": Route()}
    door = Idempotency(App("shop"), tenant=by_header, routes=routes, default=None, store=store, metrics=registry)
    async with client(service(door, endpoint)) as shop:
        assert (await shop.post()).status_code == 201
        before = scraped(generate_latest(registry))
        slow = asyncio.create_task(shop.post("slow", key="slow"))
        await inside.wait()
        assert problem(await shop.post("slow", key="slow")) == "in-progress"
        go.set()
        await slow
        assert problem(await shop.post("other")) == "key-reused"
        assert problem(await shop.post("frozen", key="frozen")) == "outcome-unknown"
        store.down = True
        assert problem(await shop.post("away", key="away")) == "unavailable"
    behind = scraped(generate_latest(registry))
    series = {
        name: f"{before[name]}+{value - before[name]}x40" for name, value in behind.items() if "requests_total" in name
    }
    fires = {
        "FrontDoorUnavailable": [{"app": "shop"}],
        "RequestOutcomeUnknown": [ROUTE],
        "RequestsRefused": [ROUTE | {"outcome": each} for each in ("in-progress", "key-reused")],
    }
    quiet = {name: f"{value}x40" for name, value in before.items() if "requests_total" in name}
    alerts = {f"Idemconsumer{name}": labels for name, labels in fires.items()}
    promtool([
        run_of(series, *((30, name, [expected(name, each) for each in labels]) for name, labels in alerts.items())),
        run_of(quiet, *((30, name, []) for name in alerts)),
    ])  # fmt: skip
