"""R47: certificates that are renewed while we run, for Redis as it is reached in each way."""

from __future__ import annotations

from pathlib import Path

import pytest
from redis.asyncio.connection import SSLConnection
from redis.exceptions import RedisError

from idemconsumer.embedded.postgres import free_port
from idemconsumer.stores.redis.redis_client import Redises, _Ours
from tests.support.servers.made import PrivateRedis
from tests.support.servers.tls import authority, issue


async def test_a_certificate_that_was_renewed_is_read_before_the_next_connection(
    private_redis: PrivateRedis, tmp_path: Path
) -> None:
    ca, port = authority(tmp_path), free_port()
    certificate, key = issue(tmp_path, "server")
    private_redis(
        tls_port=str(port), tls_cert_file=str(certificate), tls_key_file=str(key), tls_ca_cert_file=str(ca)
    )  # which asks clients for theirs
    ours, our_key = issue(tmp_path, "client", days=-1)
    files = f"ssl_ca_certs={ca}&ssl_certfile={ours}&ssl_keyfile={our_key}&ssl_check_hostname=false"
    redises = Redises(f"rediss://127.0.0.1:{port}/0?{files}")
    with pytest.raises((RedisError, OSError)):
        await redises.infos("server")
    issue(tmp_path, "client")
    assert await redises.infos("server")
    await redises.close()


@pytest.mark.parametrize("address", ["sentinels://127.0.0.1:1/service/0", "clusters://127.0.0.1:1"])
async def test_so_does_each_connection_that_finds_another_server(address: str) -> None:
    redises = Redises(address)
    if redises.cluster:
        kinds = [redises.client.connection_kwargs["connection_class"]]  # type: ignore[attr-defined]
        nodes = redises.client.nodes_manager.startup_nodes.values()  # type: ignore[attr-defined]
        kinds += [node.connection_class for node in nodes]
    else:
        kinds = [each.connection_pool.connection_class for each in (redises.client, *redises._others)]
    assert len(kinds) == 2
    assert all(issubclass(kind, _Ours) and issubclass(kind, SSLConnection) for kind in kinds)
    await redises.close()
