"""How this process hashes keys and payloads: by SHA-256, or by HMAC with the data key of its schema (R38, R39).

A process hashes in one way only: a key that is hashed in two ways would count as two keys.
"""

from __future__ import annotations

import hmac
from hashlib import sha256
from typing import Final

from idemconsumer.errors import ConfigurationError

SHORTEST: Final = 32  # characters


class Hashing:
    """The hash method of this process: SHA-256, unless the settings have secrets. They must be set before the first
    hash. With secrets, nothing can be hashed before a schema has been opened, since the schema stores the data key."""

    def __init__(self) -> None:
        self.secrets: tuple[bytes, ...] = ()
        self.data_key: bytes | None = None
        self._used = False

    def obey(self, listed: str | None) -> None:
        """Use these secrets, separated by commas, the newest first. None changes nothing. Raises ConfigurationError if
        the process has other secrets already, if one is too short, or if something was hashed before."""
        if listed is None:
            return
        texts = [text.strip() for text in listed.split(",")]
        for number, text in enumerate(texts, 1):
            if len(text) < SHORTEST:
                raise ConfigurationError(
                    f"settings: number {number} of `key_secrets` has {len(text)} characters; write at least {SHORTEST} "
                    "without a comma, from a generator of passwords"
                )
        secrets = tuple(text.encode() for text in texts)
        if secrets == self.secrets:
            return
        if self.secrets:
            raise ConfigurationError("settings: this process has other `key_secrets` already; one process has one list")
        if self._used:
            raise ConfigurationError(
                "settings: `key_secrets` were set too late: keys have been hashed without them in this process; "
                "write them where all apps of the process read their settings, such as IDEMCONSUMER_KEY_SECRETS"
            )
        self.secrets = secrets

    def settle(self, data_key: bytes) -> None:
        """Hash with the data key of the opened schema. Raises ConfigurationError if another one is used already."""
        if self.data_key is not None and self.data_key != data_key:
            raise ConfigurationError(
                "database: this process already uses a schema with another data key; with `key_secrets`, use one "
                "schema per process"
            )
        self.data_key = data_key

    def digest(self, what: bytes, text: bytes) -> bytes:
        """The hash, 32 bytes. With secrets, `what` keeps hashes of keys and hashes of payloads distinct. Raises
        ConfigurationError if secrets are set and no schema has been opened."""
        if not self.secrets:
            self._used = True
            return sha256(text).digest()
        if self.data_key is None:
            raise ConfigurationError(
                "keys cannot be hashed yet: `key_secrets` is set, and the data key is in a schema that this process "
                "has not opened; sagas cannot be used with `key_secrets`"
            )
        return hmac.digest(self.data_key, what + b"\0" + text, sha256)


HASHING: Final = Hashing()
