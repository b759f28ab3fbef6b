"""A program with an event loop for each message: `python -m tests.process.publishing_once LOOP DESTINATION…`."""

from __future__ import annotations

import asyncio
import gc
import sys

import uvloop

from idemconsumer import App
from tests.support.pids import connected

TIMES = 2


def main(loop: str, *destinations: str) -> None:
    app = App("once")
    run = {"asyncio": asyncio.run, "uvloop": uvloop.run}[loop]
    for destination in destinations:
        for number in range(TIMES):
            run(app.publish(destination, {"id": number}))
            gc.collect()
            assert not connected(), (destination, connected())


if __name__ == "__main__":
    main(*sys.argv[1:])
