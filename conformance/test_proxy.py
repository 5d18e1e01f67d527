"""Ports of a sandbox through the server: HTTP, streams and WebSocket."""

import asyncio
import time
import urllib.request

import httpx
import pytest
from opensandbox.models.execd import RunCommandOpts

ECHO = r"""
import http.server, json, sys, time
class H(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def answer(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.path.startswith("/slow"):
            self.send_response(200); self.send_header("Content-Type", "text/event-stream")
            self.send_header("Transfer-Encoding", "chunked"); self.end_headers()
            for n in range(3):
                data = b"data: %d\n\n" % n
                self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data)); self.wfile.flush(); time.sleep(0.3)
            self.wfile.write(b"0\r\n\r\n"); return
        if self.path.startswith("/status/"):
            code = int(self.path.rsplit("/", 1)[1]); out = b"own body"
        elif self.path.startswith("/redirect"):
            self.send_response(302); self.send_header("Location", "/elsewhere"); self.send_header("Content-Length", "0")
            self.send_header("Set-Cookie", "a=1"); self.send_header("Set-Cookie", "b=2"); self.end_headers(); return
        else:
            code = 200
            out = json.dumps({"method": self.command, "path": self.path, "headers": self.headers.items(), "size": len(body)}).encode()
        self.send_response(code); self.send_header("Content-Length", str(len(out))); self.end_headers()
        if self.command != "HEAD": self.wfile.write(out)
    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = do_HEAD = do_OPTIONS = answer
    def log_message(self, *a): pass
http.server.ThreadingHTTPServer(("127.0.0.1", 8000), H).serve_forever()
"""

WS = r"""
import base64, hashlib, socket, threading
s = socket.create_server(("127.0.0.1", 8001))
def serve(c):
    head = b""
    while b"\r\n\r\n" not in head: head += c.recv(4096)
    key = [l.split(b":",1)[1].strip() for l in head.split(b"\r\n") if l.lower().startswith(b"sec-websocket-key")][0]
    accept = base64.b64encode(hashlib.sha1(key + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest())
    c.sendall(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: " + accept + b"\r\n\r\n")
    while True:
        h = c.recv(2)
        if len(h) < 2: return
        n = h[1] & 127
        if n == 126: n = int.from_bytes(c.recv(2), "big")
        elif n == 127: n = int.from_bytes(c.recv(8), "big")
        mask = c.recv(4); data = b""
        while len(data) < n: data += c.recv(n - len(data))
        data = bytes(b ^ mask[i % 4] for i, b in enumerate(data))
        head = bytes([h[0]]) + (bytes([n]) if n < 126 else b"\x7e" + n.to_bytes(2, "big") if n < 65536 else b"\x7f" + n.to_bytes(8, "big"))
        c.sendall(head + data)
        if h[0] & 15 == 8: c.close(); return
while True:
    c, _ = s.accept(); threading.Thread(target=serve, args=(c,), daemon=True).start()
"""


@pytest.fixture
async def backend(sandbox):
    await sandbox.files.write_file("/tmp/echo.py", ECHO)
    await sandbox.files.write_file("/tmp/ws.py", WS)
    for script, port in (("echo", 8000), ("ws", 8001)):
        await sandbox.commands.run(f"exec python3 /tmp/{script}.py", opts=RunCommandOpts(background=True))
        ready = await sandbox.commands.run(
            f"for i in $(seq 200); do (exec 3<>/dev/tcp/127.0.0.1/{port}) 2>/dev/null && exit 0; sleep 0.05; done; exit 1"
        )
        assert ready.exit_code == 0
    return sandbox


async def base(sandbox, port=8000):
    return "http://" + (await sandbox.get_endpoint(port)).endpoint


async def test_paths_and_queries_arrive_byte_for_byte(backend):
    url = await base(backend)
    for tail in ("", "/", "/a%2Fb//c?x=1&y=%2F&z=a+b&z=2&flag", "/?", "/%20?%ff"):
        got = await asyncio.to_thread(lambda t=tail: urllib.request.urlopen(url + t).read())
        import json

        assert json.loads(got)["path"] == (tail if tail.startswith("/") else "/")


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"])
async def test_methods_and_bodies(backend, method):
    async with httpx.AsyncClient() as client:
        answer = await client.request(method, await base(backend) + "/m", content=b"x" * 70_000)
        assert answer.status_code == 200
        assert answer.json()["method"] == method and answer.json()["size"] == 70_000


async def test_the_api_key_and_cookies_do_not_reach_the_sandbox(backend):
    headers = {
        "OPEN-SANDBOX-API-KEY": "secret", "Authorization": "Bearer t", "Cookie": "c=1", "X-Kept": "yes",
        "X-Forwarded-For": "6.6.6.6", "Connection": "X-Named", "X-Named": "1",
    }
    async with httpx.AsyncClient() as client:
        seen = {k.lower(): v for k, v in (await client.get(await base(backend), headers=headers)).json()["headers"]}
    assert seen["x-kept"] == "yes"
    for gone in ("open-sandbox-api-key", "authorization", "cookie", "x-named"):
        assert gone not in seen
    assert seen["x-forwarded-for"] != "6.6.6.6" and seen["x-forwarded-proto"] == "http"


@pytest.mark.parametrize("status", [404, 418, 500])
async def test_the_backends_own_errors_pass(backend, status):
    async with httpx.AsyncClient() as client:
        answer = await client.get(f"{await base(backend)}/status/{status}")
    assert answer.status_code == status and answer.text == "own body"


async def test_redirects_stay_below_the_prefix_and_cookies_stay_apart(backend):
    async with httpx.AsyncClient(follow_redirects=False) as client:
        answer = await client.get(await base(backend) + "/redirect")
    assert answer.headers["location"].endswith(f"/sandboxes/{backend.id}/proxy/8000/elsewhere")
    assert answer.headers.get_list("set-cookie") == ["a=1", "b=2"]


async def test_a_stream_is_passed_on_as_it_comes(backend):
    times = []
    async with httpx.AsyncClient() as client:
        async with client.stream("GET", await base(backend) + "/slow") as answer:
            async for _ in answer.aiter_bytes():
                times.append(time.monotonic())
    assert len(times) == 3 and times[2] - times[0] > 0.4


async def test_nothing_listening_is_502_in_json(sandbox):
    async with httpx.AsyncClient() as client:
        for port in (8123, 18080):
            answer = await client.get(await base(sandbox, port))
            assert answer.status_code == 502
            assert answer.json()["code"] == "BACKEND_CONNECTION_FAILED"


async def test_unknown_sandbox_is_404_in_json(server):
    async with httpx.AsyncClient() as client:
        answer = await client.get(f"{server.url}/sandboxes/7a8ff2f2-5b77-4b7c-8a53-000000000000/proxy/8000/")
    assert answer.status_code == 404 and answer.json()["code"] == "DOCKER::SANDBOX_NOT_FOUND"


async def test_websocket_echo(backend):
    import websockets

    endpoint = (await backend.get_endpoint(8001)).endpoint
    async with websockets.connect(f"ws://{endpoint}/chat", max_size=None) as socket:
        for message in ("hi", b"\x00\xff", "x" * 200_000):
            await socket.send(message)
            assert await socket.recv() == message


async def test_the_endpoint_of_the_egress_port_is_given(sandbox):
    assert (await sandbox.get_endpoint(18080)).endpoint


@pytest.mark.parametrize(("code", "reason"), [(1000, ""), (1001, "leaving"), (3000, "ours"), (4999, "last")])
async def test_a_websocket_close_of_the_client_reaches_the_backend(backend, code, reason):
    import websockets

    endpoint = (await backend.get_endpoint(8001)).endpoint
    socket = await websockets.connect(f"ws://{endpoint}/chat")
    await socket.close(code, reason)
    # The backend sends back the frame that it was sent.
    assert socket.protocol.close_rcvd is not None
    assert (socket.protocol.close_rcvd.code, socket.protocol.close_rcvd.reason) == (code, reason)


async def test_a_websocket_to_nobody_is_closed_with_a_reason(backend):
    import websockets

    for port, path, code in ((8123, "/", 1011), (8000, "/status/404", 1008)):
        endpoint = (await backend.get_endpoint(port)).endpoint
        async with websockets.connect(f"ws://{endpoint}{path}") as socket:
            with pytest.raises(websockets.ConnectionClosed):
                await asyncio.wait_for(socket.recv(), 10)
            assert socket.close_code == code and socket.close_reason
