"""What an exception of a store or a broker means (H52, X10)."""

from __future__ import annotations

import pytest

from idemconsumer import errors
from idemconsumer.rules.doubt import Meaning, meaning
from tests.support.foreign import FOREIGN


def test_only_our_own_errors_mean_something() -> None:
    refused = [errors.CannotKeep("x"), errors.BadMessage("unsendable", "x")]
    passing = [
        errors.StoreUnavailable("x"), errors.BrokerUnavailable("x"), errors.Contention("x"), errors.CommitUnknown("x"),
        errors.ConfigurationError("x"),
    ]  # fmt: skip
    assert {meaning(error) for error in refused} == {Meaning.REFUSED}
    assert {meaning(error) for error in passing} == {Meaning.PASSING}


@pytest.mark.parametrize("error", FOREIGN)
def test_what_a_library_raises_is_doubt(error: str) -> None:
    assert meaning(FOREIGN[error]()) is Meaning.DOUBT
