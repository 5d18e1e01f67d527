"""Connections: how many it takes, and what happens to work whose client has left."""

from __future__ import annotations

import http.client
import json
import socket
import time

from conftest import API_KEY
from test_faults import BODY, create

KEY = {"OPEN-SANDBOX-API-KEY": API_KEY}


def test_a_thousand_calls_need_one_connection(server, http):
    id = create(http)
    proxy = f"/v1/sandboxes/{id}/proxy/44772"
    kinds = [
        ("GET", "/health", None, 200),
        ("GET", "/v1/sandboxes", None, 200),
        ("GET", "/v1/sandboxes/nope", None, 404),
        ("POST", "/v1/sandboxes", "{", 422),
        ("DELETE", "/v1/sandboxes/nope", None, 404),
        ("GET", f"{proxy}/ping", None, 200),
        ("GET", f"{proxy}/files/info?path=/nope", None, 404),
        ("GET", f"{proxy}/files/download?path=/etc/passwd", None, 200),
        ("POST", f"{proxy}/command", json.dumps({"command": "echo x"}), 200),
        ("GET", "/no/such/route", None, 404),
    ]
    connection = http_connection(server.port)
    opened = connection.sock.getsockname()
    for _ in range(100):
        for method, path, body, status in kinds:
            connection.request(method, path, body, {**KEY, "Content-Type": "application/json"})
            answer = connection.getresponse()
            answer.read()
            assert answer.status == status, (method, path, answer.status)
            assert connection.sock is not None, f"{method} {path} closed the connection"
    assert connection.sock.getsockname() == opened
    connection.close()
    http.delete(f"/v1/sandboxes/{id}")


def http_connection(port: int) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.connect()
    return connection


def test_a_create_whose_client_leaves_is_undone(make_server):
    own = make_server(extra="ready_slots = 8")
    body = json.dumps({**BODY, "metadata": {"left": "yes"}}).encode()
    request = (
        f"POST /v1/sandboxes HTTP/1.1\r\nHost: x\r\nOPEN-SANDBOX-API-KEY: {API_KEY}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode() + body
    for _ in range(20):
        with socket.create_connection(("127.0.0.1", own.port)) as client:
            client.sendall(request)
    time.sleep(0.3)
    with own.client() as client:
        deadline = time.monotonic() + 10
        while left := client.get("/v1/sandboxes").json()["pagination"]["totalItems"]:
            assert time.monotonic() < deadline, left
            time.sleep(0.1)


def test_two_hundred_deletes_are_seen_at_once(http):
    for n in range(200):
        id = create(http, metadata={"round": str(n)})
        listed = http.get("/v1/sandboxes", params={"metadata": f"round={n}"}).json()["items"]
        assert [item["id"] for item in listed] == [id]
        assert http.delete(f"/v1/sandboxes/{id}").status_code == 204
        assert http.get("/v1/sandboxes", params={"metadata": f"round={n}"}).json()["items"] == []
        assert http.get(f"/v1/sandboxes/{id}").status_code == 404
