"""K27, Q13: our own certificates, as files that are renewed while we run."""

from __future__ import annotations

import ssl
import time
from pathlib import Path

import pytest
from psycopg.conninfo import make_conninfo

from idemconsumer import App
from idemconsumer.certificates import RenewedContext, expired, expires_at, ours
from idemconsumer.cli.inspect import findings
from idemconsumer.observe.crew import Crew
from idemconsumer.observe.exposition import exposition
from idemconsumer.settings import Settings
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
    text = exposition(Crew(1), None, files).decode()
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
