"""PgBouncer for tests: 1.18 from Debian, and a newer one built from Debian's source, once."""

from __future__ import annotations

import functools
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final, LiteralString

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from idemconsumer.embedded.postgres import free_port
from tests.support.servers.installed import PGBOUNCER, cache_folder
from tests.support.servers.processes import Processes, ServerMissing, need

# What a role has to have whose sessions are made by a pooler, for handlers that take 30 s.
CARRIED: Final[dict[str, LiteralString]] = {
    "idle_in_transaction_session_timeout": "35000ms",
    "statement_timeout": "35000ms",
    "lock_timeout": "10s",
    "client_connection_check_interval": "5s",
    "default_transaction_read_only": "on",
    "default_transaction_isolation": "read committed",
}
_START_SECONDS = 10.0
# The release that has it; the machine's own list of packages is left alone.
_SUITE = "trixie"
_KEYS = "/usr/share/keyrings/debian-archive-keyring.gpg"


def carry(dsn: str, settings: Mapping[str, str] = CARRIED) -> None:
    """The role of the address has these settings in its database from now on."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("set default_transaction_read_only = off")  # which may be carried already
        for name, value in settings.items():
            statement = sql.SQL("alter role {} in database {} set {} = {}").format(
                sql.Identifier(connection.info.user),
                sql.Identifier(connection.info.dbname),
                sql.Identifier(name),
                value,
            )
            connection.execute(statement)


def debian_pgbouncer() -> Path:
    """Debian's 1.18, which knows no `options` and no prepared statements."""
    need("PgBouncer")
    return Path("/usr/sbin/pgbouncer")


@functools.cache
def newer_pgbouncer() -> Path:
    """Built in some ten seconds the first time, and kept."""
    program = cache_folder() / f"pgbouncer-{PGBOUNCER}"
    if not program.exists():
        need("PgBouncer")
        program.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            _build(Path(folder), program)
    return program


def _mirror() -> str:
    """Where this machine gets its own packages from."""
    command = ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages", "Component: main"]
    places = subprocess.run(command, check=False, capture_output=True, text=True).stdout.split()
    if not places:
        raise ServerMissing("no newer PgBouncer: this machine names no source of packages")
    return min(places, key=len)  # not its security updates


def _build(folder: Path, program: Path) -> None:
    for name in ("lists/partial", "cache/archives/partial"):
        (folder / name).mkdir(parents=True)
    sources = folder / "sources.list"
    sources.write_text(f"deb-src [signed-by={_KEYS}] {_mirror()} {_SUITE} main\n")
    options = {
        "Dir::Etc::SourceList": sources,
        "Dir::Etc::SourceParts": "/dev/null",
        "Dir::State::Lists": folder / "lists",
        "Dir::Cache": folder / "cache",
        "APT::Sandbox::User": "root",
    }
    apt: list[str | Path] = ["apt-get", "-qq", *(f"-o{name}={value}" for name, value in options.items())]
    source = folder / f"pgbouncer-{PGBOUNCER}"
    for command, where in (
        ([*apt, "update"], folder),
        ([*apt, "source", "--download-only", "pgbouncer"], folder),
        (["tar", "xzf", f"pgbouncer_{PGBOUNCER}.orig.tar.gz"], folder),
        (["./configure", "--without-cares", "--without-openssl"], source),
        (["make", "-j2", "pgbouncer"], source),
    ):
        done = subprocess.run(command, check=False, cwd=where, capture_output=True, text=True, timeout=300)
        if done.returncode:
            raise ServerMissing(f"no newer PgBouncer: {command[0]} says {done.stderr[-500:]}")
    unfinished = Path(tempfile.mktemp(prefix=f"{program.name}.", dir=program.parent))
    shutil.copy(source / "pgbouncer", unfinished)
    unfinished.rename(program)


class PgBouncer:
    """In front of one database, as its user. It asks clients for no password."""

    def __init__(self, program: Path, dsn: str, pool_mode: str, settings: Mapping[str, str]) -> None:
        self._processes = Processes("pgbouncer")
        self._dsn = dsn
        self.port = free_port()
        folder, server = self._processes.folder, conninfo_to_dict(dsn)
        (folder / "users").write_text(f'"{server["user"]}" "{server["password"]}"\n')
        lines = {
            "listen_addr": "127.0.0.1",
            "listen_port": str(self.port),
            "unix_socket_dir": "",
            "auth_type": "trust",
            "auth_file": str(folder / "users"),
            "admin_users": str(server["user"]),
            "pool_mode": pool_mode,
            **settings,
        }
        (folder / "ini").write_text(
            f"[databases]\n* = host={server['host']} port={server['port']}\n[pgbouncer]\n"
            + "".join(f"{name} = {value}\n" for name, value in lines.items())
        )
        command: list[str | Path] = [program, folder / "ini"]
        if os.geteuid() == 0:  # which it refuses to be
            account = pwd.getpwnam("nobody")
            for path in (folder, *folder.iterdir()):
                os.chown(path, account.pw_uid, account.pw_gid)
            command[1:1] = ["-u", account.pw_name]
        self._processes.spawn(command)
        self._processes.wait_ready(self._accepts, _START_SECONDS)

    @property
    def dsn(self) -> str:
        """Of the same database as the server's, through here."""
        return make_conninfo(self._dsn, host="127.0.0.1", port=self.port)

    def reconnect(self) -> None:
        """What an operator does after ALTER ROLE: sessions of the server are made anew once they are free."""
        with psycopg.connect(make_conninfo(self.dsn, dbname="pgbouncer"), autocommit=True) as console:
            console.execute("RECONNECT")
            console.execute("WAIT_CLOSE")

    def log(self) -> str:
        return self._processes.log()

    def close(self) -> None:
        self._processes.close()

    def _accepts(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0
