"""What a person sees of sagas at the command line, and decides there, on a real database."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner

from idemconsumer import App, Reject, Saga, Step, Tx, Unknown
from idemconsumer.admin.saga_admin import SagaAdmin
from idemconsumer.cli.main import main
from idemconsumer.errors import ConfigurationError
from idemconsumer.message.keys import digest
from idemconsumer.process.child import Exit
from idemconsumer.sagas.step import step_key
from idemconsumer.settings import Settings
from idemconsumer.testing import Replay, read_histories, replay
from tests.support.servers.postgres import migrated
from tests.support.tuning import tuned
from tests.support.waiting import until

Act = Callable[[], None]


def nothing() -> None:
    return


async def nobody_knows(trip: dict[str, str]) -> Unknown:
    return Unknown()


class Travel:
    """One saga of three steps whose last one does as it is told, and a shell to type in."""

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        self.finish: Act = nothing
        self.remote: Act = nothing

    def app(self, *, version: str = "1", renamed: bool = False, asks: bool = False) -> App:
        app = App("travel")
        more: Any = {"reconcile": nobody_knows} if asks else {}

        async def reserve(tx: Tx, trip: str) -> int:
            await tx.execute("insert into done values (%s, 'reserve')", (trip,))
            return 7

        async def unreserve(tx: Tx, seats: int, trip: str) -> None:
            await tx.execute("insert into done values (%s, 'unreserve')", (trip,))

        async def charge(step: Step, trip: str) -> str:
            self.remote()
            return f"charge of {trip}"

        async def finish(tx: Tx, trip: str) -> None:
            self.finish()
            await tx.execute("insert into done values (%s, 'finish')", (trip,))

        @app.idempotent_handler(
            "postgres:trips",
            key="id",
            version=version,
            max_attempts=1,
            backoff="20ms, 20ms",
            **more,
        )
        async def book(trip: dict[str, str], saga: Saga) -> str:
            await saga.tx("booked" if renamed else "reserved", reserve, trip["id"], undo=unreserve)
            charged = await saga.call("charged", charge, trip["id"])
            await saga.tx("finished", finish, trip["id"])
            return charged

        return app

    def run(self, *trips: str, **changes: Any) -> None:
        """A worker, until there is nothing that it would run by itself."""

        async def work() -> None:
            async with await psycopg.AsyncConnection.connect(self.dsn, autocommit=True) as connection:
                for trip in trips:
                    payload = json.dumps({"id": trip})
                    await connection.execute("select idemconsumer.publish('trips', %s::jsonb)", (payload,))
                worker = self.app(**changes).worker(Settings(dsn=self.dsn, concurrency=2))
                running = asyncio.create_task(worker.run())
                await until(lambda: self._calm(connection))
                worker.drain()
                await running

        asyncio.run(work())

    async def _calm(self, connection: psycopg.AsyncConnection[Any]) -> bool:
        query = (
            "select (select count(*) from idemconsumer.queue)"
            " + (select count(*) from idemconsumer.saga where parked is null)"
        )
        return await (await connection.execute(query)).fetchone() == (0,)

    def __call__(self, *words: str, code: int = Exit.DONE, stdin: str = "") -> str:
        result = CliRunner().invoke(main, ["sagas", *words], input=stdin, env={"IDEMCONSUMER_DSN": self.dsn})
        assert result.exit_code == code, result.output
        return result.stdout if code == Exit.DONE else result.stderr

    def json(self, *words: str) -> Any:
        return json.loads(self(*words, "--json"))

    def sql(self, query: str, *params: object) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.dsn) as connection:
            cursor = connection.execute(query.encode(), params)
            return cursor.fetchall() if cursor.description else []

    def done(self, trip: str) -> list[str]:
        return [what for (what,) in self.sql("select what from done where trip = %s order by at", trip)]

    def record(self, trip: str) -> tuple[int, str | None]:
        query = (
            "select state, convert_from(body, 'utf8') from idemconsumer.record"
            " left join idemconsumer.result using (key) where record.key = %s"
        )
        ((state, body),) = self.sql(query, key_of(trip))
        return state, body


def key_of(trip: str) -> bytes:
    return digest("travel", None, "book", trip)


def raising(error: Exception) -> Act:
    def act() -> None:
        raise error

    return act


@pytest.fixture
def travel(database: str) -> Travel:
    migrated(database, "idemconsumer")
    travel = Travel(database)
    travel.sql("create table done (trip text, what text, at timestamptz default clock_timestamp())")
    return travel


@pytest.fixture
def parked(travel: Travel) -> Travel:
    """Trip `a` has waited for a person since its charge ended in an error that nobody understands."""
    travel.remote = raising(ValueError("gateway on fire"))
    travel.run("a")
    travel.remote = nothing
    return travel


def by_prefix(trip: str) -> str:
    return key_of(trip).hex()[:7]


# -------------------------------------------------------------------------------------------------------------- looking
def test_the_list_shows_what_waits_for_whom_and_why(parked: Travel) -> None:
    text = parked("list")
    assert text.splitlines()[0].split() == ["KEY", "BEGUN", "HANDLER", "STATE", "AT", "OWNER", "ATTEMPT", "ERROR"]
    assert key_of("a").hex()[:12] in text
    assert "dead (unknown_effect)" in text
    assert "gateway on fire" in text
    (line,) = parked.json("list")
    assert (line["handler"], line["state"], line["recovery_point"]) == ("book", "dead", "reserved")


def test_the_list_can_be_narrowed(parked: Travel) -> None:
    assert parked.json("list", "--state", "dead", "--handler", "book") != []
    assert parked.json("list", "--state", "processing") == []
    assert parked.json("list", "--handler", "other") == []
    assert parked("list", "--stale") == "no sagas\n"
    parked.sql("update idemconsumer.saga set parked = null, worker = 4711")
    (line,) = parked.json("list", "--stale", "--state", "processing")
    assert line["stale"]
    assert "a lost worker" in parked("list")


def test_one_saga_is_shown_with_its_steps_in_time(parked: Travel) -> None:
    text = parked("show", by_prefix("a"))
    assert "dead (unknown_effect)" in text
    assert "postgres:trips trips#1" in text
    assert "whether charged was done" in text
    assert "what to do  Look up the step's key (`sagas show`)" in text
    reserved, charged = text.splitlines()[-2:]
    assert reserved.split()[:5] == ["reserved", "tx", "done,", "has", "undo"]
    assert charged.split()[:3] == ["charged", "call", "intent"]

    detail = parked.json("show", "--handler", "book", "--key", "a")
    assert detail["key"] == key_of("a").hex()
    assert detail["running"]["parked"] == "unknown_effect"
    assert detail["open_intents"] == ["charged"]
    assert [(step["name"], step["attempts"], step["output"]) for step in detail["steps"]] == [
        ("reserved", 1, "7"),
        ("charged", 1, None),
    ]


def test_what_happened_to_a_saga_is_shown_in_time(parked: Travel) -> None:
    parked("resume", by_prefix("a"))
    timeline = parked.json("show", by_prefix("a"))["timeline"]
    whats = [event["what"] for event in timeline]
    assert whats[:2] == ["begun", "step reserved done"]
    assert "step charged called, outcome unknown" in whats
    assert [what for what in whats if not what.startswith("step")][-3:] == ["begun", "parked", "resumed"]
    (put_aside,) = [event for event in timeline if event["what"] == "parked"]
    assert put_aside["detail"].startswith("unknown_effect: step 'charged': ValueError: gateway on fire")
    assert (put_aside["token"], put_aside["attempt"]) == (timeline[0]["token"], 1)

    text = parked("show", by_prefix("a"))
    assert "AT" in text
    assert "gateway on fire" in text
    order = [text.index(what) for what in ("begun  ", "parked", "resumed")]
    assert order == sorted(order)


def test_a_finished_saga_is_still_shown(travel: Travel) -> None:
    travel.run("a")
    text = travel("show", by_prefix("a"))
    assert "state       completed since" in text
    assert 'result      "charge of a"' in text
    assert travel("list") == "no sagas\n"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["show", "00"], "there is no record for '00'; `idemconsumer sagas list` shows running sagas"),
        (["show", "xyz"], "'xyz' is not the beginning of a stored key; write hexadecimal digits"),
        (["show", "--handler", "book", "--key", "b"], "there is no record for handler 'book' and this key"),
        (["show"], "give KEY (the first digits, as `sagas list` shows them) or --handler NAME --key TEXT"),
        (["show", "--handler", "book"], "give KEY"),
        (["show", "00", "--handler", "book", "--key", "a"], "give KEY"),
    ],
)
def test_a_saga_that_cannot_be_found_is_one_clear_line(travel: Travel, words: list[str], says: str) -> None:
    assert says in travel(*words, code=Exit.USAGE)


def test_a_beginning_that_fits_two_keys_names_them(travel: Travel) -> None:
    for number in range(2):
        travel.sql("insert into idemconsumer.record values (%s, 1, 1, null, now())", b"\xab" * 31 + bytes([number]))
    assert "'ab' matches several records: abab" in travel("show", "ab", code=Exit.USAGE)


# ------------------------------------------------------------------------------------------------------------ exporting
def test_what_is_exported_can_be_replayed_with_the_handler_as_it_is_now(parked: Travel, tmp_path: Path) -> None:
    file = tmp_path / "histories.jsonl"
    file.write_text(parked("export"))
    (history,) = read_histories(file)
    assert (history.key, history.handler, history.version) == (key_of("a").hex(), "book", "1")
    assert (history.state, history.parked) == ("processing", "unknown_effect")
    assert history.message.body == '{"id": "a"}'
    assert [(step.name, step.kind, step.state, step.has_undo, step.output) for step in history.steps] == [
        ("reserved", "tx", "done", True, "7"),
        ("charged", "call", "intent", False, None),
    ]
    assert asyncio.run(replay(parked.app(), history)) == Replay(True, "step 'charged'")
    changed = asyncio.run(replay(parked.app(renamed=True), history))
    assert (changed.then, str(changed.why)[:28]) == ("saga_changed", "step 'reserved' is recorded,")
    parked("resume", by_prefix("a"))
    parked.run(renamed=True)
    ((error,),) = parked.sql("select error from idemconsumer.saga")
    assert error == changed.why


def test_what_is_exported_can_be_narrowed_and_is_said_to_be_personal(parked: Travel) -> None:
    parked.remote = raising(ValueError("again"))
    parked.run("b")
    newest, oldest = (json.loads(line) for line in parked("export").splitlines())
    assert (newest["key"], oldest["key"]) == (key_of("b").hex(), key_of("a").hex())
    assert json.loads(parked("export", "--limit", "1")) == newest
    parked.sql("update idemconsumer.saga set started_at = now() - interval '2h' where key = %s", key_of("a"))
    assert json.loads(parked("export", "--since", "1h", "--state", "dead", "--handler", "book")) == newest
    for narrower in (["--state", "undoing"], ["--state", "processing"], ["--handler", "other"], ["--since", "0s"]):
        assert parked("export", *narrower) == ""
    result = CliRunner().invoke(main, ["sagas", "export"], env={"IDEMCONSUMER_DSN": parked.dsn})
    assert "holds payloads and outputs" in result.stderr
    assert "'x' is not a duration" in parked("export", "--since", "x", code=Exit.USAGE)


# ------------------------------------------------------------------------------------------------------------- deciding
def test_a_resumed_saga_goes_on_at_its_recovery_point(parked: Travel) -> None:
    assert parked("resume", by_prefix("a")) == f"resumed: {key_of('a').hex()[:12]} is processing\n"
    assert parked.sql("select count(*) from idemconsumer.dead_letter") == [(0,)]
    parked.run()
    assert parked.done("a") == ["reserve", "finish"]
    assert parked.record("a") == (3, '"charge of a"')


def test_a_resumed_saga_has_all_its_attempts_again(parked: Travel) -> None:
    parked.sql("update idemconsumer.saga set attempt = 17")
    parked("resume", by_prefix("a"))
    parked.run()
    assert parked.record("a")[0] == 3


def test_a_changed_saga_goes_on_only_once_a_person_accepts_it(parked: Travel) -> None:
    parked("resume", by_prefix("a"))
    for table, column in (("saga", "due"), ("worker", "until")):  # L28: its version has been gone for a while
        parked.sql(f"update idemconsumer.{table} set {column} = {column} - interval '1 hour'")
    parked.run(version="2", renamed=True)
    assert parked.json("show", by_prefix("a"))["running"]["parked"] == "saga_changed"
    parked("resume", by_prefix("a"))
    parked.run(version="1", renamed=True)  # the version fits; a recorded step is no longer asked for
    assert parked.json("show", by_prefix("a"))["running"]["parked"] == "saga_changed"
    assert parked.done("a") == ["reserve"]

    parked("resume", by_prefix("a"), "--accept-version")
    parked.run(version="2", renamed=True)
    assert parked.done("a") == ["reserve", "reserve", "finish"]
    assert parked.record("a") == (3, '"charge of a"')


@pytest.mark.parametrize("asked", [True, False])
def test_an_abandoned_saga_is_undone_if_a_person_says_so(parked: Travel, asked: bool) -> None:
    words, stdin = (["abandon", by_prefix("a")], "y\n") if asked else (["abandon", by_prefix("a"), "--undo"], "")
    said = parked(*words, stdin=stdin)
    assert said.endswith(f"abandoned, to be undone by a worker: {key_of('a').hex()[:12]} is undoing\n")
    parked.run(version="2")  # what is undone is known by its steps, whatever version the handler has now
    assert parked.done("a") == ["reserve", "unreserve"]
    assert parked.record("a") == (4, '{"code":"abandoned","body":null}')


def test_an_abandoned_saga_keeps_its_effects_if_a_person_says_so(parked: Travel) -> None:
    assert parked.json("abandon", by_prefix("a"), "--no-undo") == {"key": key_of("a").hex(), "state": "failed"}
    assert parked.done("a") == ["reserve"]
    assert parked.record("a") == (4, '{"code":"abandoned","body":null}')
    assert parked.sql("select count(*) from idemconsumer.saga") == [(0,)]
    assert parked.sql("select count(*) from idemconsumer.dead_letter") == [(0,)]
    assert "has ended; there is nothing to decide" in parked("resume", by_prefix("a"), code=Exit.USAGE)


def test_whoever_abandons_is_told_what_nobody_can_undo(parked: Travel) -> None:
    result = CliRunner().invoke(
        main, ["sagas", "abandon", by_prefix("a")], input="n\n", env={"IDEMCONSUMER_DSN": parked.dsn}
    )
    assert "it is not known whether 'charged' was done, and nothing will undo it" in result.stderr
    assert "undo its finished steps (reserved)?" in result.stderr


def test_a_rejection_that_is_being_undone_outlives_being_abandoned(travel: Travel) -> None:
    travel.finish = raising(Reject("full"))
    travel.run("a")
    travel.sql(
        "insert into idemconsumer.saga (key, scope_id, handler, state, token, due, attempt, version, source, position,"
        " body, headers, started_at, parked, rejection) select key, scope_id, 'book', 2, 1, now(), 1, '1', 's', 'p',"
        """ '{"id":"a"}', '{}', now(), 'undo_failed', '{"code":"full","body":null}' from idemconsumer.record"""
    )
    travel.sql("delete from idemconsumer.result")
    travel("abandon", by_prefix("a"), "--no-undo")
    assert travel.record("a") == (4, '{"code":"full","body":null}')


def test_a_saga_that_a_worker_runs_is_not_decided_upon(parked: Travel) -> None:
    parked.sql(
        "insert into idemconsumer.worker (name, lease, until, runs)"
        " values ('elsewhere:7', '30s', now() + interval '20s', '[]')"
    )
    parked.sql("update idemconsumer.saga set parked = null, worker = (select max(id) from idemconsumer.worker)")
    for words in (["resume"], ["abandon", "--no-undo"]):
        said = parked(words[0], by_prefix("a"), *words[1:], code=Exit.USAGE)
        assert "is being run by elsewhere:7; wait for it to end, or stop the worker" in said

    before = parked.sql("select token from idemconsumer.saga")
    parked.sql("update idemconsumer.worker set until = now() - interval '1s'")  # frozen, it may wake up yet
    parked("resume", by_prefix("a"))
    assert parked.sql("select token from idemconsumer.saga") > before


def test_a_decision_waits_for_a_locked_saga_up_to_the_lock_timeout_and_then_changes_nothing(
    parked: Travel, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned(monkeypatch, claim_lock_patience=0.1)
    with psycopg.connect(parked.dsn) as step:
        step.execute("select from idemconsumer.saga for share")
        for words in (["resume"], ["abandon", "--undo"], ["abandon", "--no-undo"]):
            assert "55P03" in parked(words[0], by_prefix("a"), *words[1:], code=Exit.ERROR)
    assert parked.json("show", by_prefix("a"))["running"]["parked"] == "unknown_effect"


def test_a_saga_put_aside_for_review_goes_on_when_resumed(parked: Travel) -> None:
    parked("resume", by_prefix("a"))
    parked.sql("update idemconsumer.saga set worker = 4711")  # a worker that is gone
    parked.run(asks=True)
    assert parked.json("list")[0]["parked"] == "unknown_effect"
    parked("resume", by_prefix("a"))
    parked.run(asks=True)
    assert parked.record("a")[0] == 3


def test_without_tables_the_error_says_how_to_make_them(database: str) -> None:
    environment: Mapping[str, str] = {"IDEMCONSUMER_DSN": database}
    result = CliRunner().invoke(main, ["sagas", "list"], env=environment)
    assert result.exit_code == Exit.USAGE
    assert "run `idemconsumer migrate up` first" in result.stderr
    with pytest.raises(ConfigurationError, match="run `idemconsumer migrate up` first"):
        asyncio.run(SagaAdmin(database, "idemconsumer").resume(key_of("a"), by="ann"))


@pytest.mark.parametrize("undo", [True, False])
def test_a_saga_is_cancelled_by_whichever_worker_comes_next(parked: Travel, undo: bool) -> None:
    """It was put aside with a call of unknown outcome, which is made again, with its key, first."""
    said = parked("cancel", by_prefix("a"), *(["--undo"] if undo else []))
    how = "its finished steps are undone first" if undo else "its effects stand"
    assert said == f"cancelled: {key_of('a').hex()[:12]}, which was dead; {how}\n"
    assert f"cancel      requested, {'to be undone' if undo else 'its effects stand'}" in parked("show", by_prefix("a"))
    parked.run()
    assert parked.done("a") == (["reserve", "unreserve"] if undo else ["reserve"])
    assert parked.record("a") == (4, '{"code":"cancelled","body":null}')
    answer = parked.json("cancel", by_prefix("a"))
    assert answer == {"key": key_of("a").hex(), "accepted": True, "state": "failed", "undo": False}


def test_whoever_cancels_too_late_is_told(travel: Travel) -> None:
    travel.run("a")
    assert f"{by_prefix('a')}" in (said := travel("cancel", by_prefix("a"), code=Exit.ERROR))
    assert said.endswith("is not cancelled: it is completed already\n")


def test_a_person_says_how_a_call_ended(parked: Travel) -> None:
    (key,) = [step["key"] for step in parked.json("show", by_prefix("a"))["steps"] if step["name"] == "charged"]
    assert key == str(step_key("travel/-/book", key_of("a"), "charged"))
    assert key in parked("show", by_prefix("a"))
    for words in ([], ["--not-done", "--done", "1"]):
        said = parked("decide", by_prefix("a"), "charged", *words, code=Exit.USAGE)
        assert "give either --done JSON or --not-done" in said
    for unread in ("{", "[" * 3_000):
        assert "--done is not JSON" in parked("decide", by_prefix("a"), "charged", "--done", unread, code=Exit.USAGE)
    said = parked("decide", by_prefix("a"), "charged", "--done", '"ch_17"')
    assert said == f"decided: {key_of('a').hex()[:12]} is processing\n"
    parked.run()
    assert parked.record("a") == (3, '"ch_17"')
