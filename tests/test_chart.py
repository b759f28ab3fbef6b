"""The Helm chart, as helm renders it."""

from __future__ import annotations

import json
import re
import secrets
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psycopg
import pytest
import yaml

from idemconsumer.process.child import GRACE
from idemconsumer.settings import Settings
from idemconsumer.stores.migrations import migrate
from tests.support import ROOT
from tests.support.deploy import CHART, PROJECT, TEMPLATES, instructions, parsed

Values = Mapping[str, Any]
Rendered = dict[str, dict[str, Any]]
Render = Callable[..., Rendered]

FEW: Values = {"image": {"repository": "r/shop", "tag": "1"}, "secret": "s"}
FULL: Values = {
    "image": {"repository": "r/shop", "digest": f"sha256:{0:064}", "pullSecrets": [{"name": "registry"}]},
    "secret": "s",
    "settings": {"log_format": "json", "concurrency": 4, "max_message_bytes": 4194304, "tracing": True},
    "envFrom": [{"configMapRef": {"name": "more"}}],
    "extraEnv": [
        {"name": "IDEMCONSUMER_DSN", "valueFrom": {"secretKeyRef": {"name": "shop-database", "key": "uri"}}},
        {"name": "IDEMCONSUMER_KAFKA_GROUP_INSTANCE_ID", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
    ],
    "volumes": [{"name": "kafka", "secret": {"secretName": "shop-kafka", "defaultMode": 0o440}}],
    "volumeMounts": [{"name": "kafka", "mountPath": "/etc/shop/kafka", "readOnly": True}],
    "migrate": {"enabled": True, "secret": "owner"},
    "serviceAccountName": "shop", "podAnnotations": {"a": "b"}, "podLabels": {"c": "d"}, "nodeSelector": {"e": "f"},
    "tolerations": [{"key": "k", "operator": "Exists"}], "affinity": {"podAntiAffinity": {}},
    "topologySpreadConstraints": [
        {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"},
        {"maxSkew": 1, "topologyKey": "host", "whenUnsatisfiable": "DoNotSchedule", "labelSelector": {}},
    ],
    "podMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "networkPolicy": {
        "enabled": True, "from": [{"namespaceSelector": {}}],
        "egress": [{"to": [{"ipBlock": {"cidr": "10.0.0.0/24"}}], "ports": [{"port": 5432}]}],
    },
    "keda": {
        "enabled": True,
        "kafka": [{"bootstrapServers": "k:1", "consumerGroup": "shop", "topic": "t", "lag": 2000000}],
        "rabbitmq": [{"queue": "q", "length": 200, "authentication": "a"}],
        "sqs": [{"queueURL": "https://q", "region": "eu-central-1", "length": 200, "authentication": "a"}],
        "postgresql": [{"queues": ["q", "ann's"], "length": 200, "authentication": "a"}],
    },
}  # fmt: skip
STATEFUL: Values = {**FULL, "kind": "StatefulSet"}


@pytest.fixture
def render(helm_program: str, tmp_path: Path) -> Render:
    """By kind. Refused by `helm lint`, or by `helm template`, is a CalledProcessError with what it said."""

    def ran(values: Values, release: str = "shop") -> Rendered:
        given = tmp_path / "values.yaml"
        given.write_text(yaml.safe_dump(dict(values)))
        # A helm from its sources knows no version of Kubernetes.
        these = ["--kube-version", "1.30.0", "-f", str(given), str(CHART)]
        lint, template = [helm_program, "lint", "--strict", *these], [helm_program, "template", release, *these]
        subprocess.run(lint, check=True, capture_output=True, text=True)
        done = subprocess.run(template, check=True, capture_output=True, text=True)
        return {each["kind"]: each for each in yaml.safe_load_all(done.stdout)}

    return ran


def pod_of(made: Values) -> Any:
    return made["spec"]["template"]["spec"]


def environment(made: Values) -> dict[str, Any]:
    (container,) = pod_of(made)["containers"]
    names = [each["name"] for each in container["env"]]
    assert len(names) == len(set(names)), "of two with a name the API server takes one, or none"
    return {each["name"]: each.get("value", each.get("valueFrom")) for each in container["env"]}


def paths(values: Values, before: str = "") -> Iterator[str]:
    for name, value in values.items():
        if isinstance(value, dict) and value and name not in ("resources", "settings"):
            yield from paths(value, f"{before}{name}.")
        else:
            yield before + name


def described(schema: Values, before: str = "") -> Iterator[str]:
    for name, each in schema["properties"].items():
        if "properties" in each:
            yield from described(each, f"{before}{name}.")
        else:
            yield before + name


def test_the_chart_uses_each_value_and_no_other() -> None:
    values = set(paths(parsed(CHART / "values.yaml")))
    used = {path for text in TEMPLATES.values() for path in re.findall(r"(?i)\.?\bvalues\.([\w.]+)", text)}
    assert used == values
    assert set(described(parsed(CHART / "values.schema.json"))) == values | {"global"}
    defined = {name for text in TEMPLATES.values() for name in re.findall(r'define "([^"]+)"', text)}
    included = {name for text in TEMPLATES.values() for name in re.findall(r'include "([^"]+)"', text)}
    assert included == defined
    chart = parsed(CHART / "Chart.yaml")
    assert chart["version"] == chart["appVersion"] == PROJECT["version"]


@pytest.mark.parametrize(("values", "kinds"), [
    (FEW, {"PodDisruptionBudget", "Deployment", "Job"}),
    (FULL, {"PodDisruptionBudget", "Deployment", "Job", "PodMonitor", "NetworkPolicy", "ScaledObject"}),
    (STATEFUL, {"PodDisruptionBudget", "StatefulSet", "Service", "Job", "PodMonitor", "NetworkPolicy", "ScaledObject"}),
], ids=["few", "full", "stateful"])  # fmt: skip
def test_helm_takes_the_chart(render: Render, values: Values, kinds: set[str]) -> None:
    made = render(values)
    assert set(made) == kinds
    workers = made[values.get("kind", "Deployment")]
    (worker,) = pod_of(workers)["containers"]
    assert worker["args"] == json.loads(next(rest for word, rest in instructions() if word == "CMD"))
    assert made["Job"]["metadata"]["annotations"]["helm.sh/hook"] == "pre-install,pre-upgrade"
    if "ScaledObject" in made:
        scaler = made["ScaledObject"]["spec"]
        assert scaler["scaleTargetRef"] == {"kind": workers["kind"], "name": workers["metadata"]["name"]}
        assert "replicas" not in workers["spec"]
        assert [each["type"] for each in scaler["triggers"]] == ["kafka", "rabbitmq", "aws-sqs-queue", "postgresql"]
        assert scaler["triggers"][0]["metadata"]["lagThreshold"] == "2000000"
        assert "IN ('q', 'ann''s')" in scaler["triggers"][3]["metadata"]["query"]
        assert ".queue_waiting" in scaler["triggers"][3]["metadata"]["query"]
    if "Service" in made:
        assert workers["spec"]["serviceName"] == made["Service"]["metadata"]["name"]
        assert workers["spec"]["podManagementPolicy"] == "Parallel"


def test_a_release_may_have_a_number_for_its_name(render: Render) -> None:
    for each in render(STATEFUL, "123").values():
        named, labels = each["metadata"]["name"], each["metadata"].get("labels", {})
        assert str(named) == named
        assert all(isinstance(value, str) for value in labels.values()), labels


@pytest.mark.parametrize(("wrong", "said"), [
    ({"replica": 3}, "not allowed"),
    ({"podMonitor": {"enable": True}}, "not allowed"),
    ({"kind": "DaemonSet"}, "kind"),
    ({"keda": {"kafka": [{"topic": "t"}]}}, "bootstrapServers"),
    ({"secret": ""}, "a Secret with IDEMCONSUMER_DSN"),
    ({"image": {"repository": "r/shop"}}, "image.tag or image.digest is required"),
    ({"settings": {"drain_timeout": 600}}, "drain_timeout"),
    ({"settings": {"dsn": "postgresql://u:p@h/db"}}, "dsn"),
    ({"extraEnv": [{"name": "IDEMCONSUMER_WORKERS", "value": "2"}]}, "extraEnv"),
    ({"volumes": [{"name": "tmp", "emptyDir": {}}]}, "volumes"),
    ({"podLabels": {"app.kubernetes.io/name": "shop"}}, "podLabels"),
], ids=[
    "name", "name_within", "kind", "trigger", "address", "image", "twice", "password", "variable", "volume", "label",
])  # fmt: skip
def test_values_that_are_wrong_are_refused(render: Render, wrong: Values, said: str) -> None:
    with pytest.raises(subprocess.CalledProcessError) as refused:
        render({**FEW, **wrong})
    assert said in refused.value.stderr + refused.value.stdout


@pytest.mark.parametrize("values", [FEW, FULL], ids=["few", "full"])
def test_each_pod_may_do_little(render: Render, values: Values) -> None:
    made = render(values)
    user = next(rest for word, rest in instructions() if word == "USER")
    for pod in (pod_of(made["Deployment"]), pod_of(made["Job"])):
        assert pod["enableServiceLinks"] is False, "else variables of services look like settings"
        assert pod["automountServiceAccountToken"] is False
        who = pod["securityContext"]
        assert (f"{who['runAsUser']}:{who['runAsGroup']}", who["runAsNonRoot"]) == (user, True)
        (container,) = pod["containers"]
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
        }  # fmt: skip
        assert {"name": "tmp", "mountPath": "/tmp"} in container["volumeMounts"]
        assert {"name": "tmp", "emptyDir": {}} in pod["volumes"]


def test_certificates_and_variables_are_in_each_pod(render: Render) -> None:
    made = render(FULL)
    for pod in (pod_of(made["Deployment"]), pod_of(made["Job"])):
        (container,) = pod["containers"]
        assert FULL["volumes"][0] in pod["volumes"]
        assert FULL["volumeMounts"][0] in container["volumeMounts"]
        assert pod["securityContext"]["fsGroup"] == 10001, "who owns no file of a Secret reads it by its group"
        for name in ("serviceAccountName", "nodeSelector", "tolerations", "affinity"):
            assert pod[name] == FULL[name]
    workers, migration = environment(made["Deployment"]), environment(made["Job"])
    assert workers["IDEMCONSUMER_DSN"] == FULL["extraEnv"][0]["valueFrom"]
    assert workers["IDEMCONSUMER_MAX_MESSAGE_BYTES"] == "4194304"
    assert (workers["IDEMCONSUMER_CONCURRENCY"], workers["IDEMCONSUMER_TRACING"]) == ("4", "true")
    assert "IDEMCONSUMER_DSN" not in migration, "it would come before that of the schema's owner"
    assert set(workers) - set(migration) == {"IDEMCONSUMER_DSN"}
    for made_of, secret in (("Deployment", "s"), ("Job", "owner")):
        (container,) = pod_of(made[made_of])["containers"]
        assert container["envFrom"] == [*FULL["envFrom"], {"secretRef": {"name": secret}}], "the last one counts"


def test_the_migration_has_the_address_of_the_workers_where_it_has_no_other(render: Render) -> None:
    made = render({"image": FEW["image"], "extraEnv": FULL["extraEnv"]})
    assert environment(made["Job"]) == environment(made["Deployment"])


def test_the_examples_of_the_page_are_taken(render: Render) -> None:
    page = (ROOT / "docs" / "deploying.md").read_text("utf-8")
    certificates, names = (yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL))
    made = render(certificates)
    (worker,) = pod_of(made["Deployment"])["containers"]
    assert certificates["volumeMounts"][0] in worker["volumeMounts"]
    stay = environment(render({**FEW, **names})["StatefulSet"])
    assert stay["IDEMCONSUMER_KAFKA_GROUP_INSTANCE_ID"] == {"fieldRef": {"fieldPath": "metadata.name"}}


def test_a_pod_has_time_to_drain_and_is_restarted_as_the_docs_say(render: Render) -> None:
    pod = pod_of(render(FEW)["Deployment"])
    assert pod["terminationGracePeriodSeconds"] >= Settings().drain_timeout + 2 * GRACE + 1.0
    (worker,) = pod["containers"]
    assert {"name": "IDEMCONSUMER_DRAIN_TIMEOUT", "value": f"{Settings().drain_timeout:.0f}"} in worker["env"]
    (block,) = re.findall(r"```yaml\n(ports: .*?)```", (ROOT / "docs/operations.md").read_text("utf-8"), re.DOTALL)
    assert {name: worker[name] for name in ("ports", "livenessProbe", "readinessProbe")} == yaml.safe_load(block)


def test_what_selects_pods_selects_those_of_the_workers(render: Render) -> None:
    made = render(STATEFUL)
    workers, job = (made[kind]["spec"]["template"]["metadata"]["labels"] for kind in ("StatefulSet", "Job"))
    zone, host = made["StatefulSet"]["spec"]["template"]["spec"]["topologySpreadConstraints"]
    selectors = [
        made["StatefulSet"]["spec"]["selector"]["matchLabels"], made["Service"]["spec"]["selector"],
        made["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
        made["PodMonitor"]["spec"]["selector"]["matchLabels"],
        made["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"], zone["labelSelector"]["matchLabels"],
    ]  # fmt: skip
    for selector in selectors:
        assert selector.items() <= workers.items()
        assert not selector.items() <= job.items()
    assert host == FULL["topologySpreadConstraints"][1], "a selector of one's own stays"


def test_who_may_reach_a_pod_and_where_it_may_connect_to(render: Render) -> None:
    policy = render(FULL)["NetworkPolicy"]["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    assert policy["ingress"] == [{"ports": [{"port": "ops"}], "from": FULL["networkPolicy"]["from"]}]
    dns, database = policy["egress"]
    assert dns == {"ports": [{"port": 53, "protocol": "UDP"}, {"port": 53, "protocol": "TCP"}]}
    assert database == FULL["networkPolicy"]["egress"][0]
    few = render({**FEW, "networkPolicy": {"enabled": True}})["NetworkPolicy"]["spec"]
    assert (few["policyTypes"], few["ingress"], "egress" in few) == (["Ingress"], [{"ports": [{"port": "ops"}]}], False)


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
