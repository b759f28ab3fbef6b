"""The topics of one membership: named ones, and those that match a pattern, which appear and disappear. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from idemconsumer.message.message import Subscription
from idemconsumer.message.sources import consumes, is_pattern


class Topics:
    """The topics that the handlers of one group subscribe to. Used in place of the client's compiled pattern."""

    def __init__(self, subscriptions: Sequence[Subscription]) -> None:
        self._handlers = {subscription.source: subscription.handler for subscription in subscriptions}
        self._sources: dict[str, str | None] = {}
        self.sources = tuple(sorted(self._handlers))
        self.patterns = tuple(source for source in self.sources if is_pattern(source))
        self.names = frozenset(each.name for each in subscriptions if not is_pattern(each.source))

    def source_of(self, topic: str) -> str | None:
        """The source that this topic's messages come from; None if no handler reads it, or patterns of two handlers
        match (K17)."""
        if topic not in self._sources:
            found = self._matching(topic)
            self._sources[topic] = None if self._contested(found) else next(iter(found), None)
        return self._sources[topic]

    def match(self, topic: str) -> bool:
        """As of a compiled pattern: whether the topic is read."""
        return self.source_of(topic) is not None

    def unmatched(self, topics: Iterable[str]) -> list[str]:
        """The patterns that match none of these topics."""
        matched = {self.source_of(topic) for topic in topics}
        return [source for source in self.patterns if source not in matched]

    def contested(self, topics: Iterable[str]) -> dict[str, list[str]]:
        """The topics among these that patterns of two handlers match, with the patterns."""
        found = {topic: self._matching(topic) for topic in topics if self.source_of(topic) is None}
        return {topic: sources for topic, sources in found.items() if sources}

    def _matching(self, topic: str) -> list[str]:
        named = f"kafka:{topic}"
        if named in self._handlers:
            return [named]
        # Topics with this prefix are Kafka's own; a pattern such as `.*` does not include them.
        return [] if topic.startswith("__") else [source for source in self.patterns if consumes(source, named)]

    def _contested(self, sources: Sequence[str]) -> bool:
        return len({self._handlers[source] for source in sources}) > 1
