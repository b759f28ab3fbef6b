"""What is shown of addresses and of errors: no password, no row."""

from __future__ import annotations

from typing import Any, LiteralString

import psycopg
import pytest

from idemconsumer.redaction import error_text, redact, traceback_text, typed_text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("amqp://guest:s3cret@host:5672/vhost", "amqp://guest:***@host:5672/vhost"),
        ("amqp://guest:s3/c#r?e@t@host/", "amqp://guest:***@host/"),
        ("cannot reach postgresql://u:s3cret@h/db, nor amqp://u:s3cret@h",
         "cannot reach postgresql://u:***@h/db, nor amqp://u:***@h"),
        ("https://s3cret@host/x", "https://***@host/x"),
        ("https://host/q?X-Amz-Security-Token=s3cret&n=1", "https://host/q?X-Amz-Security-Token=***&n=1"),
        ("postgresql:///db?user=u&password=s3cret", "postgresql:///db?user=u&password=***"),
        ("host=h password='s3 cr\\'et' dbname=x", "host=h password=*** dbname=x"),
        ("host=h password = s3cret", "host=h password = ***"),
        ("postgresql://user@host/db", "postgresql://user@host/db"),
        ("write amqp://user:password@host/vhost", "write amqp://user:password@host/vhost"),
        ("http://host:9324/000/orders, mail me@host", "http://host:9324/000/orders, mail me@host"),
    ],
)  # fmt: skip
def test_secrets_of_addresses_are_hidden(text: str, shown: str) -> None:
    assert redact(text) == shown


def raised_by(dsn: str, *statements: LiteralString, parameters: tuple[Any, ...] = ()) -> psycopg.Error:
    with psycopg.connect(dsn) as connection:
        for statement in statements[:-1]:
            connection.execute(statement)
        with pytest.raises(psycopg.Error) as caught:
            connection.execute(statements[-1], parameters)
        connection.rollback()
    return caught.value


@pytest.fixture
def violation(database: str) -> psycopg.Error:
    """An error whose text quotes a row."""
    error = raised_by(
        database,
        "create table person (email text constraint one_each unique)",
        "insert into person values ('a@b.c')",
        "insert into person values (%s)",
        parameters=("a@b.c",),
    )
    assert "a@b.c" in str(error)
    return error


SHOWN = 'duplicate key value violates unique constraint "one_each" (23505, table person, constraint one_each)'


def test_a_database_error_keeps_its_names_and_loses_its_values(violation: psycopg.Error) -> None:
    assert error_text(violation) == SHOWN
    assert typed_text(violation) == f"psycopg.errors.UniqueViolation: {SHOWN}"


def test_neither_the_statement_nor_the_context_is_quoted(database: str) -> None:
    assert error_text(raised_by(database, "select secret from nowhere")) == 'relation "nowhere" does not exist (42P01)'
    quoting = raised_by(database, "do $$ begin execute 'select ''a@b.c''::text, 1/0'; end $$")
    assert "a@b.c" in str(quoting)
    assert error_text(quoting) == "division by zero (22012)"


def test_an_error_that_quotes_one_of_the_database_is_cut_off_there(violation: psycopg.Error) -> None:
    class IntegrityError(Exception):
        """As SQLAlchemy's."""

    error = IntegrityError(f"(UniqueViolation) {violation}\n[SQL: insert …]\n[parameters: ('a@b.c',)]")
    error.__cause__ = violation
    assert error_text(error) == f"(UniqueViolation) {SHOWN}"
    own = ValueError("this person is known")
    own.__cause__ = violation
    assert error_text(own) == "this person is known"


def test_a_traceback_shows_where_and_no_values(violation: psycopg.Error) -> None:
    def save() -> None:
        raise violation

    try:
        try:
            save()
        except psycopg.Error as error:
            raise ExceptionGroup("both", [error, KeyError("amqp://u:s3cret@h")]) from error
    except ExceptionGroup as error:
        text = traceback_text(error)
    assert "in save" in text
    assert "direct cause" in text
    assert SHOWN in text
    assert "KeyError" in text
    assert "a@b.c" not in text
    assert "s3cret" not in text


def test_an_error_that_cannot_be_printed_is_still_described() -> None:
    class Broken(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert "Broken: its text cannot be shown" in typed_text(Broken())
