"""`requests list`, `settle` and `release`, of both stores (H36)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import psycopg
import pytest
from click.testing import CliRunner, Result

from idemconsumer.cli.main import main
from idemconsumer.message.message import StoredResult
from idemconsumer.ports.requests import Held, RequestStore
from idemconsumer.process.child import Exit
from idemconsumer.rules.values import Record, State
from idemconsumer.stores.joined import PostgresStore
from idemconsumer.stores.migrations import migrate
from idemconsumer.stores.postgres_requests import PostgresRequests
from idemconsumer.stores.redis.redis_requests import RedisRequests
from tests.support.servers.redis import RedisServer

pytest.register_assert_rewrite("idemconsumer.testing.request_contract")

from idemconsumer.testing.request_contract import A, never, replace_claim  # noqa: E402

B = replace_claim(A, key=b"b" * 32)

T = TypeVar("T")


class Place:
    """Where the keys are, and a shell to type in."""

    def __init__(self, kind: str, address: str) -> None:
        self.kind = kind
        self._address = address

    def __call__(self, *words: str, code: int = Exit.DONE) -> Result:
        env = {"IDEMCONSUMER_DSN" if self.kind == "postgres" else "IDEMCONSUMER_REDIS": self._address}
        result = CliRunner().invoke(main, ["requests", *words, "--store", self.kind], env=env)
        assert result.exit_code == code, result.output
        return result

    def lose(self) -> None:
        """Two requests were begun by a process that is gone."""

        async def lose(store: RequestStore) -> None:
            for claim in (A, B):
                assert isinstance(await store.claim(claim, never), Held)

        asyncio.run(self._with(lose))

    def audit(self) -> list[tuple[str, str, str]]:
        """The oldest first. Redis has none: who decides is in the log."""
        if self.kind == "redis":
            return []
        with psycopg.connect(self._address) as connection:
            return connection.execute("select by, what, target from idemconsumer.audit order by id").fetchall()

    def record(self, key: bytes) -> Record | None:
        return asyncio.run(self._with(lambda store: store.peek(key)))

    async def _with(self, use: Callable[[RequestStore], Awaitable[T]]) -> T:
        if self.kind == "redis":
            store: RequestStore = RedisRequests(self._address)
            try:
                return await use(store)
            finally:
                await store.close()
        postgres = await PostgresStore.open(self._address, "idemconsumer", connections=2, longest_run=30.0)
        store = PostgresRequests.on(postgres.pool, self._address, "idemconsumer")
        try:
            return await use(store)
        finally:
            await store.close()
            await postgres.close()


@pytest.fixture(params=["postgres", "redis"])
def place(request: pytest.FixtureRequest) -> Place:
    if request.param == "redis":
        server: RedisServer = request.getfixturevalue("redis_server")
        server.ask("FLUSHALL")
        return Place("redis", server.address)
    database: str = request.getfixturevalue("database")
    migrate(database, "idemconsumer")
    return Place("postgres", database)


def test_what_was_lost_is_listed_settled_and_released(place: Place, tmp_path: Path) -> None:
    assert place("list").stdout == "no lost requests\n"
    place.lose()
    app, _, route = A.scope.split("/")
    listed = json.loads(place("list", "--json").stdout)
    assert [(each["key"], each["app"], each["route"]) for each in listed] == [
        (claim.key.hex(), app, route) for claim in (A, B)
    ]
    assert A.key.hex()[:12] in place("list", "--app", app).stdout
    assert place("list", "--app", "another").stdout == "no lost requests\n"

    body = tmp_path / "receipt.json"
    body.write_bytes(b'{"charge": 1}')
    words = ["settle", A.key.hex()[:12], "--status", "201", "--body", f"@{body}", "--header", "Location: /charges/1"]
    assert "a repetition gets 201" in place(*words).stdout
    stored = StoredResult(b'{"charge": 1}', "application/json", 201, (("location", "/charges/1"),))
    assert place.record(A.key) == Record(State.COMPLETED, A.fingerprint, stored)
    assert "no lost request has a key that begins with" in place(*words, code=Exit.USAGE).stderr

    assert json.loads(place("release", B.key.hex(), "--json").stdout) == {"key": B.key.hex(), "released": True}
    assert place.record(B.key) is None
    assert place("list").stdout == "no lost requests\n"
    assert [(what, target) for _, what, target in place.audit()] == (
        []
        if place.kind == "redis"
        else [(what, f"request {claim.key.hex()[:12]}") for what, claim in (("settle", A), ("release", B))]
    )


def test_a_mistake_says_what_to_write(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.lose()
    assert "matches several keys" in place("release", "", code=Exit.USAGE).stderr
    assert "is not a header" in place("settle", "61", "--status", "201", "--header", "x", code=Exit.USAGE).stderr
    assert "cannot be read" in place("settle", "61", "--status", "201", "--body", "@no", code=Exit.USAGE).stderr
    empty = {"IDEMCONSUMER_DSN": "", "IDEMCONSUMER_REDIS": ""}
    for name in empty:
        monkeypatch.delenv(name, raising=False)
    got = CliRunner().invoke(main, ["requests", "list", "--store", place.kind])
    assert got.exit_code == Exit.USAGE
    assert "IDEMCONSUMER_" in got.stderr
