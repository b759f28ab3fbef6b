"""What an act that commits comes to: the answer to its COMMIT was lost (J4), or a rival has its key (J5)."""

from __future__ import annotations

from typing import Any

import pytest

from idemconsumer.errors import CommitUnknown, Contention, StoreUnavailable
from idemconsumer.stores.decided import contended, decided
from idemconsumer.user_code.call import mark

LOST = CommitUnknown("lost")
AWAY = StoreUnavailable("away")
RIVAL = Contention("another worker holds the key")


class Act:
    """Comes to these, one after another."""

    def __init__(self, *ends: object) -> None:
        self.ends = list(ends)

    async def __call__(self) -> Any:
        end = self.ends.pop(0)
        if isinstance(end, Exception):
            raise end
        return end


async def test_what_is_lost_is_done_again_until_it_is_known() -> None:
    asked = []

    async def ask(lost: CommitUnknown) -> None:
        asked.append(lost)

    assert await decided(Act(LOST, LOST, LOST, "done"), ask) == "done"
    assert asked == [LOST] * 3


async def test_who_asks_may_have_the_answer_already() -> None:
    async def ask(_: CommitUnknown) -> str:
        return "ours"

    act = Act(LOST, "never")
    assert (await decided(act, ask), act.ends) == ("ours", ["never"])


async def test_an_outage_is_an_outage_for_who_can_ask_again_later() -> None:
    with pytest.raises(StoreUnavailable):
        await decided(Act(LOST, AWAY))


@pytest.mark.parametrize("then", [AWAY, RIVAL, LOST, RuntimeError("of a driver")])
async def test_who_is_waited_for_does_not_say_that_nothing_is_stored(then: Exception) -> None:
    with pytest.raises(CommitUnknown):
        await decided(Act(LOST, then), within=0.0, busy=contended)
    with pytest.raises(type(then)):
        await decided(Act(then, LOST), within=0.0, busy=contended)


async def test_an_error_that_is_none_of_the_store_is_raised_as_it_is() -> None:
    for error in (RuntimeError("of the application"), mark(StoreUnavailable("of another store"))):
        with pytest.raises(type(error)):
            await decided(Act(LOST, error), within=9.0, asking=(StoreUnavailable,))


async def test_a_commit_of_a_function_is_not_asked_about() -> None:
    act = Act(mark(CommitUnknown("of another app")), "never")
    with pytest.raises(CommitUnknown):
        await decided(act)
    assert act.ends == ["never"]


async def test_a_rival_is_waited_for_and_then_told_of() -> None:
    assert await decided(Act(None, RIVAL, None, "done"), wait=9.0, busy=lambda met: met in (None, RIVAL)) == "done"
    assert await decided(Act(None, "never"), busy=lambda met: met is None) is None
    with pytest.raises(Contention):
        await decided(Act(RIVAL, "never"), busy=contended)


async def test_a_rival_may_be_our_own_commit_that_was_lost() -> None:
    """It is busy while the old server process lives, however short the wait for others is."""
    assert await decided(Act(LOST, RIVAL, RIVAL, "done"), within=9.0, busy=contended) == "done"
