"""A streaming standby of an embedded Postgres, and a backup of one: both are made by pg_basebackup."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg

from idemconsumer.embedded.binaries import unprivileged_account
from idemconsumer.embedded.postgres import EmbeddedPostgres
from tests.support.servers.postgres import system_binaries


@contextmanager
def standby_of(primary: EmbeddedPostgres, folder: Path) -> Iterator[EmbeddedPostgres]:
    """A started one, in `folder`. Its name in `synchronous_standby_names` is `standby`.

    The primary runs on `system_binaries()`. `promote(standby)` makes it a primary.
    """
    back_up(primary, folder, "-R")
    with EmbeddedPostgres(folder, binaries=system_binaries(), settings={"cluster_name": "standby"}) as standby:
        yield standby


def back_up(primary: EmbeddedPostgres, folder: Path, *options: str) -> None:
    """Into `folder`, which an EmbeddedPostgres on `system_binaries()` can start from. The primary goes on meanwhile."""
    assert primary.directory is not None
    shutil.copy(primary.directory / "pgpass", folder / "pgpass")
    account = unprivileged_account()
    identity = {} if account is None else {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}
    if account is not None:
        os.chown(folder, account.pw_uid, account.pw_gid)
    program = system_binaries() / "pg_basebackup"
    command = [program, "-D", folder / "data", "-d", primary.dsn, "--checkpoint=fast", *options]
    subprocess.run(command, check=True, capture_output=True, cwd=folder, **identity)  # type: ignore[call-overload]


def promote(standby: EmbeddedPostgres) -> None:
    with psycopg.connect(standby.dsn, autocommit=True) as connection:
        connection.execute("select pg_promote()")
