"""Reaching a server, whatever speaks behind its port: TLS, and why not, in our words. Quotes no credentials."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable, Iterator
from typing import Final

from idemconsumer.certificates import RenewedContext
from idemconsumer.errors import ConfigurationError
from idemconsumer.redaction import error_text

ANSWER: Final = 3.0  # seconds for each answer; a healthy server needs milliseconds


def silence(*loggers: str) -> None:
    """Those of a client that writes of each loss, many times over; the feed that reconnects logs once that a session
    ended. One that has a level goes on."""
    for name in loggers:
        if (logger := logging.getLogger(name)).level == logging.NOTSET:
            logger.setLevel(logging.CRITICAL)


def tls_of(
    ca: str | None, cert: str | None, key: str | None, wrong: Callable[[Exception], str], *, trusting: bool = False
) -> RenewedContext:
    """TLS by these PEM files; without an authority's, the system's are trusted. Raises ConfigurationError, with what
    `wrong` says. `trusting`: whoever answers."""

    def make() -> ssl.SSLContext:
        try:
            context = ssl.create_default_context(cafile=ca)
            if cert is not None:
                context.load_cert_chain(cert, key)
            elif key is not None:
                raise ValueError("a key needs its certificate")
        except (OSError, ValueError) as error:
            raise ConfigurationError(wrong(error)) from error
        if trusting:
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        return context

    return RenewedContext(make, (ca, cert, key))


def text_of(error: BaseException | None) -> str:
    """The text of an error, or its name where it has none."""
    return (error and error_text(error)) or type(error).__name__


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
