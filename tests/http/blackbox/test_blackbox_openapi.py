"""What the OpenAPI document says of a route, and that it is true."""

from __future__ import annotations

from typing import Any

from tests.http.blackbox.client import Service, new, problem

PROBLEMS = {400, 401, 409, 410, 413, 422, 503}


async def test_the_document_has_the_header_the_answers_and_the_policy(service: Service) -> None:
    paths = await service.document()
    orders: dict[str, Any] = paths[f"/{service.mode}/orders"]["post"]
    (header,) = [each for each in orders["parameters"] if each["name"] == "Idempotency-Key"]
    assert (header["in"], header["required"], header["schema"]["maxLength"]) == ("header", True, 255)
    described = {int(status) for status, each in orders["responses"].items() if _problems(each)}
    assert described == PROBLEMS
    assert all("Retry-After" in orders["responses"][status]["headers"] for status in ("409", "503"))
    expected = {"mode": service.mode, "required": True, "fingerprint": "bytes", "expires": 86_400, "wait": 0}
    assert orders["x-idempotency"] == expected | {"maxBody": 65_536, "maxResponse": 65_536}

    fields, brief, waiting = (_policy(paths, service, name) for name in ("fields", "brief", "waiting"))
    assert (fields["fingerprint"], fields["required"]) == (["amount", "card.id"], False)
    assert (brief["expires"], waiting["wait"]) == (0.3, 30)


async def test_what_is_not_covered_is_not_described(service: Service) -> None:
    paths = await service.document()
    assert "x-idempotency" in paths["/leased/unnamed"]["post"]
    assert "x-idempotency" not in paths["/leased/unnamed"]["put"]


async def test_what_a_client_is_answered_is_in_the_document(service: Service) -> None:
    responses = (await service.document())[f"/{service.mode}/orders"]["post"]["responses"]
    key = new()
    assert (await service.send(key=key)).status_code == 201
    answers = [
        await service.send(), await service.send(key="two words"), await service.send(key=new(), tenant=None),
        await service.send(key=key, content=b"another"), await service.send(key=new(), content=b"b" * 65_537),
    ]  # fmt: skip
    for answer in answers:
        assert f"urn:idemconsumer:problem:{problem(answer)}" in _problems(responses[str(answer.status_code)])


def _policy(paths: dict[str, Any], service: Service, name: str) -> dict[str, Any]:
    policy: dict[str, Any] = paths[f"/{service.mode}/{name}"]["post"]["x-idempotency"]
    return policy


def _problems(response: dict[str, Any]) -> list[str]:
    """The types of problems with this status."""
    described = response.get("content", {}).get("application/problem+json", {"schema": {"x-types": []}})
    types: list[str] = described["schema"]["x-types"]
    return types
