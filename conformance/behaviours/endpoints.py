"""Ports of a sandbox, by the endpoint that a client is given."""

from __future__ import annotations

import httpx
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from behaviours import behaviour
from behaviours.support import eventually, refused

CLOSER = r"""
import base64, hashlib, socket, struct
server = socket.create_server(("0.0.0.0", 8001))
while True:
    peer, _ = server.accept()
    head = b""
    while b"\r\n\r\n" not in head and (part := peer.recv(4096)): head += part
    if not head: continue
    code, _, reason = head.split(b" ")[1].strip(b"/").partition(b"/")
    key = [line.split(b":", 1)[1].strip() for line in head.split(b"\r\n") if line.lower().startswith(b"sec-websocket-key")][0]
    accept = base64.b64encode(hashlib.sha1(key + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest())
    peer.sendall(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: " + accept + b"\r\n\r\n")
    if code != b"abort":
        body = struct.pack("!H", int(code)) + reason if code else b""
        peer.sendall(bytes([0x88, len(body)]) + body)
        peer.settimeout(2)
        try: peer.recv(100)
        except OSError: pass
    peer.close()
"""


@behaviour(basic=True)
def a_port_answers_at_its_endpoint(client, box):
    box.write("/srv/www/index.html", "<h1>hi</h1>")
    box.start("exec python3 -m http.server --directory /srv/www 8000")
    endpoint = box.endpoint(8000)
    assert "://" not in endpoint["endpoint"] and not endpoint["endpoint"].endswith("/")
    url = f"http://{endpoint['endpoint']}"

    def answer():
        got = httpx.get(f"{url}/index.html", headers=endpoint["headers"])
        return got.status_code == 200 and got.text

    assert eventually(answer) == "<h1>hi</h1>"
    assert httpx.get(f"{url}/missing", headers=endpoint["headers"]).status_code == 404


@behaviour()
def a_port_without_a_listener_is_told_as_such(client, box):
    answer = httpx.get(f"http://{box.endpoint(8123)['endpoint']}/")
    assert answer.status_code == 502 and answer.json()["code"] == "BACKEND_CONNECTION_FAILED"


@behaviour()
def the_egress_port_has_an_endpoint_too(client, box):
    assert box.endpoint(18080)["endpoint"].endswith("/proxy/18080")


@behaviour("signed_endpoint")
def signed_endpoints_are_refused_with_a_reason(client, box):
    with refused(client, 400, "SANDBOX::API_NOT_SUPPORTED") as caught:
        box.signed_endpoint(8000, 4_000_000_000)
    assert "signed" in caught.error.message


@behaviour()
def websockets_close_with_the_backends_code(client, box):
    box.write("/tmp/closer.py", CLOSER)
    box.start("exec python3 /tmp/closer.py")
    url = f"ws://{box.endpoint(8001)['endpoint']}"
    eventually(lambda: box.run("exec 3<>/dev/tcp/127.0.0.1/8001").exit_code == 0)
    for path, code, reason in (
        ("/1000", 1000, ""),
        ("/1001/away", 1001, "away"),
        ("/1011/boom", 1011, "boom"),
        ("/3000/registered", 3000, "registered"),
        ("/4404/own-words", 4404, "own-words"),
        ("/", 1005, ""),
        ("/abort", 1006, ""),
    ):
        with connect(url + path) as socket, pytest.raises(ConnectionClosed):
            socket.recv(timeout=10)
        assert (socket.close_code, socket.close_reason or "") == (code, reason), path
