"""Acts that a store could not complete, and still has to: each is repeated until it is done (H23), or until the store
itself reports that it cannot be done (H52)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

from idemconsumer.duty import Duty
from idemconsumer.logs import log
from idemconsumer.redaction import error_text
from idemconsumer.rules.doubt import Meaning, meaning
from idemconsumer.user_code.cancellation import ends_this_task

T = TypeVar("T")

_PAUSE: Final = 0.5  # seconds
_LAST: Final = 2.0  # seconds, when the process ends


class Unfinished:
    """One repeatable act for each key; a later one replaces an earlier one."""

    def __init__(self) -> None:
        self._acts: dict[bytes, Callable[[], Awaitable[Any]]] = {}
        self._trying = Duty(self._try_again, first=_PAUSE)

    @property
    def idle(self) -> bool:
        return not self._acts

    async def do(self, key: bytes, act: Callable[[], Awaitable[T]]) -> T:
        """Run it now, and if it fails again later, whether or not the caller goes on. Raises the first attempt's
        error."""
        self.drop(key)
        try:
            return await act()
        except BaseException as error:
            if meaning(error) is not Meaning.REFUSED:
                self.add(key, act)
            raise

    def add(self, key: bytes, act: Callable[[], Awaitable[Any]]) -> None:
        self._acts[key] = act
        self._trying.start()

    def drop(self, key: bytes) -> None:
        """The act is done, or is not wanted any more."""
        self._acts.pop(key, None)

    async def close(self) -> None:
        """Try each once more. Keys whose act still fails are free when their leases end."""
        await self._trying.close()
        try:
            async with asyncio.timeout(_LAST):
                await self._try()
        except TimeoutError:
            pass
        if self._acts:
            log.warning("requests left unfinished, their keys are free when their leases end", requests=len(self._acts))

    async def _try_again(self) -> float | None:
        await self._try()
        return _PAUSE if self._acts else None

    async def _try(self) -> None:
        for key, act in list(self._acts.items()):
            if self._acts.get(key) is not act:  # dropped, or replaced, while others were tried
                continue
            try:
                await act()
            except BaseException as error:
                if ends_this_task(error):
                    raise
                if meaning(error) is not Meaning.REFUSED:
                    log.debug("the end of a request could not be stored, will retry", error=error_text(error))
                    continue
                log.error(
                    "the response of a request cannot be stored, so a repetition runs again", error=error_text(error)
                )
            if self._acts.get(key) is act:
                del self._acts[key]
