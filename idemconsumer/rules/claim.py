"""The claim of a key: what is asked of the database, and how its result is judged."""

from __future__ import annotations

import msgspec

from idemconsumer.message.message import StoredResult
from idemconsumer.rules.values import Found, Record, State
from idemconsumer.rules.verdicts import Verdict, judge


class Claim(msgspec.Struct, frozen=True):
    """A key about to be claimed: SHA-256 of app, tenant, handler and key; its scope's name; the payload's fingerprint.

    `canonical`: the fingerprint of the payload's value, if the handler compares that too (R26).
    `retain`: how long the record will be kept, in seconds; it is stored with the scope. `pending`: the claim may take a
    PENDING record, since this is the message that the record waits for (D19). `expires`: for how many seconds, by the
    database's clock, a COMPLETED or FAILED record counts; after that the key is new, even if the record still exists
    (R37). None: as long as the record exists. `shown`: others can see the fingerprint before the claim commits (H4).
    `token`: the claim may take a PENDING record only if the record has the same token and the same payload (H46).
    """

    key: bytes
    scope: str
    fingerprint: bytes | None
    retain: float = 14 * 86_400.0
    canonical: bytes | None = None
    pending: bool = False
    expires: float | None = None
    shown: bool = False
    token: bytes | None = None

    def row(self, scope: int | None) -> tuple[object, ...]:
        """The claim as the database takes it, as the type `claim` in migrations/0001. `scope`: the scope's id."""
        stored = (self.key, scope, self.fingerprint, self.canonical, self.expires)
        return (*stored, self.pending, self.token, self.shown)

    def judge(self, found: Found, *, pending: bool = False) -> Verdict:
        """Judge the result of this claim, as `rules.verdicts.judge`."""
        return judge(found, self.fingerprint, self.canonical, pending=pending)

    def record(self, state: State, result: StoredResult | None = None) -> Record:
        """The record that other claims will see once this one is committed."""
        return Record(state, self.fingerprint, result, self.canonical)
