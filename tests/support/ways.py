"""Ways in which a saga's handler runs two branches."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeAlias

Way: TypeAlias = Callable[[Any, Any], Any]


async def in_a_gather(first: Any, second: Any) -> None:
    await asyncio.gather(first, second)


async def in_a_group(first: Any, second: Any) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(first)
        group.create_task(second)
