"""ElasticMQ for tests: one node in memory that speaks SQS, from Maven Central."""

from __future__ import annotations

import contextlib
import signal
import urllib.error
import urllib.request

from idemconsumer.embedded.postgres import free_port
from tests.support.servers.installed import ELASTICMQ
from tests.support.servers.maven import libraries
from tests.support.servers.processes import Processes

_START_SECONDS = 60.0

# It wants credentials and a region, and looks at neither.
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_DEFAULT_REGION": "eu-west-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


class ElasticMQ:
    """A server with the limits of the real service. What is in it goes with its process; a restart keeps the port."""

    def __init__(self) -> None:
        self._libraries = libraries("elasticmq", ELASTICMQ, {"org.elasticmq:elasticmq-server_2.13": ELASTICMQ})
        self._processes = Processes("elasticmq")
        self._port = free_port()
        self._config = self._processes.folder / "elasticmq.conf"
        self._config.write_text(
            'include classpath("application.conf")\n'
            f'node-address {{ protocol = http, host = "127.0.0.1", port = {self._port}, context-path = "" }}\n'
            f'rest-sqs {{ enabled = true, bind-port = {self._port}, bind-hostname = "127.0.0.1" }}\n'
            "rest-sqs.sqs-limits = strict\n"
            "rest-stats { enabled = false }\n"
        )

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Return when it takes requests."""
        if self._processes.running:
            return
        java = ["java", "-Xmx192m", "-XX:TieredStopAtLevel=1", f"-Dconfig.file={self._config}"]
        self._processes.spawn([*java, "-cp", f"{self._libraries}/*", "org.elasticmq.server.Main"])
        self._processes.wait_ready(self._answers, _START_SECONDS)

    def kill(self) -> None:
        self._processes.kill()

    def freeze(self) -> None:
        """It says nothing more, until `thaw()`; its connections stay open."""
        self._processes.send(signal.SIGSTOP)

    def thaw(self) -> None:
        self._processes.send(signal.SIGCONT)

    def close(self) -> None:
        self._processes.close()

    def _answers(self) -> bool:
        with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
            urllib.request.urlopen(f"{self.address}/health", timeout=1).close()
            return True
        return False
