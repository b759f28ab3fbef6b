"""What the error of a `decode=` says about its message."""

from __future__ import annotations

import errno
import gzip
import socket
from collections.abc import Callable
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

import pytest

from idemconsumer import BadMessage, Retry, StoreUnavailable
from idemconsumer.errors import NotReadNow
from idemconsumer.message.decoders import not_decoded


def raised_by(act: Callable[[], object]) -> Exception:
    try:
        act()
    except Exception as error:
        return error
    raise AssertionError("it raised nothing")


def as_a_client_does(cause: Exception, *, explicit: bool) -> Exception:
    """httpx raises its own errors from those of the network, requests while it handles them."""

    def ask() -> None:
        try:
            raise cause
        except Exception as error:
            if explicit:
                raise RuntimeError("no answer") from error
            raise RuntimeError("no answer")  # noqa: B904 - as written

    return raised_by(ask)


@pytest.mark.parametrize(
    "error",
    [
        ConnectionRefusedError(errno.ECONNREFUSED, "refused"),
        TimeoutError(),
        socket.gaierror(socket.EAI_AGAIN, "try again"),
        OSError(errno.ENETUNREACH, "unreachable"),
        StoreUnavailable("away"),
        as_a_client_does(ConnectionResetError(), explicit=True),
        as_a_client_does(TimeoutError(), explicit=False),
        ExceptionGroup("several", [ValueError(), ConnectionError()]),
        raised_by(lambda: urlopen("http://127.0.0.1:1/", timeout=5)),
    ],
    ids=repr,
)
def test_an_outage_is_no_fault_of_the_message(error: Exception) -> None:
    refusal = not_decoded(error)
    assert isinstance(refusal, NotReadNow)
    assert refusal.error is error


@pytest.mark.parametrize(
    "error",
    [
        ValueError(),
        raised_by(lambda: gzip.decompress(b"no gzip")),
        raised_by(lambda: Path("/nowhere/schema-7").read_bytes()),
        HTTPError("http://registry/7", 404, "unknown", None, None),  # type: ignore[arg-type]
        URLError("no such scheme"),
        BadMessage("schema_unknown", "7"),
    ],
    ids=repr,
)
def test_anything_else_is(error: Exception) -> None:
    assert not isinstance(not_decoded(error), NotReadNow)


def test_a_retry_is_found_where_a_task_group_wraps_it() -> None:
    retry = Retry(after="5s")
    refusal = not_decoded(ExceptionGroup("several", [ValueError(), ExceptionGroup("inner", [retry])]))
    assert isinstance(refusal, NotReadNow)
    assert refusal.error is retry
