"""A test that is marked `crash_matrix`: its first message goes through the crash matrix before the kit has it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final

from idemconsumer.app.app import App
from idemconsumer.errors import ConfigurationError
from idemconsumer.message.message import Message
from idemconsumer.settings import Settings
from idemconsumer.testing.matrix import check_names, matrix_of_app

_HOW: Final = "write @pytest.mark.crash_matrix(tables=['stock'])"


class MarkedTest:
    """What the mark says. Only the first message of the test is run."""

    def __init__(
        self,
        *more: object,
        tables: Sequence[str] = (),
        ignore: Collection[str] = (),
        timeout: float = 10.0,
        **unknown: object,
    ) -> None:
        if more or unknown:
            given = ", ".join([*map(repr, more), *(f"{name}=" for name in unknown)])
            raise ConfigurationError(f"the mark crash_matrix has tables=, ignore= and timeout=, not {given}; {_HOW}")
        check_names(tables, ignore)
        self._tables, self._ignore, self._timeout = tables, ignore, timeout
        self.due = True

    async def run(
        self, app: App, message: Message, settings: Settings, resources: Mapping[type, object], dsn: str
    ) -> None:
        """Nobody is connected to `dsn` meanwhile. Raises AssertionError with the report."""
        self.due = False
        report = await matrix_of_app(app, message, settings, resources, dsn, self._tables, self._ignore, self._timeout)
        if report.wrong:
            raise AssertionError(str(report))

    def check(self) -> None:
        """Raise AssertionError for a test that has sent nothing, of which nothing was shown."""
        if self.due:
            raise AssertionError("the test is marked crash_matrix, and no kit of it has sent a message")
