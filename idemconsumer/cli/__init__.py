"""The command line: one module per group of verbs.

An error that a person can act on is reported in one line with an exit code, never as a traceback.
"""

import os
import signal
from contextlib import suppress

if os.getpid() == 1:
    # The first process of a container gets only the signals that it handles. Stopped while it still imports, it would
    # go on, and be killed at the end of its grace period with work in flight. With this handler it ends as any other
    # process would.
    with suppress(ValueError):  # raised if this is imported in a thread
        signal.signal(signal.SIGTERM, lambda *_: os._exit(128 + signal.SIGTERM))
