"""How keys and payloads are hashed in this process: by SHA-256, or by HMAC with the data key of its schema (R38, R39).

One process has one way, since a key that is hashed in two ways is two keys.
"""

from __future__ import annotations

import hmac
from hashlib import sha256
from typing import Final

from idemconsumer.errors import ConfigurationError

SHORTEST: Final = 32  # characters


class Hashing:
    """The way of this process. It is SHA-256 until the settings say otherwise, which comes before the first hash. With
    secrets there is no hash before a schema has been opened, which has the data key."""

    def __init__(self) -> None:
        self.secrets: tuple[bytes, ...] = ()
        self.data_key: bytes | None = None
        self._used = False

    def obey(self, listed: str | None) -> None:
        """Secrets separated by commas, the newest first. From now on; without any nothing changes. Raises
        ConfigurationError for others, or too late."""
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
                "settings: `key_secrets` come too late, since keys have been hashed without them in this process; "
                "write them where all apps of the process read their settings, such as IDEMCONSUMER_KEY_SECRETS"
            )
        self.secrets = secrets

    def settle(self, data_key: bytes) -> None:
        """What the schema that was opened hashes with. Raises ConfigurationError beside another one."""
        if self.data_key is not None and self.data_key != data_key:
            raise ConfigurationError(
                "database: this process uses a schema already whose keys are hashed with another data key; beside "
                "`key_secrets` use one schema in a process"
            )
        self.data_key = data_key

    def digest(self, what: bytes, text: bytes) -> bytes:
        """32 bytes. `what` keeps those of keys and of payloads apart, where there are secrets. Raises
        ConfigurationError where they are set and no schema has been opened."""
        if not self.secrets:
            self._used = True
            return sha256(text).digest()
        if self.data_key is None:
            raise ConfigurationError(
                "keys cannot be hashed yet: `key_secrets` is set, and what is hashed with comes from a schema that "
                "this process has not opened; sagas are not used beside it"
            )
        return hmac.digest(self.data_key, what + b"\0" + text, sha256)


HASHING: Final = Hashing()
