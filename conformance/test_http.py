"""The wire itself, without an SDK in between."""

import json
import uuid

import httpx
import pytest

from conftest import API_KEY, IMAGE

BODY = {"image": {"uri": IMAGE}, "entrypoint": ["tail", "-f", "/dev/null"], "resourceLimits": {}}


def create(http, **members):
    answer = http.post("/v1/sandboxes", json={**BODY, **members})
    assert answer.status_code == 202, answer.text
    return answer.json()


def test_health_version_and_docs_are_open(server):
    for path, status in (("/health", 200), ("/version", 200), ("/openapi.json", 200), ("/v1/health", 404)):
        assert httpx.get(server.url + path).status_code in ((status,) if status == 200 else (401, 404))
    assert httpx.get(server.url + "/health").json() == {"status": "healthy"}
    assert httpx.get(server.url + "/docs", follow_redirects=True).status_code == 200


def has_null(value) -> bool:
    if isinstance(value, dict):
        return any(has_null(member) for member in value.values())
    if isinstance(value, list):
        return any(has_null(member) for member in value)
    return value is None


def test_no_answer_holds_a_null(http):
    made = create(http)
    try:
        for path in ("", "/endpoints/44772"):
            assert not has_null(http.get(f"/v1/sandboxes/{made['id']}{path}").json())
        assert not has_null(http.get("/v1/sandboxes").json())
        assert "expiresAt" not in made
    finally:
        http.delete(f"/v1/sandboxes/{made['id']}")


def test_every_route_exists_with_and_without_v1(http):
    made = create(http)
    assert http.get(f"/sandboxes/{made['id']}").status_code == 200
    assert http.get("/sandboxes").json()["pagination"]["page"] == 1
    assert http.delete(f"/sandboxes/{made['id']}").status_code == 204


def test_request_ids(http):
    echoed = http.get("/v1/sandboxes/nope", headers={"X-Request-ID": "abc"})
    assert echoed.status_code == 404 and echoed.headers["x-request-id"] == "abc"
    made = http.get("/v1/sandboxes").headers["x-request-id"]
    assert len(made) == 32 and uuid.UUID(made)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ("{", 422),
        ("[]", 422),
        ('"x"', 422),
        (json.dumps({}), 422),
        (json.dumps({**BODY, "timeout": 5}), 422),
        (json.dumps({**BODY, "timeout": "soon"}), 422),
        (json.dumps({**BODY, "entrypoint": []}), 422),
        (json.dumps({**BODY, "image": None}), 422),
        (json.dumps({**BODY, "image": {"uri": "  "}}), 422),
        (json.dumps({**BODY, "env": {"OPENSANDBOX_LIFECYCLE": "x"}}), 422),
        (json.dumps({**BODY, "resourceLimits": {"cpu": "lots"}}), 400),
        (json.dumps({**BODY, "resourceLimits": {"memory": "1.5Gi"}}), 400),
        (json.dumps({**BODY, "metadata": {"a b": "c"}}), 400),
        (json.dumps({**BODY, "platform": {"os": "plan9", "arch": "amd64"}}), 400),
        (json.dumps({**BODY, "timeout": 10**15}), 400),
        (json.dumps({**BODY, "extensions": {"access.renew.extend.seconds": "5"}}), 400),
        (json.dumps({**BODY, "extensions": {"poolRef": "p"}, "image": {"uri": IMAGE}}), 400),
    ],
)
def test_bad_bodies(http, body, status):
    answer = http.post("/v1/sandboxes", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == status, answer.text
    assert answer.json()["code"] and answer.json()["message"]


def test_errors_never_repeat_secrets(http):
    secret = "hunter2-very-secret"
    for body in ({**BODY, "timeout": secret}, {**BODY, "image": {"uri": IMAGE, "auth": {"username": 5, "password": secret}}}):
        answer = http.post("/v1/sandboxes", json=body)
        assert answer.status_code >= 400 and secret not in answer.text


def test_malformed_filters(http):
    assert http.get("/v1/sandboxes", params={"metadata": "team=infra&broken"}).json()["code"] == "INVALID_METADATA_FORMAT"
    for query in ("page=0", "page=x", "pageSize=0", "pageSize=201"):
        assert http.get(f"/v1/sandboxes?{query}").status_code == 422


def test_metadata_filter_is_encoded_twice(http):
    made = create(http, metadata={"project": "Apollo", "note": ""})
    try:
        for query in ("metadata=project%3DApollo%26note%3D", "metadata=project%3DApollo", "metadata=note%3D"):
            ids = [item["id"] for item in http.get(f"/v1/sandboxes?{query}").json()["items"]]
            assert made["id"] in ids, query
    finally:
        http.delete(f"/v1/sandboxes/{made['id']}")


def test_methods_and_unknown_paths(http):
    missing = http.get("/v1/nothing/here")
    assert missing.status_code == 404 and missing.json()["code"]
    wrong = http.put("/v1/sandboxes")
    assert wrong.status_code == 405 and wrong.json()["code"] and "GET" in wrong.headers["allow"]


def test_a_trailing_slash_redirects(http):
    answer = http.get("/v1/sandboxes/", follow_redirects=False)
    assert answer.status_code == 307 and answer.headers["location"].endswith("/v1/sandboxes")


def test_cors_preflight_needs_no_key(server):
    answer = httpx.options(
        f"{server.url}/v1/sandboxes",
        headers={"Origin": "https://app.example", "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "x-a"},
    )
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == "https://app.example"
    assert answer.headers["access-control-allow-credentials"] == "true"


def test_metrics_events(http):
    event = {"eventType": "sandbox.create", "createDurationMs": 12, "success": True}
    answer = http.post("/v1/metrics/events", json=event)
    assert answer.status_code == 204 and answer.content == b""
    assert http.post("/metrics/events", json=event).status_code == 404
    assert http.post("/v1/metrics/events", json={**event, "eventType": "x"}).status_code == 422


def test_endpoint_rules(http):
    made = create(http)
    try:
        path = f"/v1/sandboxes/{made['id']}/endpoints"
        assert http.get(f"{path}/0").json()["code"] == "DOCKER::INVALID_PORT"
        assert http.get(f"{path}/70000").json()["code"] == "DOCKER::INVALID_PORT"
        assert http.get(f"{path}/http").status_code == 422
        assert http.get(f"{path}/8080?use_server_proxy=true&expires=2000000000").status_code == 400
        for flag in ("true", "false", "1"):
            endpoint = http.get(f"{path}/44772?use_server_proxy={flag}").json()["endpoint"]
            assert endpoint.endswith(f"/v1/sandboxes/{made['id']}/proxy/44772")
    finally:
        http.delete(f"/v1/sandboxes/{made['id']}")


def test_renew_refuses_the_past(http):
    made = create(http, timeout=600)
    try:
        path = f"/v1/sandboxes/{made['id']}/renew-expiration"
        past = http.post(path, json={"expiresAt": "2020-01-01T00:00:00Z"})
        assert past.status_code == 400 and past.json()["code"] == "DOCKER::INVALID_EXPIRATION"
        for moment in ("2099-01-02T03:04:05.123456+08:00", "2099-01-01T19:04:05.1234567Z", "2099-01-01T19:04:05.123456789Z"):
            assert http.post(path, json={"expiresAt": moment}).json() == {"expiresAt": "2099-01-01T19:04:05.123456Z"}
    finally:
        http.delete(f"/v1/sandboxes/{made['id']}")


def test_unknown_members_are_dropped_by_default(http):
    made = create(http, futureMember={"a": 1}, timeout=600)
    assert http.delete(f"/v1/sandboxes/{made['id']}").status_code == 204


def test_the_framing_of_a_command_stream(http):
    made = create(http)
    try:
        url = f"/v1/sandboxes/{made['id']}/proxy/44772/command"
        with http.stream("POST", url, json={"command": "echo hi"}) as answer:
            assert answer.status_code == 200
            assert answer.headers["content-type"].startswith("text/event-stream")
            body = answer.read().decode()
        events = [json.loads(part) for part in body.split("\n\n") if part]
        assert body.endswith("\n\n")
        assert [e["type"] for e in events if e["type"] != "ping"] == ["init", "stdout", "execution_complete"]
        assert all(isinstance(e["timestamp"], int) for e in events)
    finally:
        http.delete(f"/v1/sandboxes/{made['id']}")


def test_the_key_is_not_needed_on_proxy_paths(server, http):
    made = create(http)
    try:
        assert httpx.get(f"{server.url}/v1/sandboxes/{made['id']}/proxy/44772/ping").status_code == 200
        assert httpx.get(f"{server.url}/v1/sandboxes/{made['id']}").status_code == 401
    finally:
        http.delete(f"/v1/sandboxes/{made['id']}")


def test_a_client_that_leaves_during_create_leaves_nothing(server, http):
    import socket
    import time

    tag = uuid.uuid4().hex
    body = json.dumps({**BODY, "metadata": {"run": tag}}).encode()
    for _ in range(5):
        raw = socket.create_connection(("127.0.0.1", server.port))
        raw.sendall(
            b"POST /v1/sandboxes HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            + f"OPEN-SANDBOX-API-KEY: {API_KEY}\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        raw.close()
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        time.sleep(0.2)
        left = http.get(f"/v1/sandboxes?metadata=run%3D{tag}").json()["items"]
        if not left:
            break
    # An answer that was already on its way when the client left may stay; it must then be a whole sandbox.
    for item in left:
        assert item["status"]["state"] == "Running"
        http.delete(f"/v1/sandboxes/{item['id']}")


def test_errors_are_json_in_utf_8_whatever_was_sent(server):
    import socket

    key = b"OPEN-SANDBOX-API-KEY: " + API_KEY.encode() + b"\r\n"
    body = b'{"image":{"uri":"\xff\xfe"},"entrypoint":["\x80"],"metadata":{"\xc3":"\xe2\x82"}}'
    length = b"Content-Type: application/json\r\nContent-Length: %d\r\n" % len(body)
    for head, sent in (
        (b"POST /v1/sandboxes HTTP/1.1\r\n" + key + length, body),
        (b"GET /v1/sandboxes/\xff\xfe HTTP/1.1\r\n" + key, b""),
        (b"GET /v1/sandboxes/%ff%fe HTTP/1.1\r\n" + key, b""),
        (b"GET /v1/sandboxes?metadata=%ff&page=%ff HTTP/1.1\r\n" + key, b""),
        (b"GET /v1/sandboxes HTTP/1.1\r\nOPEN-SANDBOX-API-KEY: \xff\r\n", b""),
        (b"GET /v1/sandboxes/x/proxy/44772/%ff HTTP/1.1\r\n" + key, b""),
        (b"GET /\xe2\x82 HTTP/1.1\r\n", b""),
    ):
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
            client.sendall(head + b"Host: x\r\nConnection: close\r\n\r\n" + sent)
            answer = b"".join(iter(lambda: client.recv(65536), b""))
        fields, _, text = answer.partition(b"\r\n\r\n")
        assert int(fields.split()[1]) >= 400, answer
        if b"\xff" in head.split(b"\r\n")[0] or b"\xe2" in head.split(b"\r\n")[0]:
            continue  # No request at all to an HTTP server; its refusal has no body.
        told = json.loads(text.decode("utf-8", errors="strict"))
        assert told["code"] and told["message"], answer
        assert b"x-request-id" in fields.lower(), answer


def test_timeouts_beyond_any_clock_are_400(http):
    made = create(http)
    path = f"/v1/sandboxes/{made['id']}"
    try:
        for huge in (10**12, 2**63 - 1):
            ran = http.post(f"{path}/proxy/44772/command", json={"command": "echo ran", "timeout": huge})
            assert ran.status_code == 400 or '"text":"ran\\n"' in ran.text, ran.text
        for beyond in (2**63, 2**64, 10**30):
            assert http.post(f"{path}/proxy/44772/command", json={"command": "true", "timeout": beyond}).status_code == 400
        for expiry in ("99999-01-01T00:00:00Z", "+292277026596-12-04T15:30:07Z", "0000-01-01T00:00:00Z"):
            assert http.post(f"{path}/renew-expiration", json={"expiresAt": expiry}).status_code in (400, 422)
        assert http.get(path).json()["status"]["state"] == "Running"
    finally:
        http.delete(path)
