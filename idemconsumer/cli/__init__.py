"""The command line: one module a group of verbs.

Errors that a person can act on are one line and an exit code, never a traceback.
"""

import os
import signal
from contextlib import suppress

if os.getpid() == 1:
    # The first process of a container gets only signals that it handles. One that is stopped while it still imports
    # would go on, and be killed at the end of its grace period with work in hand. It ends as it would anywhere else.
    with suppress(ValueError):  # imported in a thread
        signal.signal(signal.SIGTERM, lambda *_: os._exit(128 + signal.SIGTERM))
