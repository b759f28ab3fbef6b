"""A streaming standby of a Postgres of ours, which can be promoted."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import psycopg
from psycopg.conninfo import make_conninfo

from idemconsumer.embedded.binaries import runnable, unprivileged_account, wheel_binaries
from idemconsumer.embedded.postgres import EmbeddedPostgres, free_port
from tests.support.servers.processes import Processes

_START_SECONDS = 30.0


class Standby:
    """Hot: it answers reads. From now on the primary's commits wait for it."""

    def __init__(self, primary: EmbeddedPostgres) -> None:
        self._processes = Processes("standby")
        self.port = free_port()
        self.dsn = make_conninfo(primary.dsn, port=self.port)
        account = unprivileged_account()
        binaries = runnable(wheel_binaries(), account, copy=True)
        folder = self._processes.folder
        become: list[str | Path] = []
        if account is not None:
            os.chown(folder, account.pw_uid, account.pw_gid)
            become = [self._setpriv(), f"--reuid={account.pw_uid}", f"--regid={account.pw_gid}", "--clear-groups"]
        data = folder / "data"
        command = [*become, binaries / "pg_basebackup", "-d", primary.dsn, "-D", data, "-R", "-X", "stream"]
        subprocess.run([*command, "--checkpoint=fast"], check=True, capture_output=True, cwd=folder, timeout=60)
        with psycopg.connect(primary.dsn) as asked:  # it may allow no fewer than its primary
            most = asked.execute("select 'max_connections=' || current_setting('max_connections')").fetchone() or ("",)
        options = ["-c", "listen_addresses=127.0.0.1", "-c", "unix_socket_directories=", "-c", most[0]]
        self._processes.spawn([*become, binaries / "postgres", "-D", data, "-p", str(self.port), *options])
        self._processes.wait_ready(self._answers, _START_SECONDS)
        with psycopg.connect(primary.dsn, autocommit=True) as admin:
            admin.execute("alter system set synchronous_standby_names = '*'")
            admin.execute("select pg_reload_conf()")
            query = "select count(*) from pg_stat_replication where sync_state = 'sync'"
            self._processes.wait_ready(lambda: admin.execute(query).fetchone() == (1,), _START_SECONDS)

    def promote(self) -> None:
        """Returns once it takes writes."""
        with psycopg.connect(self.dsn, autocommit=True) as admin:
            assert admin.execute("select pg_promote()").fetchone() == (True,)

    def close(self) -> None:
        self._processes.close()

    def _setpriv(self) -> str:
        found = shutil.which("setpriv")
        assert found is not None, "of util-linux, which every Debian has"
        return found

    def _answers(self) -> bool:
        try:
            psycopg.connect(self.dsn, connect_timeout=2).close()
        except psycopg.OperationalError:
            return False
        return True
