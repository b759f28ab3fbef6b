"""A certificate for 127.0.0.1 that clients do not trust unless configured to."""

from __future__ import annotations

import secrets
import ssl
import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Certificate:
    """PEM files; `both` holds key and certificate, as Kafka wants its key store."""

    certificate: Path
    key: Path
    both: Path

    def client_context(self) -> ssl.SSLContext:
        """Trusts this certificate alone and checks the host name."""
        return ssl.create_default_context(cafile=str(self.certificate))


def self_signed(folder: Path) -> Certificate:
    """Make one in that folder."""
    made = Certificate(folder / "cert.pem", folder / "key.pem", folder / "both.pem")
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "2",
        "-subj",
        "/CN=localhost",
    ]
    command += ["-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"]
    command += ["-keyout", str(made.key), "-out", str(made.certificate)]
    subprocess.run(command, check=True, capture_output=True)
    made.both.write_bytes(made.key.read_bytes() + made.certificate.read_bytes())
    return made


def authority(folder: Path) -> Path:
    """Make one there, for `issue`; its certificate."""
    made = ["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=ca"]
    usage = ["-addext", "keyUsage=critical,keyCertSign"]  # from Python 3.13 on an authority has to say so
    _openssl(folder, *made, "-keyout", "ca.key", "-out", "ca.pem", *usage)
    return folder / "ca.pem"


def issue(folder: Path, name: str, days: int = 2) -> tuple[Path, Path]:
    """Certificate and key, signed by the authority of that folder; with less than no days it has expired. Those of the
    same name are replaced, as a program that renews them does."""
    _openssl(
        folder, "req", "-newkey", "rsa:2048", "-nodes", "-keyout", "new.key", "-out", "new.csr", "-subj", "/CN=app"
    )
    signed = ["-CA", "ca.pem", "-CAkey", "ca.key", "-set_serial", str(secrets.randbits(60)), "-days", str(days)]
    _openssl(folder, "x509", "-req", "-in", "new.csr", "-out", "new.pem", *signed)
    for kind in ("key", "pem"):
        (folder / f"new.{kind}").rename(folder / f"{name}.{kind}")
    return folder / f"{name}.pem", folder / f"{name}.key"


def _openssl(folder: Path, *words: str) -> None:
    subprocess.run(["openssl", *words], check=True, capture_output=True, cwd=folder)
