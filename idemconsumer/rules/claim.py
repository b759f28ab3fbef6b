"""What a key is claimed for."""

from __future__ import annotations

import msgspec

from idemconsumer.message.message import StoredResult
from idemconsumer.rules.values import Found, Record, State
from idemconsumer.rules.verdicts import Verdict, judge


class Claim(msgspec.Struct, frozen=True):
    """A key about to be claimed: SHA-256 of app, tenant, handler and key; its scope's name; the payload's fingerprint.

    `canonical` is the fingerprint of the payload's value, if the handler compares that too (R26).
    `retain` is how long its record will be kept, in seconds; it is stored with the scope. `pending`: the claim may take
    a PENDING record, since this is the message that it waits for (D19). `expires`: for how many seconds a record that
    is COMPLETED or FAILED counts, by the database's clock; then the key is new, even if that record is still there
    (R37). None: as long as it is. `shown`: until the claim is committed, others can see its fingerprint (H4). `token`:
    the claim may take a PENDING record that has the same one beside it, and no other payload (H46).
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
        """What the database is given of it, as the type `claim` in migrations/0001 has it. `scope`: the id."""
        stored = (self.key, scope, self.fingerprint, self.canonical, self.expires)
        return (*stored, self.pending, self.token, self.shown)

    def judge(self, found: Found, *, pending: bool = False) -> Verdict:
        """As `rules.verdicts.judge`, of what was found in its place."""
        return judge(found, self.fingerprint, self.canonical, pending=pending)

    def record(self, state: State, result: StoredResult | None = None) -> Record:
        """What others find once this is committed."""
        return Record(state, self.fingerprint, result, self.canonical)
