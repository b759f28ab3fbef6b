"""A subject in a process of its own, told over its standard input what to run."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from idemconsumer.observe.logging import configure

ROOT = Path(__file__).parents[1]
_LEAVE_SECONDS = 15.0


class Child:
    """`ask` sends one line of JSON and waits for the answer, which is one too."""

    def __init__(self, process: Process) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    async def ask(self, **question: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question).encode() + b"\n")
        return await self.answer()

    async def answer(self) -> Any:
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a subject ended with exit code {await self._process.wait()}; its errors are above")
        return json.loads(line)


@asynccontextmanager
async def child(module: str, *arguments: str, environment: Mapping[str, str] | None = None) -> AsyncIterator[Child]:
    """Run `python -m module` while the block lasts, and give it when it is ready."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", module, *arguments, stdin=PIPE, stdout=PIPE, cwd=ROOT,
        env={**os.environ, **(environment or {})},
    )  # fmt: skip
    try:
        running = Child(process)
        assert await running.answer() == "ready"
        yield running
    finally:
        assert process.stdin is not None
        process.stdin.close()
        await ended(process, _LEAVE_SECONDS)


async def ended(process: Process, within: float) -> None:
    """Wait for its end, and kill it when that takes longer."""
    try:
        async with asyncio.timeout(within):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


def resident(pid: int) -> int:
    """Bytes of memory of a process; none when it is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (FileNotFoundError, ProcessLookupError):
        return 0


def busy(pid: int) -> float:
    """Seconds of CPU that a process has taken; none when it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (FileNotFoundError, ProcessLookupError):
        return 0.0


async def serve(answer: Callable[[dict[str, Any]], Awaitable[Any]]) -> None:
    """The child's side: say that it is ready, then answer each question until there are no more."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what anybody prints from here on is no answer
    configure("auto", "error")
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    answers.write(json.dumps("ready") + "\n")
    while line := await lines.readline():
        answers.write(json.dumps(await answer(json.loads(line))) + "\n")
