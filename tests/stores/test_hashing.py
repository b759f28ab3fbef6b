"""R38 and R39: keys and payloads hashed under a secret by all that use a schema, and how it is rotated."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Iterator
from hashlib import sha256

import psycopg
import pytest

from idemconsumer import App, ConfigurationError, HandlerError, Saga, Tx
from idemconsumer.admin.decisions import Deciding
from idemconsumer.admin.doctor import examine_secrets
from idemconsumer.admin.stored_keys import Keys
from idemconsumer.errors import NothingFound
from idemconsumer.hashing import HASHING, Hashing
from idemconsumer.message import keys
from idemconsumer.message.message import Message
from idemconsumer.settings import Settings, load
from idemconsumer.stores.joined import PostgresStore
from idemconsumer.wrapping import new_key, unwrap, wrap
from tests.stores.store_contract import A, complete
from tests.support.hashing import OTHER, SECRET, begin, go_on, left, restored
from tests.support.ledger import SCHEMA, Ledger
from tests.support.waiting import until

OLD, NEW, NEWER = SECRET, "n" * 32, "e" * 40
TEXT = b"\0\0\0\4shop\0\0\0\1t\0\0\0\3pay\0\0\0\1k"
WAITS = "select 1 from pg_stat_activity where wait_event_type = 'Lock' and query ~ 'hashing'"


@pytest.fixture(autouse=True)
def new() -> Iterator[None]:
    with restored():
        yield


async def opens(ledger: Ledger) -> bytes:
    """What it makes of a key."""
    await (await PostgresStore.open(ledger.dsn, SCHEMA, connections=2, longest_run=30.0)).close()
    return keys.digest("shop", "t", "pay", "k")


def wrapped(ledger: Ledger) -> bytes:
    ((found,),) = ledger.run("select wrapped from idemconsumer.hashing")
    return bytes(found)


def wrapped_by(ledger: Ledger) -> list[str]:
    return [each for each in (OLD, NEW, NEWER) if unwrap(each.encode(), wrapped(ledger)) is not None]


# ------------------------------------------------------------------------------------------------- one way for all
def test_without_a_secret_nothing_changes() -> None:
    assert keys.fingerprint(b"body") == sha256(b"body").digest()
    assert keys.digest("shop", "t", "pay", "k") == sha256(TEXT).digest()


def test_with_one_nobody_else_can_hash_a_guess_and_keys_and_payloads_are_apart() -> None:
    load({"IDEMCONSUMER_KEY_SECRETS": SECRET})
    HASHING.settle(b"d" * 32)
    assert keys.digest("shop", "t", "pay", "k") == hmac.digest(b"d" * 32, b"key\0" + TEXT, sha256)
    assert keys.fingerprint(TEXT) == hmac.digest(b"d" * 32, b"payload\0" + TEXT, sha256)
    canonical = keys.canonical(b'{"a": 1}')
    assert canonical == keys.canonical(b'{ "a":1}') == keys.fingerprint(b'{"a":1}')[:16]


def test_one_process_has_one_list_of_secrets_from_its_beginning() -> None:
    hashing = Hashing()
    with pytest.raises(
        ConfigurationError, match="number 1 of `key_secrets` has 31 characters; write at least 32"
    ) as no:
        hashing.obey(SECRET[1:])
    assert SECRET[1:] not in str(no.value)
    with pytest.raises(ConfigurationError, match="number 2 of `key_secrets` has 0 characters"):
        hashing.obey(f"{SECRET},")
    hashing.obey(f" {SECRET}, {OTHER}\n")
    assert hashing.secrets == (SECRET.encode(), OTHER.encode())
    hashing.obey(f"{SECRET},{OTHER}")
    hashing.obey(None)
    with pytest.raises(ConfigurationError, match="has other `key_secrets` already"):
        hashing.obey(OTHER)
    late = Hashing()
    late.digest(b"key", b"")
    with pytest.raises(ConfigurationError, match="were set too late"):
        late.obey(SECRET)


def test_nothing_is_hashed_before_it_is_known_with_what() -> None:
    begin(SECRET)
    with pytest.raises(ConfigurationError, match="cannot be hashed yet"):
        keys.fingerprint(b"body")
    HASHING.settle(b"d" * 32)
    HASHING.settle(b"d" * 32)
    with pytest.raises(ConfigurationError, match="with `key_secrets`, use one schema per process"):
        HASHING.settle(b"e" * 32)


@pytest.mark.parametrize(
    ("first", "then", "says"),
    [
        (None, SECRET, "are hashed without a secret; remove `key_secrets`, or use another schema"),
        (SECRET, None, "are hashed with a secret; set IDEMCONSUMER_KEY_SECRETS to it"),
        (SECRET, OTHER, "under a secret that is not among `key_secrets`; write the last secret that was in use after"),
    ],
)
async def test_whoever_opens_a_schema_first_says_how_its_keys_are_hashed(
    ledger: Ledger, first: str | None, then: str | None, says: str
) -> None:
    begin(first)
    digest = await opens(ledger)
    assert await opens(ledger) == digest
    begin(then)
    for opening in (opens(ledger), Deciding(ledger.dsn, SCHEMA)._pool(), Keys(ledger.dsn, SCHEMA).find(handler="pay")):
        with pytest.raises(ConfigurationError, match=says):
            await opening
    begin(first)
    assert await opens(ledger) == digest


async def test_of_two_that_open_it_at_once_one_is_refused(ledger: Ledger) -> None:
    """Each has found nothing; the second one to say it waits, and then reads what the first has said."""
    begin(SECRET)
    async with await psycopg.AsyncConnection.connect(ledger.dsn) as rival:
        await rival.execute("insert into idemconsumer.hashing (wrapped) values ('')")
        opening = asyncio.create_task(opens(ledger))
        await until(lambda: ledger.run(WAITS) or opening.done())
        await rival.commit()
    with pytest.raises(ConfigurationError, match="are hashed without a secret"):
        await opening


async def test_of_two_with_the_same_secret_both_hash_with_the_data_key_of_the_first(ledger: Ledger) -> None:
    begin(SECRET)
    data_key = new_key()
    async with await psycopg.AsyncConnection.connect(ledger.dsn) as rival:
        its = wrap(SECRET.encode(), data_key)
        await rival.execute("insert into idemconsumer.hashing (wrapped) values (%s)", [its])
        opening = asyncio.create_task(opens(ledger))
        await until(lambda: ledger.run(WAITS) or opening.done())
        await rival.commit()
    assert await opening == hmac.digest(data_key, b"key\0" + TEXT, sha256)


async def test_records_from_before_are_without_a_secret(ledger: Ledger) -> None:
    store = await PostgresStore.open(ledger.dsn, SCHEMA, connections=2, longest_run=30.0)
    await complete(store, [A])
    await store.close()
    ledger.run("delete from idemconsumer.hashing")  # those who wrote them knew of none
    begin(SECRET)
    with pytest.raises(ConfigurationError, match="are hashed without a secret"):
        await opens(ledger)
    begin(None)
    await opens(ledger)


async def test_an_app_hashes_with_the_secrets_of_its_settings(ledger: Ledger) -> None:
    app = App("shop")

    @app.idempotent_handler("memory:orders", key="id")
    async def take(order: dict[str, str], tx: Tx) -> None: ...

    app.worker(Settings(dsn=ledger.dsn, key_secrets=SECRET))
    assert (await app.accept(take, {"id": "b"}, key="b")).new
    for _ in range(2):
        await app.process(Message("memory:orders", b'{"id": "a"}'))
    await app.close()
    data_key = unwrap(SECRET.encode(), wrapped(ledger))
    assert data_key is not None
    assert data_key not in wrapped(ledger)
    assert HASHING.data_key == data_key
    assert dict(ledger.run("select key, fingerprint from idemconsumer.record")) == {
        keys.digest("shop", None, "take", key): keys.fingerprint(b'{"id":%s}' % quoted)
        for key, quoted in (("a", b' "a"'), ("b", b'"b"'))
    }


def test_a_saga_is_refused_since_sql_does_not_know_the_data_key(ledger: Ledger) -> None:
    app = App("shop")

    @app.idempotent_handler("memory:rides", key="id")
    async def ride(ride: dict[str, str], saga: Saga) -> None: ...

    with pytest.raises(HandlerError, match="it is a saga, and `key_secrets` is set"):
        app.worker(Settings(dsn=ledger.dsn, key_secrets=SECRET))


# -------------------------------------------------------------------------------------------------------- rotation
def test_only_the_secret_that_has_wrapped_the_data_key_unwraps_it() -> None:
    key, secret = new_key(), SECRET.encode()
    one, two = wrap(secret, key), wrap(secret, key)
    assert unwrap(secret, one) == unwrap(secret, two) == key
    assert one != two
    assert key not in one
    assert unwrap(OTHER.encode(), one) is None
    for place in range(len(one)):
        changed = bytearray(one)
        changed[place] ^= 1
        assert unwrap(secret, bytes(changed)) is None
    for length in (0, 8, len(one) - 1):
        assert unwrap(secret, one[:length]) is None
    assert unwrap(secret, one + b"\0") is None


def test_what_is_stored_is_as_later_versions_will_read_it() -> None:
    secret, nonce, key = SECRET.encode(), b"n" * 16, b"k" * 32
    pad = hmac.digest(hmac.digest(secret, b"idemconsumer data key: pad", sha256), nonce, sha256)
    sealed = nonce + bytes(one ^ other for one, other in zip(key, pad, strict=True))
    tag = hmac.digest(hmac.digest(secret, b"idemconsumer data key: tag", sha256), sealed, sha256)
    assert unwrap(secret, sealed + tag) == key


async def test_a_secret_is_rotated_while_processes_of_all_lists_hash_alike(ledger: Ledger) -> None:
    digests, running = set(), []
    for listed, by in (
        (OLD, OLD),
        (f"{OLD},{NEW}", OLD),
        (f"{NEW},{OLD}", NEW),
        (f"{OLD},{NEW}", OLD),
        (f"{NEW},{OLD}", NEW),
        (NEW, NEW),
    ):
        begin(listed)
        digests.add(await opens(ledger))
        assert wrapped_by(ledger) == [by]
        running.append(left())
    for process in running:  # those that have begun before go on
        go_on(process)
        digests.add(keys.digest("shop", "t", "pay", "k"))
    assert len(digests) == 1
    begin(OLD)
    with pytest.raises(ConfigurationError, match="after the new one, IDEMCONSUMER_KEY_SECRETS=new,old"):
        await opens(ledger)
    assert wrapped_by(ledger) == [NEW]


async def test_of_two_that_rotate_at_once_one_does(ledger: Ledger) -> None:
    begin(OLD)
    digest = await opens(ledger)
    data_key = HASHING.data_key
    assert data_key is not None
    begin(f"{NEW},{OLD}")
    async with await psycopg.AsyncConnection.connect(ledger.dsn) as rival:
        await rival.execute("update idemconsumer.hashing set wrapped = %s", [wrap(NEWER.encode(), data_key)])
        opening = asyncio.create_task(opens(ledger))
        await until(lambda: ledger.run(WAITS) or opening.done())
        await rival.commit()
    assert await opening == digest
    assert wrapped_by(ledger) == [NEWER]


async def test_what_was_changed_in_the_database_is_refused_and_left(ledger: Ledger) -> None:
    begin(OLD)
    await opens(ledger)
    ledger.run("update idemconsumer.hashing set wrapped = set_byte(wrapped, 20, get_byte(wrapped, 20) # 1)")
    changed = wrapped(ledger)
    begin(f"{NEW},{OLD}")
    with pytest.raises(ConfigurationError, match="under a secret that is not among `key_secrets`"):
        await opens(ledger)
    assert wrapped(ledger) == changed


async def test_who_looks_into_it_learns_how_far_that_is_and_rotates_nothing(ledger: Ledger) -> None:
    async def found() -> list[tuple[str, str]]:
        findings = await examine_secrets(ledger.dsn, SCHEMA)
        return [(each.level, each.text.partition(";")[0]) for each in findings]

    begin(OLD)
    assert await found() == []
    await opens(ledger)
    assert await found() == []
    begin(f"{NEW},{OLD}")
    assert await found() == [("warning", "the data key is wrapped by number 2")]
    assert wrapped_by(ledger) == [OLD]
    await opens(ledger)
    assert await found() == [("ok", "the data key is wrapped by the first one")]
    begin(OLD)
    assert [level for level, _ in await found()] == ["error"]


async def test_a_key_is_found_by_its_text_with_any_of_the_secrets(ledger: Ledger) -> None:
    app = App("shop")

    @app.idempotent_handler("memory:orders", key="id")
    async def take(order: dict[str, str], tx: Tx) -> None: ...

    begin(f"{NEW},{OLD}")
    known = Keys(ledger.dsn, SCHEMA)
    with pytest.raises(NothingFound, match="nothing is"):
        await known.find(handler="take", key="a")
    begin()
    app.worker(Settings(dsn=ledger.dsn, key_secrets=OLD))
    await app.process(Message("memory:orders", b'{"id": "a"}'))
    await app.close()
    ((key,),) = ledger.run("select key from idemconsumer.record")
    begin(f"{NEW},{OLD}")
    assert await known.find(handler="take", key="a") == key
    assert wrapped_by(ledger) == [OLD]


async def test_a_process_may_make_a_new_schema_after_another_one(ledger: Ledger) -> None:
    begin(SECRET)
    digest = await opens(ledger)
    ledger.run("delete from idemconsumer.hashing")
    assert await opens(ledger) == digest
