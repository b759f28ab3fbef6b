"""The rules for every RequestStore, as tests. Subclass `RequestStoreContract` and give it a `harness` fixture.

```python
class TestMyRequests(RequestStoreContract):
    @pytest.fixture
    async def harness(self, my_server):
        return MyHarness(my_server)
```
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from typing import Final, Protocol

import msgspec
import pytest

from idemconsumer.errors import StoreUnavailable
from idemconsumer.message.keys import parts_of
from idemconsumer.message.message import StoredResult
from idemconsumer.ports.requests import Held, LostRequest, RequestStore, Running
from idemconsumer.rules.claim import Claim
from idemconsumer.rules.values import Record, State

PATIENCE = 30.0  # seconds; ends only tests that hang
CREATED = StoredResult(
    b'{"charge": "\xc3\xa4"}\x00', "application/json", 201, (("Location", "/charges/1"), ("X-Two", "a"), ("X-Two", "b"))
)
OTHER = StoredResult(b"{}", "application/json", 200)
A, B = (Claim(sha256(text).digest(), "shop/-/pay", b"f" * 32) for text in (b"a", b"b"))
REFUSED = StoredResult(b'{"title": "no funds"}', "application/problem+json", 402)


@dataclass(frozen=True)
class RequestProcess:
    """One process, from the store's point of view.

    `expire` makes its lease expire, as for a killed process; `store` goes on without noticing.
    """

    store: RequestStore
    expire: Callable[[], Awaitable[None]]


class RequestHarness(Protocol):
    """Gives the suite access to one server."""

    async def process(self) -> RequestProcess:
        """Return one more process on the same server, with a lease of its own that does not expire during a test by
        itself. The suite closes its store."""
        ...


@pytest.mark.asyncio
class RequestStoreContract:
    """The rules for every RequestStore, as tests. The module's docstring shows how to run them."""

    @pytest.fixture
    async def processes(self, harness: RequestHarness) -> AsyncIterator[tuple[RequestProcess, RequestProcess]]:
        async with AsyncExitStack() as stack:
            pair = await harness.process(), await harness.process()
            for process in pair:
                stack.push_async_callback(process.store.close)
            yield pair

    @pytest.fixture
    def one(self, processes: tuple[RequestProcess, RequestProcess]) -> RequestProcess:
        return processes[0]

    @pytest.fixture
    def two(self, processes: tuple[RequestProcess, RequestProcess]) -> RequestProcess:
        return processes[1]

    # --------------------------------------------------------------------------------------------------------- claims
    async def test_a_new_key_is_held_and_others_are_told_what_it_is_held_for(
        self, one: RequestProcess, two: RequestProcess
    ) -> None:
        valued = replace_claim(A, canonical=b"c" * 16)
        held = await one.store.claim(valued, never)
        assert isinstance(held, Held)
        assert (held.claim, held.again) == (valued, False)
        running = Record(State.PROCESSING, A.fingerprint, None, b"c" * 16)
        for process in (one, two):
            assert await process.store.claim(valued, never) == Running(running)
            assert await process.store.claim(replace_claim(A, fingerprint=b"g" * 32), never) == Running(running)
            assert await process.store.peek(A.key) == running
        await hold(two.store, B)

    async def test_of_many_that_claim_a_key_at_once_one_holds_it(
        self, one: RequestProcess, two: RequestProcess
    ) -> None:
        found = await asyncio.gather(*(process.store.claim(A, never) for process in (one, two) * 25))
        assert len([each for each in found if isinstance(each, Held)]) == 1
        assert {each.record for each in found if isinstance(each, Running)} <= {
            None,
            Record(State.PROCESSING, A.fingerprint),
        }
        assert len([each for each in found if isinstance(each, Running)]) == 49

    async def test_a_response_is_given_back_byte_for_byte(self, one: RequestProcess, two: RequestProcess) -> None:
        assert await one.store.complete(await hold(one.store, A), CREATED)
        assert await one.store.complete(await hold(one.store, B), REFUSED, failed=True)
        for process in (one, two):
            completed = Record(State.COMPLETED, A.fingerprint, CREATED)
            assert await process.store.claim(A, never) == completed
            assert await process.store.claim(replace_claim(A, fingerprint=b"g" * 32), never) == completed
            assert await process.store.peek(A.key) == completed
            assert await process.store.claim(B, never) == Record(State.FAILED, B.fingerprint, REFUSED)

    async def test_an_empty_response_is_one(self, one: RequestProcess, two: RequestProcess) -> None:
        empty = StoredResult(b"", "", 204)
        await one.store.complete(await hold(one.store, replace_claim(A, fingerprint=None)), empty)
        assert await two.store.claim(A, never) == Record(State.COMPLETED, None, empty)

    async def test_a_key_that_is_unknown_has_no_record(self, one: RequestProcess) -> None:
        assert await one.store.peek(A.key) is None

    async def test_a_released_key_is_new(self, one: RequestProcess, two: RequestProcess) -> None:
        first = await hold(one.store, A)
        await one.store.release(first)
        assert await two.store.peek(A.key) is None
        second = await hold(two.store, replace_claim(A, fingerprint=b"g" * 32))
        assert second.token > first.token
        assert not second.again

    async def test_a_claim_that_is_cancelled_holds_nothing(self, one: RequestProcess, two: RequestProcess) -> None:
        for turns in range(12):
            claim = replace_claim(A, key=bytes([turns]) * 32)
            task = asyncio.create_task(one.store.claim(claim, never))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            (found,) = await asyncio.gather(task, return_exceptions=True)
            if isinstance(found, Held):
                await one.store.release(found)
            await until_held(two.store, claim)

    # ---------------------------------------------------------------------------------------------------- lost owners
    async def test_a_key_is_not_given_away_while_its_owner_lives(
        self, harness: RequestHarness, one: RequestProcess, two: RequestProcess
    ) -> None:
        other = await harness.process()
        held = await hold(one.store, A)
        await hold(other.store, B)
        await other.expire()
        assert isinstance(await two.store.claim(A, never), Running)
        assert (await hold(two.store, B)).again
        assert await one.store.complete(held, CREATED)
        await other.store.close()

    async def test_a_late_owner_is_fenced(self, one: RequestProcess, two: RequestProcess) -> None:
        first = await hold(one.store, A)
        await one.expire()
        second = await hold(two.store, A)
        assert second.again
        assert second.token > first.token
        assert not await one.store.complete(first, OTHER)
        await one.store.release(first)
        assert await two.store.peek(A.key) == Record(State.PROCESSING, A.fingerprint)
        assert await two.store.complete(second, CREATED)
        assert not await one.store.complete(first, OTHER)
        await one.store.release(first)
        assert await two.store.claim(A, never) == Record(State.COMPLETED, A.fingerprint, CREATED)

    async def test_a_late_owner_whose_key_nobody_has_taken_completes(
        self, one: RequestProcess, two: RequestProcess
    ) -> None:
        held = await hold(one.store, A)
        await one.expire()
        assert await one.store.complete(held, CREATED)
        assert await two.store.claim(A, never) == Record(State.COMPLETED, A.fingerprint, CREATED)

    async def test_of_many_that_take_a_lost_key_one_holds_it(self, one: RequestProcess, two: RequestProcess) -> None:
        await hold(one.store, A)
        await one.expire()
        found = await asyncio.gather(*(two.store.claim(A, never) for _ in range(10)))
        assert len([each for each in found if isinstance(each, Held)]) == 1

    async def test_another_payload_does_not_take_a_lost_key(self, one: RequestProcess, two: RequestProcess) -> None:
        await hold(one.store, A)
        await one.expire()
        found = await two.store.claim(replace_claim(A, fingerprint=b"g" * 32), never)
        assert found == Running(Record(State.PROCESSING, A.fingerprint), lost=True)
        assert (await hold(two.store, A)).again

    async def test_that_a_former_owner_was_lost_stays_known_until_the_end(
        self, one: RequestProcess, two: RequestProcess
    ) -> None:
        await hold(one.store, A)
        await one.expire()
        for _ in range(2):
            held = await hold(two.store, A)
            assert held.again
            await two.store.release(held)
        assert await two.store.complete(await hold(two.store, A), CREATED)
        assert await two.store.claim(A, never) == Record(State.COMPLETED, A.fingerprint, CREATED)

    async def test_what_was_ended_in_the_middle_is_as_lost(self, one: RequestProcess, two: RequestProcess) -> None:
        await one.store.release(await hold(one.store, A), ran=True)
        for each in (one, two):
            found = await each.store.claim(A, never, again=False)
            assert found == Running(Record(State.PROCESSING, A.fingerprint), lost=True)
        assert len(await two.store.lost()) == 1
        assert (await hold(one.store, A)).again

    async def test_a_lost_key_that_is_not_to_run_again_stays_for_a_person(
        self, one: RequestProcess, two: RequestProcess
    ) -> None:
        await hold(one.store, A)
        await one.expire()
        for _ in range(2):
            found = await two.store.claim(A, never, again=False)
            assert found == Running(Record(State.PROCESSING, A.fingerprint), lost=True)
        assert (await hold(two.store, A)).again

    async def test_what_a_process_holds_when_it_ends_is_free_at_once(
        self, harness: RequestHarness, two: RequestProcess
    ) -> None:
        ended = await harness.process()
        await hold(ended.store, A)
        await ended.store.close()
        assert (await hold(two.store, A)).again

    # --------------------------------------------------------------------------------------------- decisions about them
    async def test_what_was_lost_is_listed_and_what_runs_is_not(self, one: RequestProcess, two: RequestProcess) -> None:
        began = datetime.now(UTC) - timedelta(minutes=1)
        await hold(two.store, B)
        await one.store.complete(await hold(one.store, replace_claim(A, key=b"c" * 32)), CREATED)
        held = await hold(one.store, A)
        assert await two.store.lost() == []
        running = LostRequest(A.key.hex(), *parts_of(A.scope), began, held.token)
        assert not await two.store.settle_lost(running, CREATED, by="ann")
        assert not await two.store.release_lost(running, by="ann")
        assert await two.store.peek(A.key) == Record(State.PROCESSING, A.fingerprint)
        await one.expire()
        (lost,) = await two.store.lost()
        assert (lost.key, (lost.app, lost.tenant, lost.route)) == (A.key.hex(), parts_of(A.scope))
        assert began < lost.since < datetime.now(UTC) + timedelta(minutes=1)

    async def test_a_lost_request_is_settled_once(self, one: RequestProcess, two: RequestProcess) -> None:
        late = await hold(one.store, A)
        await one.expire()
        (lost,) = await two.store.lost()
        for _ in range(2):
            assert await two.store.settle_lost(lost, REFUSED, by="ann", failed=True)
        assert not await two.store.settle_lost(lost, OTHER, by="ann")
        assert not await two.store.release_lost(lost, by="ann")
        assert not await one.store.complete(late, OTHER)
        assert await two.store.claim(A, never) == Record(State.FAILED, A.fingerprint, REFUSED)
        assert await two.store.lost() == []

    async def test_a_lost_request_that_is_released_is_new(self, one: RequestProcess, two: RequestProcess) -> None:
        late = await hold(one.store, A)
        await one.expire()
        (lost,) = await two.store.lost()
        assert await two.store.release_lost(lost, by="ann")
        assert await two.store.peek(A.key) is None
        assert not await two.store.release_lost(lost, by="ann")
        assert not await two.store.settle_lost(lost, CREATED, by="ann")
        held = await hold(two.store, replace_claim(A, fingerprint=b"g" * 32))
        assert (held.again, held.since) == (False, None)
        assert not await one.store.complete(late, OTHER)

    async def test_a_decision_is_about_the_owner_that_was_seen_to_be_lost(
        self, one: RequestProcess, two: RequestProcess
    ) -> None:
        await hold(one.store, A)
        await one.expire()
        (lost,) = await two.store.lost()
        given_up = await hold(two.store, A)
        assert given_up.since == lost.since
        await two.store.release(given_up)
        (lost,) = await two.store.lost()
        assert (lost.since, lost.token) == (given_up.since, given_up.token)
        taken = await hold(two.store, A)
        assert taken.since == lost.since
        for _ in range(2):  # while it runs; then lost again, when a decision must name the second run
            assert not await two.store.settle_lost(lost, CREATED, by="ann")
            assert not await two.store.release_lost(lost, by="ann")
            assert await one.store.peek(A.key) == Record(State.PROCESSING, A.fingerprint)
            await two.expire()
        (again,) = await one.store.lost()
        assert again.token == taken.token
        assert again.since > lost.since
        assert await one.store.settle_lost(again, CREATED, by="ann")

    # ----------------------------------------------------------------------------------------------------------- ends
    async def test_a_completion_can_be_repeated_and_not_changed(self, one: RequestProcess, two: RequestProcess) -> None:
        held = await hold(one.store, A)
        assert await one.store.complete(held, CREATED)
        assert await one.store.complete(held, CREATED)
        assert not await one.store.complete(held, replace(CREATED, status=200))
        assert not await one.store.complete(held, CREATED, failed=True)
        await one.store.release(held)
        assert await two.store.claim(A, never) == Record(State.COMPLETED, A.fingerprint, CREATED)

    async def test_a_completion_that_is_cancelled_is_stored(self, one: RequestProcess, two: RequestProcess) -> None:
        for turns in range(8):
            claim = replace_claim(A, key=bytes([turns]) * 32)
            held = await hold(one.store, claim)
            task = asyncio.create_task(one.store.complete(held, CREATED))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            if turns:  # otherwise the completion was never requested
                await until_completed(two.store, claim)

    async def test_a_record_counts_until_it_expires(self, one: RequestProcess, two: RequestProcess) -> None:
        brief = replace_claim(A, expires=0.2)
        first = await hold(one.store, brief)
        assert await one.store.complete(first, CREATED)
        second = await until_held(two.store, replace_claim(A, expires=3600.0))
        assert second.token > first.token
        assert not second.again
        assert await two.store.complete(second, OTHER)
        assert await one.store.claim(brief, never) == Record(State.COMPLETED, A.fingerprint, OTHER)

    async def test_what_runs_does_not_expire(self, one: RequestProcess, two: RequestProcess) -> None:
        brief = replace_claim(A, expires=0.01)
        held = await hold(one.store, brief)
        began = time.monotonic()
        while time.monotonic() < began + 0.05:
            assert isinstance(await two.store.claim(brief, never), Running)
        assert await one.store.complete(held, CREATED)


def never() -> None:
    """For stores that lose no lease."""


replace_claim: Final = msgspec.structs.replace


async def hold(store: RequestStore, claim: Claim) -> Held:
    held = await store.claim(claim, never)
    assert isinstance(held, Held)
    return held


async def until_held(store: RequestStore, claim: Claim) -> Held:
    """Claim the key as soon as it is free."""
    async with asyncio.timeout(PATIENCE):
        while True:
            with suppress(StoreUnavailable):
                if isinstance(held := await store.claim(claim, never), Held):
                    return held
            await asyncio.sleep(0.02)


async def until_completed(store: RequestStore, claim: Claim) -> None:
    async with asyncio.timeout(PATIENCE):
        while (found := await store.peek(claim.key)) is None or found.state is State.PROCESSING:
            await asyncio.sleep(0.02)
    assert found == Record(State.COMPLETED, claim.fingerprint, CREATED)
