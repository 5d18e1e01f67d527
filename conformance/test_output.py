"""Whatever bytes a program writes, in whatever pieces: through the server and the client they are what was written.

OSB_CASES is the number of programs, OSB_SEED begins the row of them.
"""

from __future__ import annotations

import json
import os
import random

import httpx
import pytest
from opensandbox import SandboxSync
from opensandbox.config import ConnectionConfigSync
from opensandbox.models import WriteEntry
from opensandbox.models.execd import RunCommandOpts

from conftest import API_KEY, IMAGE

EXECD = 44772
TEXTS = (b"\n", b"\r", b"\r\n", b"\n\n", b"\0", b'"\\\x1b[0m', "€\n".encode(), b"\xe2", b"\x82\xac", b"\xf0\x9f", b"\x98\x80", b"\xff\xfe")


def pieces(dice: random.Random) -> list[tuple[bytes, bool, float]]:
    """Bytes, whether they go to standard error, and the rest afterwards."""

    def text() -> bytes:
        match dice.randrange(8):
            case 0:
                return dice.randbytes(dice.randrange(200))
            case 1:
                return bytes([dice.randrange(256)]) * dice.randrange(100_000)
            case 2 | 3:
                return b"words and more "[: dice.randrange(15)]
            case _:
                return dice.choice(TEXTS)

    return [
        (b"".join(text() for _ in range(dice.randrange(1, 5))), dice.random() < 0.4, dice.choice((0, 0, 0, 0.002)))
        for _ in range(dice.randrange(10))
    ]


def lossy(data: bytes) -> str:
    """One replacement for each byte that is no part of a character."""
    text, at = [], 0
    while at < len(data):
        try:
            text.append(data[at:].decode())
            break
        except UnicodeDecodeError as error:
            text += [data[at : at + error.start].decode(), "\ufffd" * (error.end - error.start)]
            at += error.end
    return "".join(text)


def program(sandbox: SandboxSync, case: int, written: list[tuple[bytes, bool, float]]) -> str:
    if written:
        entries = [WriteEntry(path=f"/tmp/output/{case}/{n}", data=data) for n, (data, _, _) in enumerate(written)]
        sandbox.files.write_files(entries)
    lines = []
    for n, (_, error, rest) in enumerate(written):
        lines.append(f"cat /tmp/output/{case}/{n}" + (" >&2" if error else ""))
        if rest:
            lines.append(f"sleep {rest}")
    return "\n".join([*lines, "exit 3"])


def cases() -> list[list[tuple[bytes, bool, float]]]:
    dice = random.Random(int(os.environ.get("OSB_SEED", "1")))
    return [pieces(dice) for _ in range(int(os.environ.get("OSB_CASES", "40")))]


def joined(written: list[tuple[bytes, bool, float]], error: bool | None) -> bytes:
    return b"".join(data for data, to, _ in written if error is None or to == error)


def test_of_commands_by_the_client(sandbox_sync):
    for case, written in enumerate(cases()):
        run = sandbox_sync.commands.run(program(sandbox_sync, case, written))
        assert run.exit_code == 3, case
        assert "".join(line.text for line in run.logs.stdout) == lossy(joined(written, False)), case
        assert "".join(line.text for line in run.logs.stderr) == lossy(joined(written, True)), case


def test_of_sessions_by_the_client(sandbox_sync):
    session = sandbox_sync.commands.create_session()
    for case, written in enumerate(cases()):
        run = sandbox_sync.commands.run_in_session(session, f"({program(sandbox_sync, case, written)})")
        assert run.exit_code == 3, case
        assert "".join(line.text for line in run.logs.stdout) == lossy(joined(written, None)), case
    sandbox_sync.commands.delete_session(session)


def test_of_background_commands_by_the_client_and_byte_for_byte(sandbox_sync):
    endpoint = sandbox_sync.get_endpoint(EXECD)
    with httpx.Client(base_url=f"http://{endpoint.endpoint}", headers=dict(endpoint.headers or {})) as wire:
        for case, written in enumerate(cases()):
            command = program(sandbox_sync, case, written)
            run = sandbox_sync.commands.run(command, opts=RunCommandOpts(background=True))
            cursor, read = 0, b""
            while True:
                running = sandbox_sync.commands.get_command_status(run.id).running
                answer = wire.get(f"/command/{run.id}/logs", params={"cursor": cursor})
                read += answer.content
                cursor = int(answer.headers["EXECD-COMMANDS-TAIL-CURSOR"])
                assert cursor == len(read)
                if not running:
                    break
            assert read == joined(written, None), case


@pytest.fixture(params=["keep", "strip"])
def by_mode(request, server, strip):
    """A sandbox of a server in each mode of line ends."""
    domain = (strip if request.param == "strip" else server).domain
    made = SandboxSync.create(IMAGE, connection_config=ConnectionConfigSync(domain=domain, api_key=API_KEY))
    yield request.param, made
    made.kill()
    made.close()


def test_of_commands_on_the_wire_of_the_server(by_mode):
    mode, sandbox = by_mode
    endpoint = sandbox.get_endpoint(EXECD)
    with httpx.Client(base_url=f"http://{endpoint.endpoint}", headers=dict(endpoint.headers or {}), timeout=60) as wire:
        for case, written in enumerate(cases()):
            answer = wire.post("/command", json={"command": program(sandbox, case, written)})
            events = [json.loads(event) for event in answer.text.split("\n\n") if event]
            assert [event["type"] for event in events].count("error") == 1 and events[-1]["type"] == "error"
            for kind, error in (("stdout", False), ("stderr", True)):
                texts = [event.get("text", "") for event in events if event["type"] == kind]
                expected = lossy(joined(written, error))
                if mode == "keep":
                    assert "".join(texts) == expected, case
                    continue
                lines = expected.replace("\r\n", "\n").replace("\r", "\n").split("\n")
                if not lines[-1]:
                    lines.pop()
                assert texts == [line or "\n" for line in lines], case
