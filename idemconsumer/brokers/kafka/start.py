"""Decides where the reading of a partition begins. Pure: the state of Kafka and the database in, an offset out."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from idemconsumer.stores.kafka_positions import Kept

_MARK: Final = re.compile(r"idemconsumer:(\w+):(\d+):(\d+)")


@dataclass(frozen=True, slots=True)
class OffsetMark:
    """Metadata of each offset that is committed to Kafka: it names the database row that was written before the commit
    (K12)."""

    history: str
    counter: int
    base: int

    def __str__(self) -> str:
        return f"idemconsumer:{self.history}:{self.counter}:{self.base}"

    @classmethod
    def of(cls, metadata: str) -> OffsetMark | None:
        """The mark in this metadata; None for an offset that another program or a person has set."""
        found = _MARK.fullmatch(metadata)
        return None if found is None else cls(found[1], int(found[2]), int(found[3]))


def history_of(topic: str | None, drawn: str) -> str:
    """The name of a new history of the topic with this id."""
    return drawn if topic is None else f"{drawn}_{topic}"


def topic_of(history: str) -> str | None:
    """The id of the topic that the history is of; None if it was not known."""
    return history.partition("_")[2] or None


@dataclass(frozen=True, slots=True)
class Resume:
    """Up to where the group has read; `offset` is None if it has not read here.

    - `set_back`: the database was set back and lacks what came after.
    - `anew`: the group has read another topic of that name.
    - `forgotten`: Kafka no longer has an offset of the group.
    - `older`: Kafka has another offset, from before the row.
    - `kept`: the history that continues; None: a new one begins.
    - `leader`: from the row of the history that led to this offset.
    """

    offset: int | None
    set_back: bool = False
    kept: Kept | None = None
    anew: bool = False
    forgotten: bool = False
    older: bool = False
    leader: int | None = None

    @property
    def new(self) -> bool:
        """Whether no member of this group has read here: only then may `latest` skip the existing messages."""
        return not (self.set_back or self.anew or self.forgotten)


def resume(committed: int | None, mark: OffsetMark | None, kept: Kept | None, topic: str | None = None) -> Resume:
    """Decides between the offset in Kafka with its mark and the row in the database (K12).

    `topic` is the id of the topic that has the name now, None where Kafka does not report it.

    Of row and mark, the one with the greater counter is the later. If the mark is later, the database lacks the row
    that was written before it: the database was set back. Otherwise the row decides, also where Kafka has forgotten the
    offset (K19). An offset without a mark was set by a person and is obeyed; if it equals the row's position, the
    history continues there (K20). A row or mark of another topic says nothing about this one (K18).
    """
    anew = kept is not None and _of_another(kept.history, topic)
    kept = None if anew else kept
    if mark is not None and _of_another(mark.history, topic):
        return Resume(None, anew=True) if kept is None else Resume(kept.position, kept=kept, leader=kept.leader)
    if committed is None and anew:
        return Resume(None, anew=True)
    # Without its id the topic may have been recreated, and its deletion took the offset.
    if committed is None and kept is not None:
        same = topic is not None and topic == topic_of(kept.history)
        if not same:
            return Resume(None, forgotten=True)
        return Resume(kept.position, kept=kept, forgotten=True, leader=kept.leader)
    if committed is None or (mark is None and (kept is None or kept.position != committed)):
        return Resume(committed)
    if kept is None:
        return Resume(None, set_back=True)
    if mark is not None and mark.counter > kept.counter:
        begun = committed if mark.history == kept.history else mark.base  # a person set it back, to read that again
        return Resume(min(kept.position, begun), set_back=True, leader=kept.leader)
    return Resume(kept.position, kept=kept, older=kept.position != committed, leader=kept.leader)


def next_counter(mark: OffsetMark | None, row: Kept | None) -> int:
    """The counter of a new history: greater than any that Kafka or the database has, even for another topic."""
    return max(-1 if mark is None else mark.counter, -1 if row is None else row.counter) + 1


def left_quiet(committed: int | None, row: Kept | None, found: Resume) -> bool:
    """Whether no reader can have died while it read this partition (K10). That is so if the last reader left with
    nothing in flight, or if there was none. `row` is the database's row, even if it is of another topic."""
    if found.set_back:
        return False
    return committed is None if row is None else row.quiet == row.counter


def _of_another(history: str, topic: str | None) -> bool:
    its = topic_of(history)
    return its is not None and topic is not None and its != topic


@dataclass(frozen=True, slots=True)
class PartitionLog:
    """What a partition holds now: offsets from `start` up to but not including `end`. Up to `shared` it is the log that
    the group has read; None if that is unknown."""

    start: int
    end: int
    shared: int | None = None


@dataclass(frozen=True, slots=True)
class PartitionStart:
    """`lost`: how many offsets were never read and are no longer in the log (K11). `beyond`: how many offsets that the
    group has read are not in this log, which differs from that point on (K21)."""

    offset: int
    lost: int = 0
    beyond: int = 0


def start_at(group: int | None, log: PartitionLog, *, latest: bool) -> PartitionStart:
    """Where to begin. `group` is the offset up to which the group has read, None for a new group: that begins at the
    log's start, or with `latest` at its end."""
    if group is None:
        return PartitionStart(log.end if latest else log.start)
    if group < log.start:
        return PartitionStart(log.start, lost=log.start - group)
    if log.shared is not None and group > log.shared:
        begin = max(log.start, log.shared)
        return PartitionStart(begin, beyond=group - begin)
    if group > log.end:
        return PartitionStart(log.start, beyond=group - log.end)
    return PartitionStart(group)
