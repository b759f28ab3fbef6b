"""Settings: what wins, and what a person is told who has written something that cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given as given_by
from hypothesis import strategies as st

from idemconsumer.addresses import _PLAIN_DSN, check_dsn, listening_at
from idemconsumer.errors import ConfigurationError
from idemconsumer.settings import PREFIX, Settings, load


def given(folder: Path, **variables: str) -> Settings:
    return load({PREFIX + name: value for name, value in variables.items()}, folder)


def refusal(folder: Path, **variables: str) -> str:
    with pytest.raises(ConfigurationError) as caught:
        given(folder, **variables)
    return str(caught.value)


def test_a_port_may_have_a_host_and_what_kubernetes_names_after_a_service_is_none(tmp_path: Path) -> None:
    assert listening_at(9100) == listening_at("9100") == ("0.0.0.0", 9100)
    assert listening_at("127.0.0.1:80") == ("127.0.0.1", 80)
    assert listening_at("[::]:80") == ("::", 80)
    for wrong in ("http", "0", "70000", "a b:80", "127.0.0.1", "-1"):
        assert "write one such as 9100, or HOST:PORT" in refusal(tmp_path, OPS_PORT=wrong)
    assert given(tmp_path, OPS_PORT="9100").ops_port in (9100, "9100")
    assert given(tmp_path, OPS_PORT="tcp://10.0.0.7:9100").ops_port is None, "a service named idemconsumer-ops"


def test_a_flag_wins_over_a_variable_and_a_variable_over_the_project(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool.idemconsumer]\nworkers = 2\nconcurrency = 2\nlog-format = 'json'\n")
    environ = {"IDEMCONSUMER_WORKERS": "3", "IDEMCONSUMER_CONCURRENCY": "3", "IDEMCONSUMER_SCHEMA": ""}

    settings = load(environ, tmp_path, workers=4, handlers=None)

    assert (settings.workers, settings.concurrency, settings.log_format) == (4, 3, "json")
    assert settings.schema == "idemconsumer", "an empty variable is not given"


@pytest.mark.parametrize("dsn", ["blah-s3cret", "postgresql://u:s3cret/x@h/db", "postgresql://u:p@s3cret@h/db"])
def test_a_dsn_that_cannot_be_read_is_never_quoted(tmp_path: Path, dsn: str) -> None:
    said = refusal(tmp_path, DSN=dsn)

    assert said.startswith("IDEMCONSUMER_DSN ")
    assert "write postgresql://user:password@host:5432/database" in said
    assert "s3cret" not in said
    assert "\n" not in said


@pytest.mark.parametrize(
    "dsn", ["postgresql://", "dbname=x options='-c a=b'", "postgresql://u@a:1,b:2/x", "postgresql://u:p%40@[::1]:5/x"]
)
def test_every_form_of_a_dsn_is_taken(tmp_path: Path, dsn: str) -> None:
    assert given(tmp_path, DSN=dsn).dsn == dsn


WORDS = st.text("az09_.~-", min_size=1, max_size=9) | st.just("p%40ss%2Fword")
HOSTS = st.lists(st.text("az09_-", min_size=1, max_size=63), min_size=1, max_size=4).map(".".join)
MODES = st.sampled_from(["disable", "allow", "prefer", "require", "verify-ca", "verify-full"])


@given_by(WORDS, WORDS, HOSTS, st.none() | st.integers(1, 59_999), WORDS, st.none() | MODES)
def test_what_is_taken_without_libpq_is_what_libpq_takes(
    user: str, password: str, host: str, port: int | None, name: str, mode: str | None
) -> None:
    dsn = f"postgresql://{user}:{password}@{host}{'' if port is None else f':{port}'}/{name}"
    dsn += "" if mode is None else f"?sslmode={mode}&sslrootcert=/etc/{name}.pem"
    with pytest.MonkeyPatch.context() as patch:
        assert _PLAIN_DSN.fullmatch(dsn)
        patch.setenv("PGAPPNAME", "x")  # libpq reads such variables too, so it is asked
        check_dsn(dsn)


@pytest.mark.parametrize(
    "dsn",
    [
        "postgresql://h:0/d", "postgresql://h:65536/d", "postgresql://h:1:2/d", "postgresql://h..x/d",
        f"postgresql://{'h' * 64}/d", "postgresql://u@v@h/d", "postgresql://h/d@e", "postgresql://h/%00",
        "postgresql://h/%zz", "postgresql://h/d?sslmode=on", "postgresql://h/d?sslmode=require&sslrootcert=system",
        "postgresql://h/d?no=1", "postgresql://h/d\n",
    ],
)  # fmt: skip
def test_what_libpq_refuses_is_never_taken_without_it(dsn: str) -> None:
    assert not _PLAIN_DSN.fullmatch(dsn)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("WORKERS", "0", "IDEMCONSUMER_WORKERS: 0 is not allowed; write a whole number of at least 1"),
        ("WORKERS", "two", "IDEMCONSUMER_WORKERS: 'two' is not allowed; write a whole number of at least 1"),
        ("REDIS_REPLICAS", "-1", "write a whole number of at least 0"),
        ("DRAIN_TIMEOUT", "0", "IDEMCONSUMER_DRAIN_TIMEOUT: 0.0 is not allowed; write a number of seconds above 0"),
        ("DRAIN_TIMEOUT", "nan", "write a number of seconds above 0"),
        ("PRUNE_EVERY", "-5", "write a number of seconds above 0"),
        ("KAFKA_SESSION_TIMEOUT", "0", "write a number of seconds above 0"),
        ("KAFKA_SESSION_TIMEOUT", "1e9", "write a number of seconds above 0, at most 1000000"),
        ("DRAIN_TIMEOUT", "1e9", "write a number of seconds above 0, at most 1000000"),
        (
            "LOG_LEVEL",
            "loud",
            "IDEMCONSUMER_LOG_LEVEL: 'loud' is not allowed; write one of debug, info, warning, error",
        ),
        ("LOG_FORMAT", "xml", "write one of auto, json, console"),
        ("UNTIL_EMPTY", "perhaps", "write yes or no"),
        ("LOGLEVEL", "info", "there is no setting IDEMCONSUMER_LOGLEVEL; did you mean IDEMCONSUMER_LOG_LEVEL?"),
        ("HANDLER", "a", "did you mean IDEMCONSUMER_HANDLERS?"),
    ],
)
def test_a_value_or_name_that_cannot_be_is_told_with_what_to_write(
    tmp_path: Path, name: str, value: str, says: str
) -> None:
    assert says in refusal(tmp_path, **{name: value})


def test_a_mistake_in_the_project_file_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool.idemconsumer]\nconcurency = 2\n")
    assert "did you mean `concurrency`?" in refusal(tmp_path)
    (tmp_path / "pyproject.toml").write_text("[tool.idemconsumer]\nkafka_sasl_password = 12345678\n")
    said = refusal(tmp_path)
    assert "`kafka_sasl_password` of [tool.idemconsumer]" in said
    assert "12345678" not in said


def test_words_for_yes_and_no_and_levels_in_capitals_are_taken(tmp_path: Path) -> None:
    for text in ("yes", "On", "1", "TRUE"):
        assert given(tmp_path, TRACING=text).tracing
    for text in ("no", "off", "0", "False"):
        assert not given(tmp_path, UNTIL_EMPTY=text).until_empty
    assert given(tmp_path, LOG_LEVEL="DEBUG").log_level == "debug"


def test_variables_of_others_with_our_prefix_are_left_alone(tmp_path: Path) -> None:
    services = {"SERVICE_HOST": "10.0.0.1", "KAFKA_SERVICE_PORT": "9", "KAFKA_PORT_9092_TCP_ADDR": "x", "PORT": "tcp:"}
    assert given(tmp_path, WORKER="1", LIFELINE="7", TEST_CACHE="/x", DEMO_PAUSE="1", **services) == Settings()
