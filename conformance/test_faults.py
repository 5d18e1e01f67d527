"""Faults from outside: damaged state, hostile sandboxes, clients that write in pieces."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sqlite3
import time
from pathlib import Path

import httpx

from conftest import API_KEY, Server

BODY = {"image": {"uri": "host"}, "entrypoint": ["sleep", "infinity"], "resourceLimits": {}}


def create(client: httpx.Client, **changes: object) -> str:
    answer = client.post("/v1/sandboxes", json=BODY | changes)
    assert answer.status_code == 202, answer.text
    return answer.json()["id"]


def output(client: httpx.Client, sandbox: str, command: str) -> str:
    path = f"/v1/sandboxes/{sandbox}/proxy/44772/command"
    text = ""
    with client.stream("POST", path, json={"command": command, "timeout": 60000}) as stream:
        assert stream.status_code == 200, stream.read()
        for line in stream.iter_lines():
            event = json.loads(line) if line.strip() else {}
            text += event.get("text", "") if event.get("type") in ("stdout", "stderr") else ""
    return text


def processes(instance: str) -> list[int]:
    """Host process ids of an instance's sandboxes. Those that are only prepared run no work and do not count."""
    slots: dict[str, list[int]] = {}
    working = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            groups = Path(f"/proc/{pid}/cgroup").read_text()
        except OSError:
            continue
        for slot, work in re.findall(rf"opensandbox-{instance}/(\d+)(/work)?", groups):
            slots.setdefault(slot, []).append(int(pid))
            if work:
                working.add(slot)
    return sorted({pid for slot in working for pid in slots[slot]})


def until(condition, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_body_sent_after_the_answer_leaves_the_connection_usable(server: Server) -> None:
    body = b'{"command": "true"}'
    nobody = "3b0a72f7-93ab-4b6e-9aa0-000000000000"
    for head in (f"POST /v1/sandboxes/{nobody}/proxy/44772/command", "POST /nope", f"DELETE /v1/sandboxes/{nobody}"):
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            client.settimeout(5)
            request = f"{head} HTTP/1.1\r\nhost: x\r\nopen-sandbox-api-key: {API_KEY}\r\ncontent-length: {len(body)}\r\n\r\n"
            client.sendall(request.encode())
            time.sleep(0.03)
            client.sendall(body)
            assert b" 404 " in client.recv(65536).split(b"\r\n")[0], head
            client.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            assert b" 200 " in client.recv(65536).split(b"\r\n")[0], head


def test_names_that_can_be_no_image_are_the_callers_fault(http: httpx.Client) -> None:
    for name in ("/etc", "../../etc", "file:///etc", "UPPER CASE", "http://169.254.169.254/x", "a" * 100_000):
        answer = http.post("/v1/sandboxes", json=BODY | {"image": {"uri": name}})
        assert answer.status_code == 400, (name[:50], answer.text[:200])
        assert answer.json()["code"] == "SANDBOX::INVALID_PARAMETER"
        assert len(answer.text) < 1000


def test_a_huge_environment_is_refused_at_once(http: httpx.Client) -> None:
    env = {f"NAME_{n}": "x" * 100 for n in range(30_000)}
    began = time.monotonic()
    answer = http.post("/v1/sandboxes", json=BODY | {"env": env})
    assert answer.status_code == 400, answer.text[:200]
    assert time.monotonic() - began < 1


def test_damaged_records_cost_their_own_sandboxes_only(make_server) -> None:
    server = make_server("ready_slots = 2")
    with server.client() as client:
        ids = [create(client) for _ in range(3)]
        server.stop(signal.SIGKILL)
        store = sqlite3.connect(server.data_dir / "opensandbox.db")
        store.execute("UPDATE sandboxes SET handle = '{garbage' WHERE id = ?", (ids[0],))
        store.execute("UPDATE sandboxes SET metadata = '5' WHERE id = ?", (ids[1],))
        store.commit()
        store.close()
        server.start()
        assert client.get(f"/v1/sandboxes/{ids[0]}").json()["status"]["state"] == "Failed"
        assert client.get(f"/v1/sandboxes/{ids[1]}").status_code == 404
        assert output(client, ids[2], "echo alive") == "alive\n"
        # Init, daemon and entrypoint of the one that is left; nothing else.
        instance = (server.data_dir / "instance").read_text().strip()
        until(lambda: len(processes(instance)) == 3)
        for sandbox in (ids[0], ids[2]):
            assert client.delete(f"/v1/sandboxes/{sandbox}").status_code == 204


def test_a_fork_storm_ends_with_its_sandbox(make_server) -> None:
    server = make_server("ready_slots = 2")
    with server.client() as client:
        other = create(client)
        instance = (server.data_dir / "instance").read_text().strip()
        before = len(processes(instance))
        storm = create(client, resourceLimits={"pids": "1000"})
        command = "python3 -c 'import os\nwhile 1:\n  try: os.fork()\n  except OSError: pass'"
        client.post(
            f"/v1/sandboxes/{storm}/proxy/44772/command", json={"command": command, "background": True}
        ).raise_for_status()
        until(lambda: len(processes(instance)) > before + 300, 60)
        assert output(client, other, "echo alive") == "alive\n"
        # The storm's own daemon comes before it, and what that starts does not.
        began = time.monotonic()
        assert client.get(f"/v1/sandboxes/{storm}/proxy/44772/ping").status_code == 200
        assert time.monotonic() - began < 5
        assert output(client, other, "nice; awk '{print $19}' /proc/1/stat") == "0\n-20\n"
        assert client.delete(f"/v1/sandboxes/{storm}").status_code == 204
        until(lambda: len(processes(instance)) <= before)
        assert client.delete(f"/v1/sandboxes/{other}").status_code == 204
