"""Redis for tests: Debian's, alone, with replicas that Sentinels watch, or as a cluster."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Mapping
from typing import Any, Final

import redis

from idemconsumer.embedded.postgres import free_port
from tests.support.servers.processes import Processes, need
from tests.support.waiting import eventually

_START_SECONDS: Final = 10.0
_SLOTS: Final = 16_384


class RedisServer:
    """One server, which keeps a log of what it has acknowledged. `start` again after `kill` goes on with that."""

    def __init__(self, settings: Mapping[str, str] | None = None) -> None:
        need("Redis")
        self._processes = Processes("redis")
        self.port = free_port()
        self._settings = {
            "bind": "127.0.0.1",
            "port": str(self.port),
            "dir": str(self._processes.folder),
            "save": "",
            "appendonly": "yes",
            "appendfsync": "always",
            "repl-diskless-sync-delay": "0",
            **(settings or {}),
        }

    @property
    def address(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        arguments = [part for name, value in self._settings.items() for part in (f"--{name}", value)]
        self._processes.spawn(["redis-server", *arguments])
        self._processes.wait_ready(self.answers, _START_SECONDS)

    def answers(self) -> bool:
        with contextlib.suppress(redis.RedisError):
            return self.ask("PING") is True or self.ask("PING") == b"PONG"
        return False

    def ask(self, *command: Any) -> Any:
        with redis.Redis(port=self.port, socket_timeout=_START_SECONDS) as client:
            return client.execute_command(*command)

    def follow(self, other: RedisServer) -> None:
        """Be its replica, from when this returns."""
        self.ask("REPLICAOF", "127.0.0.1", other.port)
        with redis.Redis(port=self.port) as client:
            eventually(lambda: client.info("replication")["master_link_status"] == "up", "the replica is linked")

    def kill(self) -> None:
        self._processes.kill()

    def freeze(self) -> None:
        self._processes.send(signal.SIGSTOP)

    def thaw(self) -> None:
        self._processes.send(signal.SIGCONT)

    def close(self) -> None:
        self._processes.close()


class RedisSentinels:
    """Three Sentinels, which make the replica the primary half a second after that has fallen silent."""

    service: Final = "idem"

    def __init__(self, primary: RedisServer) -> None:
        self._all = [Processes("sentinel") for _ in range(3)]
        self.ports = []
        for processes in self._all:
            port = free_port()
            config = processes.folder / "sentinel.conf"
            config.write_text(
                f"port {port}\nbind 127.0.0.1\ndir {processes.folder}\n"
                f"sentinel monitor {self.service} 127.0.0.1 {primary.port} 2\n"
                f"sentinel down-after-milliseconds {self.service} 500\n"
                f"sentinel failover-timeout {self.service} 3000\n"
            )
            processes.spawn(["redis-server", config, "--sentinel"])
            self.ports.append(port)
        eventually(self._know_each_other, "the Sentinels know each other and the replica")

    @property
    def address(self) -> str:
        return f"sentinel://{','.join(f'127.0.0.1:{port}' for port in self.ports)}/{self.service}/0"

    def hand_over(self) -> None:
        """Make the replica the primary, though nothing has happened to that."""
        with redis.Redis(port=self.ports[0]) as client:
            client.execute_command("SENTINEL", "FAILOVER", self.service)

    def primary_port(self) -> int:
        with redis.Redis(port=self.ports[0], decode_responses=True) as client:
            return int(client.execute_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self.service)[1])

    def _know_each_other(self) -> bool:
        for port in self.ports:
            try:
                with redis.Redis(port=port, decode_responses=True) as client:
                    about = client.sentinel_master(self.service)
            except redis.RedisError:
                return False
            if (about["num-other-sentinels"], about["num-slaves"]) != (2, 1):
                return False
        return True

    def close(self) -> None:
        for processes in self._all:
            processes.close()


class RedisCluster:
    """Three primaries without replicas."""

    def __init__(self, private_redis: Callable[..., RedisServer]) -> None:
        buses = [free_port() for _ in range(3)]
        self.nodes = [private_redis(cluster_enabled="yes", cluster_port=str(bus)) for bus in buses]
        each = _SLOTS // 3 + 1
        for index, node in enumerate(self.nodes):
            node.ask("CLUSTER", "ADDSLOTSRANGE", index * each, min(_SLOTS, (index + 1) * each) - 1)
            node.ask("CLUSTER", "SET-CONFIG-EPOCH", index + 1)
        for node, bus in zip(self.nodes[1:], buses[1:], strict=True):
            self.nodes[0].ask("CLUSTER", "MEET", "127.0.0.1", node.port, bus)
        eventually(lambda: all(self._whole(node) for node in self.nodes), "the cluster is whole")

    @property
    def address(self) -> str:
        return f"cluster://{','.join(f'127.0.0.1:{node.port}' for node in self.nodes)}"

    def _whole(self, node: RedisServer) -> bool:
        said = node.ask("CLUSTER", "INFO")
        return b"cluster_state:ok" in said and b"cluster_slots_ok:16384" in said and b"cluster_known_nodes:3" in said
