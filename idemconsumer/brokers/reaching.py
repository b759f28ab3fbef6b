"""Why a server's port cannot be used, in our words, whatever speaks behind it. Quotes addresses and no credentials."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Iterator
from typing import Final

ANSWER: Final = 3.0  # seconds for each answer; a healthy server needs milliseconds


def unreached(error: BaseException, at: str, setting: str, authority: str) -> str | None:
    """What the network or TLS says of the server `at`, somewhere in that error; None where it is something else.

    `setting` is the variable with its address, and `authority` is where the file of whom to trust is named.
    """
    for cause in _causes(error):
        if isinstance(cause, ssl.SSLCertVerificationError):
            return (
                f"the certificate of {at} is not accepted: {cause.verify_message}; set {authority} to the authority "
                "that signed it, and use a host name that is in it"
            )
        if isinstance(cause, socket.gaierror):
            return f"the name of {at} cannot be resolved; correct {setting}"
        if isinstance(cause, ConnectionRefusedError):
            return f"nothing listens at {at}; start the server, or correct {setting}"
    return None


async def speaks_tls(host: str, port: int) -> bool | None:
    """Whether the server does; None: nothing answers there."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # nothing is sent
    try:
        async with asyncio.timeout(ANSWER):
            _, writer = await asyncio.open_connection(host, port)
    except (OSError, TimeoutError):
        return None
    try:
        async with asyncio.timeout(ANSWER):
            await writer.start_tls(context)
    except (OSError, TimeoutError):
        return False
    else:
        return True
    finally:
        writer.close()


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:  # aiormq makes errors that cause themselves
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
