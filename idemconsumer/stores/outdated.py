"""Errors of what was prepared for a handler without its asking (J28): the engine's own fault, whatever they say."""

from __future__ import annotations

from typing import Final

import psycopg

_NO_SUCH_NAME: Final = "26000"  # somebody has sent DEALLOCATE or DISCARD, in a function of the database perhaps
_NAME_IS_TAKEN: Final = "42P05"
_NOT_SUPPORTED: Final = "0A000"
_FINDS_OTHER_COLUMNS: Final = "RevalidateCachedQuery"  # in the server; its text may be in any language


def is_outdated(error: Exception | None) -> bool:
    if not isinstance(error, psycopg.Error):
        return False
    state = error.sqlstate
    changed = state == _NOT_SUPPORTED and error.diag.source_function == _FINDS_OTHER_COLUMNS
    return changed or state in (_NO_SUCH_NAME, _NAME_IS_TAKEN)
