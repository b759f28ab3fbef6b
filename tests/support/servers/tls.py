"""A certificate for 127.0.0.1 that clients do not trust unless configured to."""

from __future__ import annotations

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
