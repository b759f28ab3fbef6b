"""What of Debian each server of the tests needs, and what is missing of it.

Run by itself, as `.ci/run` does, it names the packages that are missing. So it imports the standard library only.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Final, NamedTuple

KAFKA: Final = "4.2.0"
ELASTICMQ: Final = "1.6.14"
PGBOUNCER: Final = "1.24.1"


class Need(NamedTuple):
    """A path, or a program on the PATH; not needed once the cache folder has the file that is made with it."""

    what: str
    packages: str
    makes: str = ""


def _java(downloaded: str) -> tuple[Need, ...]:
    return Need("java", "default-jre-headless"), Need("mvn", "maven", downloaded)


_NEWER_PGBOUNCER: Final = f"pgbouncer-{PGBOUNCER}"
_OPENSSL: Final = Need("openssl", "openssl")  # for the certificates of some tests
NEEDS: Final = {
    "Postgres 15": (Need("/usr/lib/postgresql/15/bin/postgres", "postgresql-15"),),
    "PgBouncer": (
        Need("/usr/sbin/pgbouncer", "pgbouncer"),
        Need("/usr/include/event2/event.h", "libevent-dev", _NEWER_PGBOUNCER),
        Need("cc", "gcc libc6-dev", _NEWER_PGBOUNCER),
        Need("make", "make", _NEWER_PGBOUNCER),
        Need("pkg-config", "pkg-config", _NEWER_PGBOUNCER),
    ),
    "RabbitMQ": (Need("/usr/lib/rabbitmq/bin/rabbitmq-server", "rabbitmq-server"), _OPENSSL),
    "Redis": (Need("redis-server", "redis-server"),),
    "Kafka": (*_java(f"kafka-{KAFKA}"), _OPENSSL),
    "Prometheus": (Need("promtool", "prometheus"),),
    "ElasticMQ": _java(f"elasticmq-{ELASTICMQ}"),
}


def cache_folder() -> Path:
    """Where downloads stay over `make clean`."""
    chosen = os.environ.get("IDEMCONSUMER_TEST_CACHE")
    return Path(chosen) if chosen else Path.home() / ".cache" / "idemconsumer"


def missing(server: str) -> list[Need]:
    return [need for need in NEEDS[server] if not _there(need)]


def packages(needs: list[Need]) -> str:
    """Each once, as `apt-get install` takes them."""
    return " ".join(dict.fromkeys(need.packages for need in needs))


def _there(need: Need) -> bool:
    made = need.makes and (cache_folder() / need.makes).exists()
    return bool(made or shutil.which(need.what) or os.path.exists(need.what))


if __name__ == "__main__":
    print(packages([need for server in NEEDS for need in missing(server)]))
