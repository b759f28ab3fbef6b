"""Where a thread is, for the log."""

from __future__ import annotations

import sys


def place(thread: int) -> str:
    """Its innermost line."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return "unknown"
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_qualname}"
