"""Reaching a server of any protocol: TLS, and the reason for a failure in our own words. Quotes no credentials."""

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

ANSWER: Final = 3.0  # seconds to wait for each answer; a healthy server needs milliseconds


def silence(*loggers: str) -> None:
    """Silence the loggers of a client that logs each loss many times over. The feed that reconnects logs once that a
    session ended. A logger with a level of its own is left as it is."""
    for name in loggers:
        if (logger := logging.getLogger(name)).level == logging.NOTSET:
            logger.setLevel(logging.CRITICAL)


def tls_of(
    ca: str | None, cert: str | None, key: str | None, wrong: Callable[[Exception], str], *, trusting: bool = False
) -> RenewedContext:
    """A TLS context from these PEM files; without a CA file, the system's authorities are trusted. Raises
    ConfigurationError with the text that `wrong` makes of the cause. `trusting`: accept any certificate."""

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
    """The text of an error, or the name of its type where the text is empty."""
    return (error and error_text(error)) or type(error).__name__


def unreached(error: BaseException, at: str, setting: str, authority: str) -> str | None:
    """The network or TLS failure of the server `at` among the causes of `error`, as text; None if there is none.

    `setting` is the variable with the server's address, `authority` the setting with the CA file.
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
    """Whether the server speaks TLS; None if nothing answers there."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # no data is sent
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
    while error is not None and id(error) not in seen:  # aiormq raises errors that are their own cause
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
