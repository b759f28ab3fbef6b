"""What a handler's statement would do beyond its transaction, as far as its text shows.

The text is checked without its comments, literals and quotes. A statement that plainly changes the session is refused,
with what to write instead. In doubt the session is reset after the handler: a doubt costs a round trip, and a miss
would cost another message its session. The guard detects transaction control that is missed here.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any, Final

from psycopg import AsyncConnection, sql


class Effect(Enum):
    """What the engine has to do with a statement."""

    REFUSED = auto()
    NOT_ALONE = auto()  # refused, through tx.connection too: the engine would have to send it in another form
    UNSEEN = auto()  # it may change the session, which is reset after the handler
    PASSING = auto()  # it ends with the transaction: the other messages of a group must not run with it (G6)
    ALL_IMMEDIATE = auto()  # sent for all constraints except the guard's
    RESET_ALL = auto()  # sent in a form that keeps the engine's mark


@dataclass(frozen=True, slots=True)
class Special:
    """A statement that is not sent as it is, or not without consequences; `reason`: why it is refused, if it is.

    `lasting`: it may hold until the end of the transaction and cannot be undone, so no other message may follow (G6).
    """

    effect: Effect
    reason: str = ""
    lasting: bool = False


def _pattern(text: str) -> re.Pattern[str]:
    return re.compile(text, re.IGNORECASE | re.DOTALL | re.ASCII)


_REMEMBERED: Final = 4_096  # characters: longer texts are judged each time
_MOST: Final = 1_024
_READ: Final = 16_384  # characters: of longer texts only the beginning is read
_BLANK: Final = " \t\n\r\f\v;"

# A statement that begins like this and has none of the words below anywhere is plain. No parsing is needed for that.
_PLAIN: Final = _pattern(r"\s*(?:insert|select|update|delete|merge|with|values)\b")
_WRITES: Final = _pattern(r"\s*(?:(?:insert|update|delete|merge)|with\b.*[()]\s*(?:insert|update|delete|merge))\b")
_RUNS_TEXT: Final = ("query_to_xml", "ts_stat", "ts_rewrite", "crosstab", "connectby")
_DOUBTFUL: Final = (
    *(";", "temp", "set_config", "set_limit", "pg_settings", "advisory_lock", "advisory_unlock", 'u&"'),
    *_RUNS_TEXT,
)

# Written as complements: `re` takes 30 ms for a range to the end of Unicode, at each start of a process.
_LETTER: Final = r"[^\x00-@\[-^`{-\x7f]"  # a to z, _ and everything beyond ASCII
_LETTER_OR_DIGIT: Final = r"[^\x00-/:-@\[-^`{-\x7f]"
_IN_NAME: Final = r"[^\x00-#%-/:-@\[-^`{-\x7f]"  # and $
_TOKEN: Final = _pattern(
    rf"""--[^\n\r]*+|/\*|(?:u&)?"[^"]*+"?|(?<!{_IN_NAME})e'(?:[^'\\]++|\\.|'')*+'?|'[^']*+'?"""
    rf"|\$(?:{_LETTER}{_LETTER_OR_DIGIT}*+)?\$"
)
_COMMENT_MARK: Final = re.compile(r"/\*|\*/")
_NAME_ENDS: Final = re.compile(_IN_NAME, re.ASCII)
_NO_WORD: Final = re.compile(r"\W", re.ASCII)
_DOUBT: Final = "\\"  # replaces text that the server may read in another way than this module

_CONTROL: Final = _pattern(
    r"(?:commit|end|abort|begin|start\s+transaction|prepare\s+transaction|rollback(?!\s+(?:work\s+|transaction\s+)?to\b))\b"
)
_BEGINS: Final = tuple(
    (_pattern(pattern), reason)
    for pattern, reason in (
        (
            r"set\b(?!\s+(?:local|transaction|constraints)\s+[^\s.=])",
            "SET also affects later messages; write SET LOCAL, which ends with the transaction",
        ),
        (r"discard\b", "DISCARD affects the session, which other messages use too; remove it"),
        (r"(?:un)?listen\b", "LISTEN affects the session, which other messages use too; use a connection of your own"),
        (r"load\b", "LOAD affects the session, which other messages use too; use session_preload_libraries"),
        (
            r"prepare\b",
            "PREPARE also affects later messages; remove it: statements that are sent often are prepared automatically",
        ),
    )
)
_TEMPORARY: Final = (
    "a temporary {what} outlives the message: the next one on this connection would find it; "
    "create a temporary table ON COMMIT DROP"
)
_TEMP: Final = r"(?:(?:global|local)\s+)?temp(?:orary)?\b"
_ARGUMENTS: Final = r"set_config\s*\((?:[^()]|\([^()]*\))*,\s*"
_CONTAINS: Final = tuple(
    (_pattern(pattern), reason)
    for pattern, reason in (
        (
            r"^declare\b.*\bwith\s+hold\s+for\b",
            "a cursor WITH HOLD outlives the message; declare it without, or read all rows",
        ),
        (rf"^create\s+{_TEMP}\s+table\b(?!.*\bon\s+commit\s+drop\b)", _TEMPORARY.format(what="table")),
        (
            rf"^create\s+(?:or\s+replace\s+)?{_TEMP}\s+(?:recursive\s+)?(?:view|sequence)\b",
            _TEMPORARY.format(what="view or sequence"),
        ),
        (
            r"\bpg_(?:try_)?advisory_lock(?:_shared)?\s*\(",
            "a session's advisory lock outlives the message; take pg_advisory_xact_lock, which ends with the "
            "transaction",
        ),
        (
            rf"{_ARGUMENTS}false\s*\)",
            "set_config(…, false) also affects later messages; write set_config(…, true), which ends with the "
            "transaction",
        ),
    )
)
_OWN_WORDS: Final = (
    (Effect.ALL_IMMEDIATE, "SET CONSTRAINTS ALL IMMEDIATE", _pattern(r"\bset\s+constraints\s+all\s+immediate\b")),
    (Effect.RESET_ALL, "RESET ALL", _pattern(r"\breset\s+all\b")),
)
_DO: Final = _pattern(r"do\b")
_LOCAL: Final = _pattern(rf"{_ARGUMENTS}true\s*\)")
_OF_NO_ROLE: Final = _pattern(r"set_config\s*\(\s*'(?!(?:role|session_authorization)')[^']*'\s*,")
_PASSING: Final = _pattern(rf"^(?:set\s+local|declare|savepoint|rollback)\b|\bcreate\s+{_TEMP}")
_UNSEEN: Final = _pattern(
    r"^(?:do|call|execute)\b|^(?:explain|create)\b.*\bexecute\b|[;\\]|set_config|set_limit|pg_settings|"
    rf"advisory_(?:un)?lock|\b(?:into|replace)\s+{_TEMP}|\bcreate\s+{_TEMP}(?!.*\bon\s+commit\s+drop\b)|"
    rf"^declare\b.*\bhold\b|\bwith\s+hold\b|^set\s+local\s+(?:role|session(?:\s+|_)authorization)\b|"
    rf"{'|'.join(_RUNS_TEXT)}"
)


_LASTING: Final = _pattern(
    r"\bset\s+(?:(?:local|session)\s+)?(?:constraints|transaction)\b|\btransaction_(?:read_only|deferrable|isolation)\b"
)


def _judged(query: str) -> Special | None:
    known = _effect(query)
    if known is None and _PLAIN.match(query) is not None:
        return None
    # Also in the text of a DO. A doubt costs only this: the messages behind this one get a transaction of their own.
    if _LASTING.search(query) is None and _LASTING.search(_bare(query[:_READ])) is None:
        return known
    return Special(Effect.PASSING, lasting=True) if known is None else replace(known, lasting=True)


def _effect(query: str) -> Special | None:
    if plain := _PLAIN.match(query) is not None:
        lowered = query.lower()
        if not any(word in lowered for word in _DOUBTFUL):
            return None
    if (long := len(query) > _READ) and plain:
        return Special(Effect.UNSEEN)
    text = _bare(query[:_READ]).strip(_BLANK)
    if _CONTROL.match(text) is not None:
        return Special(
            Effect.REFUSED,
            f"a handler must not run {text.split()[0].upper().rstrip(';')}: the engine commits its writes together "
            "with the message's record; raise Reject or Retry to undo them, or use a SAVEPOINT for a part of them",
        )
    for pattern, reason in _BEGINS:
        if pattern.match(text) is not None:
            return Special(Effect.REFUSED, reason)
    if long:
        return Special(Effect.UNSEEN)
    if (known := _own_words(text, query)) is not None:
        return known
    for pattern, reason in _CONTAINS:
        if pattern.search(text) is not None:
            return Special(Effect.REFUSED, reason)
    rest = _LOCAL.sub("", text)
    if _UNSEEN.search(rest) is not None or "pg_temp" in query.lower():
        return Special(Effect.UNSEEN)
    if rest != text:
        # Whether it sets the role shows in the literals, which `_bare` removes: each call has to be plainly harmless.
        plain = len(_OF_NO_ROLE.findall(query)) == query.lower().count("set_config")
        return Special(Effect.PASSING if plain else Effect.UNSEEN)
    return Special(Effect.PASSING) if _PASSING.search(text) is not None else None


def _own_words(text: str, query: str) -> Special | None:
    """A statement that the engine has to send in another form, which it can only if the text has nothing else."""
    several = ";" in text
    inside = _bare(query, blocks=True) if _DO.match(text) is not None else text if several else ""
    for effect, words, pattern in _OWN_WORDS:
        if pattern.fullmatch(text) is not None:
            return Special(effect)
        if pattern.search(inside) is not None:
            return Special(
                Effect.NOT_ALONE,
                f"{words} would remove the mark by which the engine recognizes its transaction; send it alone, not "
                "inside DO",
            )
    return None


def _bare(text: str, *, blocks: bool = False) -> str:
    """The text with '' for each literal, a blank for a comment, and quoted names without quotes.

    `blocks`: dollar-quoted text is kept as text. Each character is read once.
    """
    parts: list[str] = []
    at = 0
    while (token := _TOKEN.search(text, at)) is not None:
        parts.append(text[at : token.start()])
        found, at = token[0], token.end()
        match found[0]:
            case "-":
                parts.append(" ")
            case "/":
                parts.append(" ")
                at = _comment_ends(text, at)
            case '"':
                parts.append(f" {_NO_WORD.sub('_', found.strip(found[0]).lower())} ")
            case "$" if token.start() and _NAME_ENDS.match(text, token.start() - 1) is not None:
                parts.append(_DOUBT)  # it may belong to the name or number before it
            case "$":
                parts.append(" " if blocks else "''")
                if not blocks:
                    ends = text.find(found, at)
                    at = len(text) if ends < 0 else ends + len(found)
            case "'" if "\\" in found:  # where it ends depends on standard_conforming_strings
                parts.append(f"''{_DOUBT}")
            case "u" | "U":  # a name with escapes
                parts.append(_DOUBT)
            case _:
                parts.append("''")
    parts.append(text[at:])
    return "".join(parts)


def _comment_ends(text: str, at: int) -> int:
    depth = 1
    while depth:
        if (mark := _COMMENT_MARK.search(text, at)) is None:
            return len(text)
        depth += 1 if mark[0] == "/*" else -1
        at = mark.end()
    return at


class _Judgements(dict[str, Special | None]):
    """Results by text; those of short texts are kept. A dictionary, since that is the fastest lookup."""

    def __missing__(self, query: str) -> Special | None:
        known = _judged(query)
        if len(query) <= _REMEMBERED:
            if len(self) >= _MOST:
                self.clear()
            self[query] = known
        return known


# None for a plain statement, as nearly all are. Transaction control is refused (J10); savepoints are not. A statement
# that changes the session is refused, or the session is reset (J21).
special: Final[Callable[[str], Special | None]] = _Judgements().__getitem__


def is_plain(query: str) -> bool:
    """Whether it reads or writes rows, and no more, as far as its first word shows."""
    return _PLAIN.match(query) is not None


def writes(query: str) -> bool:
    """Whether a plain statement writes. A handler may run another one for its lock, if it does not read the rows
    (J26)."""
    return _WRITES.match(query) is not None


def text_of(query: Any, connection: AsyncConnection[Any]) -> str:
    """The text of any statement that psycopg accepts; for an unknown kind, a text whose effect cannot be seen."""
    if isinstance(query, str):
        return query
    if isinstance(query, bytes | bytearray):
        return query.decode("utf-8", "replace")
    return query.as_string(connection) if isinstance(query, sql.Composable) else "do"
