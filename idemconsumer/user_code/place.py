"""Where a thread is, for the log."""

from __future__ import annotations

import sys


def place(thread: int) -> str:
    """The innermost line that the thread is at."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return "unknown"
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_qualname}"
