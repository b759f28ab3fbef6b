"""Apache Kafka for tests, from Maven Central: one node that is broker and controller, or more brokers of it."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import shutil
import signal
import subprocess
import tempfile
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from idemconsumer.embedded.postgres import free_port
from tests.support.servers.installed import KAFKA
from tests.support.servers.maven import libraries
from tests.support.servers.processes import Processes

_START_SECONDS = 60.0
_STOP_SECONDS = 20.0
_READY = "Kafka Server started"
_CLASSES: Final = "classes.jsa"
_CHECKPOINT: Final = "bootstrap.checkpoint"


class Kafka:
    """`listeners` adds named listeners with their protocol, as `{"TLS": "SSL"}`; `properties` adds to
    server.properties, or replaces what stands there. `joins`: a further broker, of that one's cluster. A restart keeps
    ports and data.
    """

    def __init__(
        self,
        *,
        listeners: Mapping[str, str] | None = None,
        properties: Mapping[str, str] | None = None,
        joins: Kafka | None = None,
    ) -> None:
        self._cluster: str = _id() if joins is None else joins._cluster
        self._first = joins or self
        self._brokers = 0
        self._first._brokers += 1
        self.node = self._first._brokers
        protocols = {"PLAINTEXT": "PLAINTEXT", **(listeners or {})}
        jars = {"org.apache.kafka:kafka_2.13": KAFKA, "org.slf4j:slf4j-simple": "1.7.36"}
        self._libraries = libraries("kafka", KAFKA, jars)
        self._processes = Processes("kafka")
        self._ports = {name: free_port() for name in (*protocols, "CONTROLLER")}
        folder = self._processes.folder
        reachable = ",".join(f"{name}://{self.address_of(name)}" for name in protocols)
        settings = {
            "process.roles": "broker,controller" if joins is None else "broker",
            "node.id": str(self.node),
            "controller.quorum.voters": f"1@{self._first.address_of('CONTROLLER')}",
            "listeners": f"{reachable},CONTROLLER://{self.address_of('CONTROLLER')}" if joins is None else reachable,
            "advertised.listeners": reachable,
            "inter.broker.listener.name": "PLAINTEXT",
            "controller.listener.names": "CONTROLLER",
            "listener.security.protocol.map": ",".join(
                f"{name}:{protocol}" for name, protocol in {**protocols, "CONTROLLER": "PLAINTEXT"}.items()
            ),
            "log.dirs": str(folder / "data"),
            "offsets.topic.replication.factor": "1",
            "offsets.topic.num.partitions": "4",
            "transaction.state.log.replication.factor": "1",
            "transaction.state.log.min.isr": "1",
            "share.coordinator.state.topic.replication.factor": "1",
            "share.coordinator.state.topic.min.isr": "1",
            "group.initial.rebalance.delay.ms": "0",
            "auto.create.topics.enable": "false",
            # A broker that was killed may register again when its old session is over: 3 s instead of 11.
            "broker.session.timeout.ms": "1500",
            "broker.heartbeat.interval.ms": "300",
            **(properties or {}),
        }
        self._config = folder / "server.properties"
        self._config.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))

    @property
    def address(self) -> str:
        """The bootstrap server of the plain listener."""
        return self.address_of("PLAINTEXT")

    def address_of(self, listener: str) -> str:
        return f"127.0.0.1:{self._ports[listener]}"

    def start(self) -> None:
        """Return when the broker has registered with its controller and takes requests."""
        if self._processes.running:
            return
        prepared = self._prepared()
        if not (data := self._processes.folder / "data").exists():
            self._format(data, prepared)
        archive = prepared / _CLASSES
        self._run(*([f"-XX:SharedArchiveFile={archive}"] if archive.exists() else []))

    def _run(self, *options: str) -> None:
        # One logger says when the broker is ready; all of them at info would be thousands of lines.
        levels = ("defaultLogLevel=warn", "log.kafka.server.KafkaRaftServer=info")
        logging = [f"-Dorg.slf4j.simpleLogger.{level}" for level in levels]
        command = self._java("-Xmx384m", "-Xms128m", *logging, *options)
        self._processes.spawn([*command, "kafka.Kafka", str(self._config)])
        self._processes.wait_ready(lambda: _READY in self._processes.log(), _START_SECONDS)

    def stop(self) -> None:
        """An orderly shutdown."""
        self._processes.terminate(_STOP_SECONDS)

    def kill(self) -> None:
        self._processes.kill()

    def freeze(self) -> None:
        """It says nothing more, until `thaw()`; its connections stay open."""
        self._processes.send(signal.SIGSTOP)

    def thaw(self) -> None:
        self._processes.send(signal.SIGCONT)

    def close(self) -> None:
        self._processes.close()

    def _java(self, *options: str) -> list[str]:
        return ["java", "-XX:TieredStopAtLevel=1", *options, "-cp", f"{self._libraries}/*"]

    def _prepared(self) -> Path:
        """What each start needs and takes a second to make: the metadata of a new cluster, and the classes as the JVM
        has them in memory, which it checks, and does without if they are not those of its jars."""
        java = Path(shutil.which("java") or "java").resolve()
        made = hashlib.sha256(f"{java} {java.stat().st_mtime_ns}".encode()).hexdigest()[:8]
        folder = self._libraries.parent / f"kafka-{KAFKA}-prepared-{made}"
        if not folder.exists():
            unfinished = Path(tempfile.mkdtemp(prefix="kafka.", dir=folder.parent))
            with contextlib.closing(Kafka()) as first:
                first._prepare(unfinished)
            with contextlib.suppress(OSError):  # another process was faster
                unfinished.rename(folder)
            shutil.rmtree(unfinished, ignore_errors=True)
        return folder

    def _prepare(self, folder: Path) -> None:
        tool = ["kafka.tools.StorageTool", "format", "-t", _id(), "-c", str(self._config)]
        subprocess.run([*self._java(), *tool], check=True, capture_output=True, cwd=self._processes.folder)
        shutil.copy(self._processes.folder / "data" / _CHECKPOINT, folder)
        self._run(f"-XX:ArchiveClassesAtExit={folder / _CLASSES}")
        self.stop()
        # One that is not whole, after a stop in time or on a full disk, would crash each JVM that takes it.
        whole = [*self._java("-Xshare:on", f"-XX:SharedArchiveFile={folder / _CLASSES}"), "-version"]
        if subprocess.run(whole, check=False, capture_output=True).returncode:
            (folder / _CLASSES).unlink(missing_ok=True)

    def _format(self, data: Path, prepared: Path) -> None:
        """As the tool does for one node, with ids of its own."""
        data.mkdir()
        shutil.copy(prepared / _CHECKPOINT, data)
        ids = {"version": "1", "node.id": str(self.node), "cluster.id": self._cluster, "directory.id": _id()}
        (data / "meta.properties").write_text("".join(f"{name}={value}\n" for name, value in ids.items()))


def _id() -> str:
    """It must not begin with a dash, which the tool would take for an option."""
    return "A" + base64.urlsafe_b64encode(uuid.uuid4().bytes).decode()[1:22]
