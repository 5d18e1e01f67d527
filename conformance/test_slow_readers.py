"""A client that reads slowly costs neither the server nor the daemon memory."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path

import pytest

from conftest import API_KEY
from test_faults import create, processes

MIB = 1 << 20
PRINTED = 200 * MIB
#: What a process may grow by while the output waits.
ALLOWED = 48 * MIB
PRINT = f"head -c {PRINTED} /dev/zero | tr '\\0' Z | fold -w 1000"


def resident(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) << 10
    return 0


def daemons(instance: str) -> list[int]:
    """Host process ids of the daemons of an instance's sandboxes."""
    return [pid for pid in processes(instance) if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"execd\0")]


class Memory:
    """Samples the memory of processes while its block runs."""

    def __init__(self, *pids: int) -> None:
        self._first = {pid: resident(pid) for pid in pids}
        self._most = dict(self._first)
        self._end = threading.Event()

    def _watch(self) -> None:
        while not self._end.wait(0.05):
            for pid in self._first:
                self._most[pid] = max(self._most[pid], resident(pid))

    def __enter__(self) -> Memory:
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def growth(self) -> dict[int, int]:
        return {pid: self._most[pid] - first for pid, first in self._first.items()}


def post_command(port: int, sandbox: str, command: str) -> socket.socket:
    """Sends a command and leaves its answer to be read."""
    body = b'{"command":"%s"}' % command.encode().replace(b"\\", b"\\\\").replace(b'"', b'\\"')
    reader = socket.create_connection(("127.0.0.1", port))
    reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
    reader.sendall(
        f"POST /v1/sandboxes/{sandbox}/proxy/44772/command HTTP/1.1\r\nHost: x\r\nOPEN-SANDBOX-API-KEY: {API_KEY}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
    )
    return reader


@pytest.fixture(scope="module")
def own(make_server):
    return make_server(extra="ready_slots = 2")


@pytest.fixture
def box(own):
    with own.client() as client:
        id = create(client)
        client.post(f"/v1/sandboxes/{id}/proxy/44772/command", json={"command": "true"})
        yield id
        client.delete(f"/v1/sandboxes/{id}")


def pids(own) -> list[int]:
    found = daemons((own.data_dir / "instance").read_text().strip())
    assert found
    return [own.process.pid, *found]


def test_output_waits_for_its_reader_outside_of_memory(own, box):
    reader = post_command(own.port, box, PRINT)
    with Memory(*pids(own)) as memory:
        for _ in range(30):
            assert reader.recv(16 << 10)
            time.sleep(0.1)
    assert all(grown < ALLOWED for grown in memory.growth().values()), memory.growth()
    # It is still the program that waits, not the output that was thrown away.
    reader.settimeout(60)
    got = 0
    while got < 20 * MIB:
        got += len(reader.recv(1 << 20))
    reader.close()


def test_whoever_leaves_in_the_middle_leaves_nothing_running(own, box):
    reader = post_command(own.port, box, PRINT)
    assert reader.recv(16 << 10)
    reader.close()
    with own.client() as client:
        path = f"/v1/sandboxes/{box}/proxy/44772/command"
        deadline = time.monotonic() + 10
        while True:
            answer = client.post(path, json={"command": "ps -eo comm | grep -c -x -e head -e tr -e fold"})
            if '"text":"0\\n"' in answer.text:
                break
            assert time.monotonic() < deadline, answer.text
            time.sleep(0.1)


def test_all_of_a_large_output_arrives_and_costs_no_memory(own, box):
    reader = post_command(own.port, box, PRINT.replace(str(PRINTED), str(64 * MIB)))
    reader.settimeout(120)
    seen, tail = 0, b""
    with Memory(*pids(own)) as memory:
        while b"execution_complete" not in tail:
            part = reader.recv(1 << 20)
            assert part
            seen += part.count(b"Z")
            tail = (tail + part)[-200:]
    reader.close()
    assert seen == 64 * MIB
    assert all(grown < ALLOWED for grown in memory.growth().values()), memory.growth()


def test_a_background_commands_log_costs_no_memory(own, box):
    with own.client() as client, Memory(*pids(own)) as memory:
        path = f"/v1/sandboxes/{box}/proxy/44772"
        client.post(f"{path}/command", json={"command": PRINT, "background": True})
        time.sleep(3)
        with client.stream("GET", f"{path}/command/{'0' * 32}/logs") as unknown:
            assert unknown.status_code == 400
    assert all(grown < ALLOWED for grown in memory.growth().values()), memory.growth()


def test_a_slow_download_costs_no_memory(own, box):
    with own.client() as client:
        client.post(
            f"/v1/sandboxes/{box}/proxy/44772/command", json={"command": f"truncate -s {PRINTED} /tmp/large"}
        )
    reader = socket.create_connection(("127.0.0.1", own.port))
    reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
    reader.sendall(
        f"GET /v1/sandboxes/{box}/proxy/44772/files/download?path=/tmp/large HTTP/1.1\r\nHost: x\r\n"
        f"OPEN-SANDBOX-API-KEY: {API_KEY}\r\n\r\n".encode()
    )
    with Memory(*pids(own)) as memory:
        for _ in range(20):
            assert reader.recv(16 << 10)
            time.sleep(0.1)
    reader.close()
    assert all(grown < ALLOWED for grown in memory.growth().values()), memory.growth()


def test_a_writer_that_stops_half_way_costs_no_memory(own, box):
    boundary = "b" * 20
    head = (
        f'--{boundary}\r\nContent-Disposition: form-data; name="metadata"; filename="m"\r\n\r\n{{"path":"/tmp/half"}}\r\n'
        f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n'
    ).encode()
    writer = socket.create_connection(("127.0.0.1", own.port))
    with Memory(*pids(own)) as memory:
        writer.sendall(
            f"POST /v1/sandboxes/{box}/proxy/44772/files/upload HTTP/1.1\r\nHost: x\r\nOPEN-SANDBOX-API-KEY: {API_KEY}\r\n"
            f"Content-Type: multipart/form-data; boundary={boundary}\r\nContent-Length: {PRINTED}\r\n\r\n".encode() + head
        )
        for _ in range(100):
            writer.sendall(b"x" * MIB)
    writer.close()
    assert all(grown < ALLOWED for grown in memory.growth().values()), memory.growth()
    with own.client() as client:
        gone = client.get(f"/v1/sandboxes/{box}/proxy/44772/files/info", params={"path": "/tmp/half"})
        assert gone.status_code == 404
