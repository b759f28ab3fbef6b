"""K27, Q13: our own certificates, as files that are renewed while we run."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from contextlib import suppress
from pathlib import Path
from threading import Thread

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from idemconsumer import App
from idemconsumer.certificates import RenewedContext, expired, expires_at, ours
from idemconsumer.cli.inspect import findings
from idemconsumer.observe.exposition import exposition
from idemconsumer.observe.fleet import Fleet
from idemconsumer.settings import Settings
from idemconsumer.sql.connecting import connect, connect_async
from tests.support.servers.tls import authority, issue


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    authority(folder)
    return folder


def test_until_when_it_is_valid_is_read_from_the_file(folder: Path) -> None:
    certificate, _ = issue(folder, "client", days=3)
    assert 2.9 < ((expires_at(str(certificate)) or 0) - time.time()) / 86_400 <= 3
    assert expired(str(certificate)) is None
    issue(folder, "client", days=-1)
    assert str(certificate) in (expired(str(certificate)) or "")
    assert expires_at(str(folder / "nowhere.pem")) is None


def test_files_that_changed_are_read_before_the_next_connection(folder: Path) -> None:
    certificate, key = issue(folder, "client")
    made = list[ssl.SSLContext]()

    def make() -> ssl.SSLContext:
        context = ssl.create_default_context()
        context.load_cert_chain(certificate, key)
        made.append(context)
        return context

    def connects() -> ssl.SSLContext:
        return context.wrap_bio(ssl.MemoryBIO(), ssl.MemoryBIO(), server_hostname="a").context

    context = RenewedContext(make, [None, str(certificate), str(key)])
    assert [connects(), connects()] == [made[0]] * 2
    old = certificate.read_bytes()
    issue(folder, "client")
    new = certificate.read_bytes()
    certificate.write_bytes(old)  # its key is renewed already
    assert connects() is made[0], "what cannot be used is tried again before the next one"
    certificate.write_bytes(new)
    assert connects() is made[1]
    certificate.unlink()
    assert connects() is made[1]


@pytest.mark.parametrize(("days", "level"), [(40, "ok"), (5, "warning"), (-1, "error")])
async def test_check_says_how_long_each_of_ours_is_valid(folder: Path, days: int, level: str) -> None:
    certificate, _ = issue(folder, "client", days=days)
    settings = Settings(
        dsn=f"postgresql://127.0.0.1:1/x?sslcert={certificate}",
        kafka_cert_file=str(certificate),
        rabbitmq=f"amqps://h/?certfile={certificate}",
        redis=f"rediss://127.0.0.1:1/0?ssl_certfile={certificate}",
    )
    found = {each.subject: each async for each in findings(App("shop"), settings)}
    for server in ("kafka", "rabbitmq", "redis", "postgres"):
        line = found[f"certificate for {server}"]
        assert (line.level, str(certificate) in line.text) == (level, True)


def test_when_it_expires_is_a_metric(folder: Path) -> None:
    certificate, _ = issue(folder, "client")
    files = dict(ours(Settings(kafka_cert_file=str(certificate))))
    text = exposition(Fleet(1), None, files).decode()
    line = next(each for each in text.splitlines() if each.startswith("idemconsumer_certificate_expiry_timestamp_sec"))
    assert '{server="kafka"}' in line
    assert float(line.split()[-1]) == expires_at(str(certificate))


@pytest.mark.parametrize("where", ["address", "variable", "service", "named service", "default place"])
def test_postgres_certificate_is_found_where_its_client_finds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    for variable in ("PGSSLCERT", "PGSERVICE", "PGSERVICEFILE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    file, dsn = tmp_path / "ours.crt", "postgresql://one,two:1,2/x"
    assert list(ours(Settings(dsn=dsn, listen_dsn=dsn))) == []
    if where == "address":
        dsn += f"?sslcert={file}"
    elif where == "variable":
        monkeypatch.setenv("PGSSLCERT", str(file))
    elif where == "default place":
        file = tmp_path / ".postgresql" / "postgresql.crt"
        file.parent.mkdir()
        file.touch()
    else:
        (tmp_path / "services").write_text(f"[shop]\nhost=a,b\nport=1,2\nsslcert={file}\n")
        monkeypatch.setenv("PGSERVICEFILE", str(tmp_path / "services"))
        if where == "service":
            monkeypatch.setenv("PGSERVICE", "shop")
        else:
            dsn = "service=shop"
    assert list(ours(Settings(dsn=dsn, listen_dsn=dsn))) == [("postgres", str(file))]
    assert list(ours(Settings(dsn=make_conninfo(dsn, sslmode="disable")))) == []
    both = Settings(dsn=dsn, listen_dsn=make_conninfo(dsn, sslcert="/other.crt"))
    assert list(ours(both)) == [("postgres", str(file)), ("postgres-listen", "/other.crt")]


@pytest.mark.parametrize(
    ("whose", "says"),
    [
        ("ours", r"our own certificate, {folder}/ours.pem, expired on 20.* UTC; renew that file"),
        ("nobody's", r"requires a client certificate; set sslcert and sslkey"),
        ("the server's", r"the server's certificate is not accepted: .* or set sslrootcert"),
    ],
)
async def test_postgres_error_says_whose_certificate_it_means(
    folder: Path, monkeypatch: pytest.MonkeyPatch, whose: str, says: str
) -> None:
    """The other side is TLS as Postgres speaks it, up to the certificates."""
    monkeypatch.setenv("HOME", str(folder))
    issue(folder, "server", days=-1 if whose == "the server's" else 2)
    ours_, key = issue(folder, "ours", days=-1 if whose == "ours" else 2)
    key.chmod(0o600)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(folder / "ca.pem"))
    context.load_cert_chain(folder / "server.pem", folder / "server.key")
    context.verify_mode = ssl.CERT_REQUIRED

    with socket.create_server(("127.0.0.1", 0)) as server:
        Thread(target=refuse, args=(server, context), daemon=True).start()
        port = server.getsockname()[1]
        dsn = f"postgresql://u@127.0.0.1:{port}/x?sslmode=verify-ca&sslrootcert={folder}/ca.pem"
        if whose != "nobody's":
            dsn += f"&sslcert={ours_}&sslkey={key}"
        with pytest.raises(psycopg.OperationalError, match=says.format(folder=folder)):
            await connect_async(dsn)
        with pytest.raises(psycopg.OperationalError, match=says.format(folder=folder)):
            await asyncio.to_thread(connect, dsn)


def refuse(server: socket.socket, context: ssl.SSLContext) -> None:
    """Whoever comes, by what TLS makes of the certificates."""
    with suppress(OSError):  # the test is over
        while True:
            connection, _ = server.accept()
            with connection.dup() as same:
                connection.recv(8)  # it asks for TLS
                connection.sendall(b"S")
                with suppress(OSError):
                    context.wrap_socket(connection, server_side=True).close()
                with suppress(OSError):
                    same.shutdown(socket.SHUT_WR)
                    while same.recv(4096):  # else the end would overtake what was said
                        pass
