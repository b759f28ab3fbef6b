"""Who decides, for the trace."""

from __future__ import annotations

import getpass
import os
import socket


def user() -> str:
    """The account and the machine of this process."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # a container's user may have no name
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"
