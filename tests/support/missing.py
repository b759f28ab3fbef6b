"""A run says first which servers this machine lacks and the command that installs them, then how many tests that skips.

Where CI is set nothing is skipped: the tests fail when they ask for the server.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import pytest

from tests.support.servers.installed import NEEDS, missing, packages

# What gives a server: fixtures, and the words of a parameter such as "redis" in `test_x[redis-leased]`.
_GIVEN_BY: Final = {
    "Postgres 15": {"postgres15", "postgres15_binaries"},
    "PgBouncer": {"private_pgbouncer"},
    "RabbitMQ": {"rabbitmq", "private_rabbitmq"},
    "Redis": {"redis", "redis_server", "private_redis"},
    "Kafka": {"kafka", "private_kafka"},
    "ElasticMQ": {"sqs", "private_elasticmq"},
    "Prometheus": {"promtool", "prometheus"},
}
_ELSEWHERE: Final = {
    "RabbitMQ": "IDEMCONSUMER_RABBITMQ", "Kafka": "IDEMCONSUMER_KAFKA", "ElasticMQ": "IDEMCONSUMER_SQS",
}  # fmt: skip


class Missing:
    """Under xdist the controller prints, but only its workers know the tests: the first one leaves their number in a
    file."""

    def __init__(self, config: pytest.Config) -> None:
        self._needs = {
            server: needs
            for server in NEEDS
            if not os.environ.get(_ELSEWHERE.get(server, "")) and (needs := missing(server))
        }
        self._input: dict[str, Any] | None = getattr(config, "workerinput", None)
        self._folder: TemporaryDirectory[str] | None = None
        self._told = False
        self._skipped = 0

    def pytest_report_header(self) -> list[str]:
        if not self._needs:
            return []
        install = packages([need for needs in self._needs.values() for need in needs])
        return [f"missing: {', '.join(self._needs)}; to have them: apt-get install {install}"]

    @pytest.hookimpl(tryfirst=True)  # before their number is printed
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            if not os.environ.get("CI") and (lacks := self._lacks(item)):
                self._skipped += 1
                item.add_marker(pytest.mark.skip(f"missing: {', '.join(lacks)}"))
        if self._input is not None and self._input["workerid"] == "gw0":
            Path(self._input["missing"]).write_text(str(self._skipped))

    def pytest_report_collectionfinish(self) -> list[str]:
        return self._count(self._skipped)

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        self._folder = self._folder or TemporaryDirectory()
        node.workerinput["missing"] = str(Path(self._folder.name) / "skipped")

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any) -> None:
        if node.gateway.id == "gw0" and not self._told:
            self._told = True  # a worker that replaces one that died collects again
            reporter = node.config.pluginmanager.getplugin("terminalreporter")
            for line in self._count(int(Path(node.workerinput["missing"]).read_text())):
                reporter.write_line(line)

    def _count(self, skipped: int) -> list[str]:
        return [f"{skipped} tests are skipped, as their servers are missing"] if skipped else []

    def _lacks(self, item: pytest.Item) -> list[str]:
        fixtures = set(getattr(item, "fixturenames", ()))
        parameters = set(re.findall(r"\w+", item.name.partition("[")[2]))
        return [server for server in self._needs if _GIVEN_BY[server] & (fixtures | parameters)]
