"""A table in which somebody remembers by hand which messages were handled, read page by page (R31)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import msgspec
import psycopg
from psycopg import sql

from idemconsumer.errors import ConfigurationError
from idemconsumer.handlers.handler import BoundHandler
from idemconsumer.message.key_columns import KeyColumns, Value, key_columns
from idemconsumer.message.message import StoredResult
from idemconsumer.sql.answering import AnsweringConnection

Connection: TypeAlias = AnsweringConnection[dict[str, Any]]
Column: TypeAlias = Callable[[str], Mapping[str, Any]]  # what is known of it, by its name; raises ConfigurationError

JSON: Final = "application/json"
BYTES: Final = "application/octet-stream"

# Of a column of any other type it cannot be told how a message would write the same value.
_KEYS: Final = ("text", "varchar", "bpchar", "citext", "int2", "int4", "int8", "uuid", "bytea")
_TIMES: Final = ("timestamptz", "timestamp", "date")


class Chosen(msgspec.Struct, frozen=True, kw_only=True):
    """What to read: the names of the table and of its columns. `done` are the values of `state`, as texts, that a
    message has which was applied. `where` is SQL. `content_type` is that of the results."""

    table: str
    key: Sequence[str]
    tenant: Sequence[str] = ()
    state: str | None = None
    done: Sequence[str] = ()
    result: str | None = None
    content_type: str | None = None
    created: str | None = None
    where: str | None = None

    def as_text(self) -> str:
        """The same for the same choice."""
        return msgspec.json.encode(self).decode()


class Table:
    """Its pages, and what a row of them says."""

    def __init__(self, name: str, order: Sequence[str], first: sql.Composed, next_: sql.Composed, type_: str) -> None:
        self.name = name
        self._order = order
        self._first = first
        self._next = next_
        self._content_type = type_

    async def page(self, connection: Connection, position: Sequence[str] | None, limit: int) -> list[dict[str, Any]]:
        """The rows behind `position`, in the order of the primary key. Raises ConfigurationError for SQL that does not
        fit the table."""
        given = {"limit": limit} | {f"after{n}": value for n, value in enumerate(position or ())}
        try:
            query = self._first if position is None else self._next
            return await (await connection.execute(query, given)).fetchall()
        except (psycopg.ProgrammingError, psycopg.DataError) as error:
            raise ConfigurationError(f"table {self.name} cannot be read so: {error.diag.message_primary}") from error

    def position(self, row: Mapping[str, Any]) -> list[str]:
        """Where the row stands."""
        return _cells(row, "order")

    def named(self, row: Mapping[str, Any]) -> dict[str, str]:
        """The row, for a person."""
        return dict(zip(self._order, self.position(row), strict=True))

    def key(self, row: Mapping[str, Any]) -> list[Value]:
        return _cells(row, "key")

    def tenant(self, row: Mapping[str, Any]) -> list[Value]:
        return _cells(row, "tenant")

    def result(self, row: Mapping[str, Any]) -> StoredResult | None:
        """Raises ConfigurationError for one that is not of its content type: without its result a key is not taken."""
        body = row["result"]
        if body is None or (self._content_type == JSON and body == b"null"):
            return None
        if self._content_type == JSON:
            try:
                msgspec.json.decode(body)
            except (msgspec.MsgspecError, RecursionError, UnicodeError):
                where = ", ".join(f"{name}={value}" for name, value in self.named(row).items())
                raise ConfigurationError(
                    f"table {self.name}: the result of the row {where} is not JSON; write --content-type text/plain, "
                    "or whatever its results are"
                ) from None
        return StoredResult(body, self._content_type)


def _cells(row: Mapping[str, Any], what: str) -> list[Any]:
    cells: list[Any] = []
    while (name := f"{what}{len(cells)}") in row:
        cells.append(row[name])
    return cells


async def read_table(
    connection: Connection, queries: Mapping[str, bytes], chosen: Chosen, handler: BoundHandler
) -> Table:
    """Look at the table, and refuse what cannot be meant. Raises ConfigurationError."""

    async def ask(name: str, given: Mapping[str, Any]) -> list[dict[str, Any]]:
        return await (await connection.execute(queries[name], given)).fetchall()

    found = next(iter(await ask("import_table", {"table": chosen.table})), None)
    if found is None or not found["is_table"]:
        what = "there is no table" if found is None else "this is no table, but a view or something else:"
        raise ConfigurationError(f"{what} {chosen.table!r}; write NAME or SCHEMA.NAME of a table of this database")
    columns = {row["name"]: row for row in await ask("import_columns", found)}
    order = next((row["columns"] for row in await ask("import_order", found)), None)
    if order is None:
        raise ConfigurationError(
            f"table {chosen.table!r} has neither a primary key nor a unique index over columns that are NOT NULL, so "
            "it cannot be read page by page; create one"
        )
    return _compose(f"{found['schema']}.{found['name']}", found, columns, order, chosen, handler)


def _compose(
    name: str,
    found: Mapping[str, Any],
    columns: Mapping[str, Mapping[str, Any]],
    order: Sequence[str],
    chosen: Chosen,
    handler: BoundHandler,
) -> Table:
    def column(wanted: str) -> Mapping[str, Any]:
        if wanted not in columns:
            raise ConfigurationError(
                f"table {chosen.table!r} has no column {wanted!r} that this role may read; it has {', '.join(columns)}"
            )
        return columns[wanted]

    def key_cells(what: str, option: str, wanted: Sequence[str], its: KeyColumns | None) -> list[sql.Composable]:
        names = () if its is None else its.names
        if len(wanted) != len(names):
            needed = f"{len(names)}, in this order: {', '.join(names)}" if names else f"none: it has no {what}"
            raise ConfigurationError(
                f"handler {handler.name!r}: of {option} it needs {needed}; given are {len(wanted)}"
            )
        return [_key_cell(column(each), f"{what}{n}", chosen.table) for n, each in enumerate(wanted)]

    tenant = None if handler.tenant_spec is None else key_columns(handler.tenant_spec)
    cells: list[sql.Composable] = [
        *(sql.SQL("{}::text as {}").format(_name(each), _name(f"order{n}")) for n, each in enumerate(order)),
        *key_cells("key", "--key-column", chosen.key, key_columns(handler.key_spec)),
        *key_cells("tenant", "--tenant-column", chosen.tenant, tenant),
        *_state_cells(chosen, column),
        *_time_cells(chosen, column, handler.options.retain),
    ]
    result, content_type = _result_cell(chosen, column)
    where = sql.SQL("({})").format(_given(chosen.where)) if chosen.where else sql.SQL("true")
    # With the table's name, since ORDER BY would take a plain one for that of a cell.
    names = sql.SQL(", ").join(sql.Identifier(found["schema"], found["name"], each) for each in order)
    after = sql.SQL(", ").join(
        sql.SQL("{}::{}").format(sql.Placeholder(f"after{n}"), _given(column(each)["type"]))
        for n, each in enumerate(order)
    )
    template = sql.SQL("select {} from {} where {} and {} order by {} limit %(limit)s")

    def page(behind: sql.Composable) -> sql.Composed:
        selected = sql.SQL(", ").join([*cells, result])
        return template.format(selected, sql.Identifier(found["schema"], found["name"]), where, behind, names)

    behind = sql.SQL("({}) > ({})").format(names, after)
    return Table(name, order, page(sql.SQL("true")), page(behind), content_type)


def _key_cell(column: Mapping[str, Any], alias: str, table: str) -> sql.Composable:
    base, name = column["base"], column["name"]
    whole = base == "numeric" and column["scale"] == 0 and column["type"] != "numeric"
    if base not in _KEYS and not whole:
        raise ConfigurationError(
            f"table {table!r}: column {name!r} is of type {column['type']}, of which it cannot be told how a message "
            "writes the same value; add a generated column that has the text of the key"
        )
    cell = sql.SQL("{}" if base == "bytea" else "{}::text").format(_name(name))
    return sql.SQL("{} as {}").format(cell, _name(alias))


def _state_cells(chosen: Chosen, column: Column) -> list[sql.Composable]:
    if (chosen.state is None) != (not chosen.done):
        raise ConfigurationError("give both --state-column and --done-values, or neither: then every row is done")
    if chosen.state is None:
        return [sql.SQL("null as state, true as done")]
    state = _name(column(chosen.state)["name"])
    done = sql.SQL("coalesce({}::text = any ({}), false) as done").format(state, sql.Literal(list(chosen.done)))
    return [sql.SQL("{}::text as state").format(state), done]


def _time_cells(chosen: Chosen, column: Column, retain: float) -> list[sql.Composable]:
    """By the database's clock (R2). A time that is still to come is now, and one without a zone is of the session's."""
    if chosen.created is None:
        return [sql.SQL("null::timestamptz as at, false as old")]
    if (its := column(chosen.created))["base"] not in _TIMES:
        raise ConfigurationError(f"column {chosen.created!r} is of type {its['type']}, and not a time or a date")
    at = sql.SQL("{}::timestamptz").format(_name(chosen.created))
    since = sql.SQL("clock_timestamp() - make_interval(secs => {})").format(sql.Literal(retain))
    return [
        sql.SQL("case when {0} >= {1} then least({0}, clock_timestamp()) end as at").format(at, since),
        sql.SQL("coalesce({} < {}, false) as old").format(at, since),
    ]


def _result_cell(chosen: Chosen, column: Column) -> tuple[sql.Composable, str]:
    if chosen.result is None:
        return sql.SQL("null::bytea as result"), JSON
    its = column(chosen.result)
    binary = its["base"] == "bytea"
    cell = sql.SQL("{} as result" if binary else "convert_to({}::text, 'UTF8') as result").format(_name(chosen.result))
    return cell, chosen.content_type or (BYTES if binary else JSON)


def _name(name: str) -> sql.Identifier:
    return sql.Identifier(name)


def _given(text: str) -> sql.SQL:
    """SQL of the person who runs the command, or of the catalog. A percent sign is none of psycopg's."""
    return sql.SQL(text.replace("%", "%%"))
