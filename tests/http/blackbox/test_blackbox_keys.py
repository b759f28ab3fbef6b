"""Which requests have a key, what it belongs to, and what must be equal under it."""

from __future__ import annotations

import pytest

from tests.http.blackbox.client import Service, new, problem, replayed

MALFORMED = {
    "empty": b"", "blank": b"   ", "space": b"two words", "unclosed": b'"abc', "half_quoted": b'a"b"',
    "empty_quoted": b'""', "parameter": b'"abc";', "escape": rb'"a\b"', "not_ascii": b"caf\xe9",
    "utf_8": "café".encode(), "long": b"k" * 256, "long_quoted": b'"' + b"k" * 256 + b'"', "semicolon": b"a;b",
}  # fmt: skip


async def test_a_malformed_key_is_refused_and_nothing_runs(service: Service) -> None:
    for name, given in MALFORMED.items():
        answer = await service.raw(b"{}", b"Idempotency-Key: " + given)
        assert b" 400 " in answer.partition(b"\r\n")[0], name
        assert b"urn:idemconsumer:problem:key-malformed" in answer, name
    assert await service.effects() == 0


async def test_a_key_that_is_sent_twice_is_refused(service: Service) -> None:
    key = new()
    for keys in ([key, key], [key, new()], [f"{key}, {key}"], [f'"{key}", "{key}"']):
        response = await service.send(keys=keys)
        assert (response.status_code, problem(response)) == (400, "key-repeated")
    assert await service.effects() == 0


async def test_a_token_and_a_quoted_string_are_one_key(service: Service) -> None:
    key = new()
    first = await service.send(key=key)
    assert (await service.send(key=f'"{key}"')).content == first.content
    for same in (f'  "{key}" ', f" {key}\t"):
        assert first.content in await service.raw(b'{"amount": 5}', f"Idempotency-Key:{same}".encode())
    assert await service.effects() == 1


async def test_a_key_may_be_long(service: Service) -> None:
    key = new().ljust(255, "k")
    assert (await service.send(key=key)).status_code == 201
    assert replayed(await service.send(key=key))


async def test_a_required_key_that_is_missing_is_refused(service: Service) -> None:
    response = await service.send()
    assert (response.status_code, problem(response), await service.effects()) == (400, "key-missing", 0)


async def test_without_an_optional_key_each_request_runs(service: Service) -> None:
    first, second = [await service.send("optional") for _ in range(2)]
    assert first.content != second.content
    assert not replayed(first)
    assert not replayed(second)
    assert await service.effects() == 2


async def test_a_caller_who_is_not_known_is_refused(service: Service) -> None:
    response = await service.send(key=new(), tenant=None)
    assert (response.status_code, problem(response), await service.effects()) == (401, "tenant-missing", 0)
    assert "WWW-Authenticate" in response.headers


async def test_a_tenant_that_cannot_be_found_out_is_an_error(service: Service) -> None:
    response = await service.send(key=new(), tenant="unknown to a directory that is down")
    assert (response.status_code, await service.effects()) == (500, 0)


async def test_each_tenant_has_keys_of_its_own(service: Service) -> None:
    key = new()
    first, other = [await service.send(key=key, tenant=tenant) for tenant in ("acme", "globex")]
    assert not replayed(other)
    assert first.content != other.content
    assert await service.effects() == 2
    assert (await service.send(key=key, tenant="globex")).content == other.content


async def test_each_route_has_keys_of_its_own(service: Service) -> None:
    key = new()
    for route in ("orders", "optional"):
        assert not replayed(await service.send(route, key=key))
        assert replayed(await service.send(route, key=key))
    assert await service.effects() == 2


async def test_routes_that_are_named_nowhere_are_covered_for_post_and_patch_alone(service: Service) -> None:
    if service.mode == "joined":
        pytest.skip("a route is joined because it was named")
    for method, covered in {"POST": True, "PATCH": True, "PUT": False}.items():
        key, service.effect = new(), new()
        first, again = [await service.send("unnamed", key=key, method=method) for _ in range(2)]
        assert first.status_code == again.status_code == 201
        assert (replayed(again), await service.effects()) == (covered, 1 if covered else 2)
    assert (await service.send("unnamed", key=key, method="HEAD")).status_code == 201


# ------------------------------------------------------------------------------------------------------- fingerprints
# What is sent behind {"amount": 5}, and whether it is the same request.
COMPARED = [
    ("orders", b'{"amount":5}', False), ("orders", b'{"amount": 6}', False), ("json", b'{"amount":5}', True),
    ("json", b'{"amount": 6}', False), ("fields", b'{"note": "x", "amount": 5}', True),
    ("fields", b'{"amount": 6}', False), ("anything", b"whatever", True),
]  # fmt: skip


async def test_what_must_be_equal_under_one_key(service: Service) -> None:
    for route, content, same in COMPARED:
        key = new()
        first = await service.send(route, key=key)
        again = await service.send(route, key=key, content=content)
        if same:
            assert (replayed(again), again.content) == (True, first.content), (route, content)
        else:
            assert (again.status_code, problem(again)) == (422, "key-reused"), (route, content)
        assert (await service.send(route, key=key)).content == first.content
    assert await service.effects() == len(COMPARED)


async def test_the_query_is_part_of_a_request(service: Service) -> None:
    key = new()
    await service.send(key=key)
    assert problem(await service.send(key=key, dry="1")) == "key-reused"
    assert await service.effects() == 1
