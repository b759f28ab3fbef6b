"""A table that handlers write through SQLAlchemy, and handlers that do nothing else."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from idemconsumer import Tx
from idemconsumer.engine.engine import Engine
from idemconsumer.sqlalchemy import session
from tests.support.ledger import Ledger, run

Act: TypeAlias = Callable[[AsyncSession], Awaitable[object]]


class Base(DeclarativeBase):
    pass


class Item(Base):
    __tablename__ = "item"

    id: Mapped[str] = mapped_column(primary_key=True)
    qty: Mapped[int] = mapped_column(default=0)


@dataclass
class OrderPlaced:
    """The payload, and below the tables, of the example in docs/handlers.md."""

    order_id: str
    sku: str
    qty: int
    customer: str


class Order(Base):
    __tablename__ = "placed"

    id: Mapped[str] = mapped_column(primary_key=True)
    sku: Mapped[str]
    qty: Mapped[int]


class Stock(Base):
    __tablename__ = "stock"

    sku: Mapped[str] = mapped_column(primary_key=True)
    qty: Mapped[int]


class Customer(Base):
    __tablename__ = "customer"

    id: Mapped[str] = mapped_column(primary_key=True)


def with_items(ledger: Ledger) -> Ledger:
    ledger.run("create table if not exists item (id text primary key, qty int not null)")
    ledger.run("truncate item")
    return ledger


def stored(ledger: Ledger) -> list[tuple[Any, ...]]:
    return ledger.run("select id, qty from item order by id")


async def within(engine: Engine, act: Act, *ids: object, **options: Any) -> list[str]:
    """As `run`, in a block with a session."""

    async def open_(tx: Tx) -> None:
        async with session(tx) as db:
            await act(db)

    return await run(engine, open_, *ids, **options)


def why(ledger: Ledger) -> str:
    """Why the only dead letter is one."""
    ((error,),) = ledger.run("select error from idemconsumer.dead_letter")
    return str(error)
