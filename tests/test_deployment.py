"""What deploy/ has, as far as it can be looked at without Docker, Kubernetes and systemd as the first process."""

from __future__ import annotations

import json
import re
import secrets
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import psycopg
import pytest
import yaml

from idemconsumer.process.child import GRACE
from idemconsumer.settings import Settings, load
from idemconsumer.stores.migrations import migrate
from tests.support import ROOT
from tests.support.deploy import CHART, DEPLOY, TEMPLATES, instructions, parsed

LONGEST = Settings().drain_timeout + 2 * GRACE + 1.0  # seconds until the launcher kills who is left
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


def pinned(image: str) -> bool:
    name, _, tag = image.rpartition(":")
    return bool(name) and tag != "latest" and tag[:1].isdigit()


# ------------------------------------------------------------------------------------------------------------ the image
def test_the_image_is_small_pinned_and_nobody() -> None:
    made = instructions()
    stages = [n for n, (word, _) in enumerate(made) if word == "FROM"]
    for n in stages:
        assert pinned(made[n][1].split()[0]), made[n]
        assert "-slim" in made[n][1]
    assert len(stages) == 2, "what builds is not in the image"
    last = made[stages[-1] :]
    (user,) = (rest for word, rest in last if word == "USER")
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user), "a number, which runAsNonRoot can judge"
    assert [word for word, _ in last].index("USER") > max(n for n, (word, _) in enumerate(last) if word == "COPY")
    assert not any(word == "ADD" or "pip install" in rest for word, rest in last)
    environment = " ".join(rest for word, rest in made if word == "ENV")
    for name in ("UV_COMPILE_BYTECODE=1", "PYTHONDONTWRITEBYTECODE=1", "TMPDIR=/tmp"):
        assert name in environment
    entry, command = (json.loads(next(rest for word, rest in last if word == kind)) for kind in ("ENTRYPOINT", "CMD"))
    assert [*entry, command[0]] == ["idemconsumer", "run"], "not through a shell, which would not pass SIGTERM on"


def test_all_that_the_image_copies_is_there_and_nothing_else_is_sent() -> None:
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text("utf-8").split("\n")
    sent = [line[1:] for line in ignored if line.startswith("!")]
    assert "*" in ignored
    sources = [
        source
        for word, rest in instructions()
        if word == "COPY" and not rest.startswith("--from")
        for source in shlex.split(rest)[:-1]
    ]
    for source in sources:
        assert (ROOT / source).exists(), source
    assert sorted(sent) == sorted(sources)


# ------------------------------------------------------------------------------------------------------------- compose
def test_compose_has_each_broker_and_a_worker_that_may_do_little() -> None:
    services = parsed(DEPLOY / "compose.yaml")["services"]
    assert set(services) == {"postgres", "kafka", "rabbitmq", "sqs", "prepare", "worker"}
    for name, service in services.items():
        assert pinned(service["image"]) or service["image"] == "idemconsumer-payments", name
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", [])), name
        for other, how in service.get("depends_on", {}).items():
            assert how["condition"] != "service_healthy" or "healthcheck" in services[other], other
    for name in ("prepare", "worker"):
        service = services[name]
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        settings = load(service["environment"], Path("/nowhere"))
        assert None not in (settings.dsn, settings.kafka, settings.rabbitmq, settings.sqs)
    build = services["prepare"]["build"]
    assert (DEPLOY / build["context"] / build["dockerfile"]).exists()
    assert (DEPLOY / services["prepare"]["volumes"][0].partition(":")[0]).exists()
    assert int(services["worker"]["stop_grace_period"].removesuffix("s")) >= LONGEST


# --------------------------------------------------------------------------------------------------------------- chart
def paths(values: Mapping[str, Any], before: str = "") -> Iterator[str]:
    for name, value in values.items():
        if isinstance(value, dict) and value and name not in ("resources", "settings"):
            yield from paths(value, f"{before}{name}.")
        else:
            yield before + name


def test_the_chart_uses_each_value_and_no_other() -> None:
    values = set(paths(parsed(CHART / "values.yaml")))
    used = {path for text in TEMPLATES.values() for path in re.findall(r"\.Values\.([\w.]+)", text)}
    assert used == values
    defined = {name for text in TEMPLATES.values() for name in re.findall(r'define "([^"]+)"', text)}
    included = {name for text in TEMPLATES.values() for name in re.findall(r'include "([^"]+)"', text)}
    assert included == defined


@pytest.mark.parametrize("name", [name for name in TEMPLATES if name.endswith(".yaml")])
def test_a_template_is_closed_and_yaml_but_for_what_is_filled_in(name: str) -> None:
    text = TEMPLATES[name]
    opened = re.findall(r"{{-?\s*(?:if|with|range|define)\b", text)
    assert len(opened) == len(re.findall(r"{{-?\s*end\b", text))
    assert text.count("{{") == text.count("}}")
    plain = re.sub(r"(?m)^\s*{{-? *(if|end|with|range|else|include|toYaml)\b.*$\n?", "", text)
    found = yaml.safe_load(re.sub(r'"?{{.*?}}"?', "filled", plain))
    assert {"apiVersion", "kind", "metadata", "spec"} == set(found)


def test_the_pod_may_do_little_and_has_time_to_drain() -> None:
    text = TEMPLATES["deployment.yaml"]
    assert "terminationGracePeriodSeconds: {{ add (int .Values.drainTimeout) 10 }}" in text
    assert LONGEST - Settings().drain_timeout < 10
    assert parsed(CHART / "values.yaml")["drainTimeout"] == Settings().drain_timeout
    for probe, path in (("livenessProbe", "/livez"), ("readinessProbe", "/readyz")):
        assert re.search(rf"{probe}:\s+httpGet: {{path: {path}, port: ops}}", text)
    for name in ("deployment.yaml", "migrate.yaml"):
        assert "enableServiceLinks: false" in TEMPLATES[name], "else variables of services look like settings"
        assert 'include "idemconsumer.podSecurity"' in TEMPLATES[name]
        assert 'include "idemconsumer.containerSecurity"' in TEMPLATES[name]
    for line in (
        "runAsNonRoot: true",
        "readOnlyRootFilesystem: true",
        "allowPrivilegeEscalation: false",
        "drop: [ALL]",
    ):
        assert line in TEMPLATES["_helpers.tpl"]
    user = next(rest for word, rest in instructions() if word == "USER").partition(":")[0]
    assert f"runAsUser: {user}" in TEMPLATES["_helpers.tpl"]


def test_the_chart_has_a_migration_before_the_pods_and_a_scaler_for_each_broker() -> None:
    assert "helm.sh/hook: pre-install,pre-upgrade" in TEMPLATES["migrate.yaml"]
    types = re.findall(r"- type: (\S+)", TEMPLATES["scaledobject.yaml"])
    assert types == ["kafka", "rabbitmq", "aws-sqs-queue", "postgresql"]
    assert ".queue_waiting" in TEMPLATES["scaledobject.yaml"]
    chart = parsed(CHART / "Chart.yaml")
    assert chart["version"] == chart["appVersion"] == PROJECT["version"]


def test_what_waits_is_counted_by_queue_without_a_right_on_the_tables(database: str) -> None:
    migrate(database, "idemconsumer")
    role = f"keda_{secrets.token_hex(4)}"
    with psycopg.connect(database, autocommit=True) as owner:
        owner.execute("insert into idemconsumer.queue (name, body) select 'many', '' from generate_series(1, 10100)")
        owner.execute("select idemconsumer.publish_bytes('few', '')")
        owner.execute("update idemconsumer.queue set visible_at = clock_timestamp() + '1 h' where name = 'few'")
        owner.execute("insert into idemconsumer.delayed (name, body, due_at) values ('due', '', now())")
        owner.execute("insert into idemconsumer.delayed (name, body, due_at) values ('later', '', now() + '1 h')")
        owner.execute(f"create role {role}; grant usage on schema idemconsumer to {role}".encode())
        owner.execute(f"grant select on idemconsumer.queue_waiting to {role}; set role {role}".encode())
        found = owner.execute("select name, waiting from idemconsumer.queue_waiting order by name").fetchall()
        owner.execute(f"reset role; drop owned by {role}; drop role {role}".encode())
    assert found == [("due", 1), ("few", 1), ("later", 0), ("many", 10000)]


FEW = {"image": {"repository": "r/shop", "tag": "1"}, "secret": "s"}
FULL = FEW | {
    "image": {"repository": "r/shop", "digest": "sha256:0", "pullSecrets": [{"name": "registry"}]},
    "settings": {"log_format": "json", "concurrency": 4},
    "migrate": {"enabled": True, "secret": "owner"},
    "serviceAccountName": "shop", "podAnnotations": {"a": "b"}, "podLabels": {"c": "d"}, "nodeSelector": {"e": "f"},
    "tolerations": [{"key": "k", "operator": "Exists"}], "affinity": {"podAntiAffinity": {}},
    "keda": {
        "enabled": True,
        "kafka": [{"bootstrapServers": "k:1", "consumerGroup": "shop", "topic": "t", "lag": 5, "authentication": ""}],
        "rabbitmq": [{"queue": "q", "length": 200, "authentication": "a"}],
        "sqs": [{"queueURL": "https://q", "region": "eu-central-1", "length": 200, "authentication": "a"}],
        "postgresql": [{"queues": ["q", "ann's"], "length": 200, "authentication": "a"}],
    },
}  # fmt: skip


@pytest.mark.parametrize(("values", "kinds"), [
    (FEW, {"PodDisruptionBudget", "Deployment", "Job"}),
    (FULL, {"PodDisruptionBudget", "Deployment", "Job", "ScaledObject"}),
])  # fmt: skip
def test_helm_takes_the_chart(tmp_path: Path, values: Mapping[str, Any], kinds: set[str]) -> None:
    helm = shutil.which("helm") or pytest.skip("helm is not installed; docs/deploying.md says how to have it")
    given = tmp_path / "values.yaml"
    given.write_text(yaml.safe_dump(values))
    subprocess.run([helm, "lint", "--strict", "-f", given, CHART], check=True)
    # A helm from its sources knows no version of Kubernetes.
    rendered = subprocess.run(
        [helm, "template", "shop", "-f", given, "--kube-version", "1.30.0", CHART], check=True, stdout=subprocess.PIPE
    )
    made = {each["kind"]: each["spec"] for each in yaml.safe_load_all(rendered.stdout)}
    assert set(made) == kinds
    (worker,) = made["Deployment"]["template"]["spec"]["containers"]
    assert worker["args"] == json.loads(next(rest for word, rest in instructions() if word == "CMD"))
    if "ScaledObject" in made:
        assert len(made["ScaledObject"]["triggers"]) == 4
        assert "IN ('q', 'ann''s')" in made["ScaledObject"]["triggers"][3]["metadata"]["query"]


# ------------------------------------------------------------------------------------------------------------- systemd
def test_the_unit_waits_for_the_start_and_has_time_to_drain() -> None:
    unit = (DEPLOY / "systemd" / "idemconsumer.service").read_text("utf-8")
    lines = dict(line.split("=", 1) for line in unit.splitlines() if re.match(r"[A-Z]\w+=", line))
    assert lines["Type"] == "notify"
    assert lines["NotifyAccess"] == "main", "only the launcher knows of all workers"
    assert lines["TimeoutStartSec"] == "infinity"
    assert lines["KillMode"] == "mixed", "the launcher drains its workers; a second SIGTERM would cut them off"
    assert int(lines["TimeoutStopSec"]) >= LONGEST
    assert "DSN=" not in lines["ExecStart"]
    assert "--dsn" not in lines["ExecStart"]


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze") or pytest.skip("systemd-analyze is not installed")
    text = (DEPLOY / "systemd" / "idemconsumer.service").read_text("utf-8")
    text = text.replace("/opt/shop/venv/bin/idemconsumer", sys.executable)
    (tmp_path / "shop.service").write_text(text)
    found = subprocess.run([analyze, "verify", str(tmp_path / "shop.service")], capture_output=True, text=True)
    complaints = [line for line in found.stderr.splitlines() if "shop.service" in line]
    assert complaints == []


# ------------------------------------------------------------------------------------------------- locked dependencies
def test_the_lock_of_development_has_all_that_is_asked_for_and_names_no_place() -> None:
    text = (ROOT / "requirements-dev.lock").read_text("utf-8")
    assert not re.search(r"https?://|file:|--(?:extra-)?index|/home/|/root/|/tmp/|@ ", text)
    locked = set(re.findall(r"(?m)^([a-z0-9][\w.-]*)==", text))
    asked = [*PROJECT["dependencies"], *(each for extra in PROJECT["optional-dependencies"].values() for each in extra)]
    bench = PROJECT["optional-dependencies"]["bench"]
    for each in asked:
        name = re.split(r"[\[<>=;! ]", each)[0].lower()
        assert name == "idemconsumer" or name in locked or each in bench, each
    assert not any(fnmatch(name, "nvidia-*") for name in locked)
