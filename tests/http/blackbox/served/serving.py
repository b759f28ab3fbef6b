"""Servers as processes. One process imports everything once, and each server is forked from it, as a pre-forking server
does; so one more costs a tenth of a second."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess, parent_process
from typing import Final

import uvicorn
from werkzeug.serving import ThreadedWSGIServer

from tests.http.blackbox.served import asgi, wsgi
from tests.http.blackbox.served.config import Config, Interface

_HOST: Final = "127.0.0.1"


def start(interface: Interface, config: Config, port: int) -> BaseProcess:
    context: ForkServerContext = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    process = context.Process(target=_serve, args=(interface, config, port), daemon=True)
    process.start()
    return process


def _serve(interface: Interface, config: Config, port: int) -> None:
    os.environ |= {"IDEMCONSUMER_DSN": config.dsn, "IDEMCONSUMER_REDIS_OUTAGE": config.outage}
    if config.skew:
        true = time.time
        time.time = lambda: true() + config.skew
    log = (config.folder / f"{port}.log").open("a", buffering=1)
    sys.stdout = sys.stderr = log
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if interface == "asgi":
        uvicorn.run(asgi.make(config), host=_HOST, port=port, log_level="warning")
        return
    made = wsgi.flask(config) if interface == "wsgi" else wsgi.django(config)
    server = ThreadedWSGIServer(_HOST, port, made)
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=server.shutdown).start())
    server.daemon_threads = False  # as a server that drains
    server.serve_forever()
    server.server_close()


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
