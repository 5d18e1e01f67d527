"""Terminals through the server: a plain WebSocket client, as no official client has a call for them.

The protocol is that of the daemon: binary frames of output and input, text frames of JSON for the rest.
"""

from __future__ import annotations

import asyncio
import json
from datetime import timedelta

import httpx
import pytest
import websockets
from opensandbox import Sandbox
from websockets.exceptions import ConnectionClosed

IMAGE = "host"
EXECD = 44772


class Terminal:
    """One connection; output in order, whatever kind of frame it came in."""

    def __init__(self, socket, since: int) -> None:
        self.socket = socket
        self.output = b""
        self.errors = b""
        self.offset = since
        self.texts: list[dict] = []

    async def step(self) -> None:
        message = await asyncio.wait_for(self.socket.recv(), 20)
        if isinstance(message, str):
            self.texts.append(json.loads(message))
            return
        kind, rest = message[0], message[1:]
        if kind == 3:
            self.offset, rest = int.from_bytes(rest[:8], "big"), rest[8:]
        self.offset += len(rest)
        if kind == 2:
            self.errors += rest
        else:
            self.output += rest

    async def until(self, text: bytes) -> None:
        while text not in self.output:
            await self.step()

    async def text(self, kind: str) -> dict:
        while not self.texts or self.texts[-1]["type"] != kind:
            await self.step()
        return self.texts[-1]

    async def type(self, text: str | bytes) -> None:
        await self.socket.send(b"\0" + (text.encode() if isinstance(text, str) else text))

    async def exit(self) -> int:
        code = (await self.text("exit"))["exit_code"]
        with pytest.raises(ConnectionClosed):
            await self.step()
        assert (self.socket.close_code, self.socket.close_reason) == (1000, "process exited")
        return code


class Door:
    """The daemon's endpoint of a sandbox, by its headers."""

    def __init__(self, endpoint) -> None:
        self.base, self.headers = endpoint.endpoint, dict(endpoint.headers or {})

    async def request(self, method: str, path: str, body: dict | None = None, headers: dict | None = None):
        async with httpx.AsyncClient(verify=False) as client:
            headers = self.headers if headers is None else headers
            return await client.request(method, f"http://{self.base}{path}", json=body, headers=headers)

    async def create(self, **body: str) -> str:
        answer = await self.request("POST", "/pty", body)
        assert answer.status_code == 201, answer.text
        return answer.json()["session_id"]

    async def attach(self, id: str, query: str = "", since: int = 0, **options) -> Terminal:
        options.setdefault("additional_headers", self.headers)
        if since:
            query += f"&since={since}"
        return Terminal(await websockets.connect(f"ws://{self.base}/pty/{id}/ws?{query}", **options), since)


@pytest.fixture
async def door(sandbox):
    return Door(await sandbox.get_endpoint(EXECD))


async def test_a_shell_on_a_terminal(door):
    id = await door.create(cwd="/usr")
    status = (await door.request("GET", f"/pty/{id}")).json()
    assert status == {
        "session_id": id, "running": False, "output_offset": 0, "launch_attempted": False, "launch_failed": False,
    }
    terminal = await door.attach(id)
    assert await terminal.text("connected") == {
        "type": "connected", "session_id": id, "mode": "pty", "role": "holder",
    }
    await terminal.type("pwd; tty; stty size; echo \"<$TERM>\"; echo a$((40+2))\n")
    await terminal.until(b"a42")
    assert b"/usr\r\n/dev/pts/" in terminal.output and b"\r\n24 80\r\n<xterm-256color>\r\n" in terminal.output
    await terminal.socket.send(json.dumps({"type": "resize", "cols": 120, "rows": 40}))
    await terminal.type("stty size; sleep 600\n")
    await terminal.until(b"40 120")
    await asyncio.sleep(0.3)
    await terminal.type("\x03")
    await terminal.type("echo b$((40+2)); exit 3\n")
    await terminal.until(b"b42")
    assert await terminal.exit() == 3
    assert (await door.request("DELETE", f"/pty/{id}")).status_code == 200
    for method in ("GET", "DELETE"):
        answer = await door.request(method, f"/pty/{id}")
        assert (answer.status_code, answer.json()["code"]) == (404, "CONTEXT_NOT_FOUND")


async def test_replay_comes_before_connected_and_nothing_is_lost(door):
    id = await door.create(command="read go; for i in $(seq 40); do seq $((i*1000-999)) $((i*1000)); sleep 0.01; done; exit 5")
    terminal = await door.attach(id)
    await terminal.text("connected")
    await terminal.type("\n")
    output, last = b"", b"\r\n40000\r\n"
    while last not in output:
        await terminal.step()
        if len(terminal.output) > 20_000 or last in terminal.output:
            output += terminal.output
            offset = terminal.offset
            terminal.socket.transport.abort()
            if last not in output:
                terminal = await door.attach(id, "takeover=1", since=offset, max_size=1 << 20)
                assert await terminal.text("connected") == terminal.texts[0]
    lines = output.decode().split()
    assert lines == [str(n) for n in range(1, 40_001)]
    # The end came when nobody was there.
    terminal = await door.attach(id, "takeover=1", since=offset)
    assert await terminal.exit() == 5


async def test_takeover_and_viewers(door):
    id = await door.create()
    first = await door.attach(id)
    await first.text("connected")
    viewer = await door.attach(id, "mode=viewer&since=0")
    second = await door.attach(id, "takeover=1")
    await second.text("connected")
    with pytest.raises(ConnectionClosed):
        while True:
            await first.step()
    assert (first.socket.close_code, first.socket.close_reason) == (4001, "TAKEN_OVER")
    await second.type("echo a$((40+2))\n")
    await second.until(b"a42")
    await viewer.until(b"a42")
    await viewer.type("x")
    assert (await viewer.text("error"))["code"] == "READ_ONLY"
    # The server lets a handshake succeed before it knows the daemon's answer, and says why by the close.
    third = await door.attach(id)
    with pytest.raises(ConnectionClosed):
        await third.step()
    assert third.socket.close_code == 1008
    await second.socket.close()
    await viewer.socket.close()


async def test_pipes(door):
    terminal = await door.attach(await door.create(), "pty=0")
    assert (await terminal.text("connected"))["mode"] == "pipe"
    await terminal.type("echo out; echo err >&2; exit 2\n")
    assert await terminal.exit() == 2
    assert (terminal.output, terminal.errors) == (b"out\n", b"err\n")


async def test_bytes_and_pastes(door):
    terminal = await door.attach(await door.create(command="stty raw -echo; echo ready; head -c 300000 | sha256sum"))
    await terminal.until(b"ready")
    paste = bytes(range(256)) * 1200
    await terminal.type(paste[:300_000])
    import hashlib

    await terminal.until(hashlib.sha256(paste[:300_000]).hexdigest().encode())
    assert await terminal.exit() == 0


async def test_subprotocols_are_answered(door):
    terminal = await door.attach(await door.create(), subprotocols=["tty.v1", "other"])
    assert terminal.socket.subprotocol == "tty.v1"
    await terminal.socket.close()


async def test_what_breaks_the_protocol_is_closed_with_a_code(door):
    id = await door.create()
    terminal = await door.attach(id)
    await terminal.text("connected")
    for junk in ("{", "[]", '{"type":"later"}', b"", b"\x07x"):
        await terminal.socket.send(junk)
        terminal.texts.clear()
        assert (await terminal.text("error"))["code"] == "INVALID_FRAME"
    await terminal.socket.send(b"\0" + b"x" * (2 << 20))
    with pytest.raises(ConnectionClosed):
        while True:
            await terminal.step()
    assert terminal.socket.close_code == 1009


async def test_a_secured_sandbox_wants_its_headers(config):
    sandbox = await Sandbox.create(
        IMAGE, connection_config=config, timeout=timedelta(minutes=5), secure_access=True
    )
    try:
        door = Door(await sandbox.get_endpoint(EXECD))
        assert door.headers
        terminal = await door.attach(await door.create(command="echo hello; exit 1"))
        assert await terminal.exit() == 1
        assert (await door.request("POST", "/pty", {}, headers={})).status_code in (401, 403)
        with pytest.raises((ConnectionClosed, websockets.exceptions.InvalidStatus)):
            refused = await door.attach(await door.create(), additional_headers={})
            await refused.step()
    finally:
        await sandbox.kill()
        await sandbox.close()


async def test_a_paused_client_gets_all_in_the_end(door):
    terminal = await door.attach(await door.create(command="stty -opost; seq 1 300000"), max_queue=1)
    await asyncio.sleep(2)
    assert await terminal.exit() == 0
    assert terminal.output == b"".join(b"%d\n" % n for n in range(1, 300_001))
