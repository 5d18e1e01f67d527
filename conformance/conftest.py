"""Starts one server for the whole run and hands out connections to it.

The server is the binary named by OSB_BIN (default: dist/osb). Its data directory is made for the run and removed
after it; leftovers of sandboxes are counted by `test_leaks.py`, which runs last.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import httpx
import pytest
from opensandbox import Sandbox, SandboxSync
from opensandbox.config import ConnectionConfig, ConnectionConfigSync

ROOT = Path(__file__).resolve().parent.parent
API_KEY = "conformance-key"
IMAGE = "host"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Server:
    """A running `osb server` and how to reach it."""

    def __init__(self, binary: str, directory: Path, extra: str = "", server_extra: str = "") -> None:
        self.binary = binary
        self.directory = directory
        self.port = free_port()
        self.config = directory / "config.toml"
        self.data_dir = directory / "data"
        self.log_path = directory / "server.log"
        self.process: subprocess.Popen[bytes] | None = None
        self.config.write_text(
            f"""
[server]
host = "127.0.0.1"
port = {self.port}
api_key = "{API_KEY}"
{server_extra}

[runtime]
type = "embedded"

[embedded]
data_dir = "{self.data_dir}"
{extra}
"""
        )

    @property
    def domain(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"http://{self.domain}"

    def start(self) -> None:
        log = self.log_path.open("ab")
        self.process = subprocess.Popen(
            [self.binary, "server", "--config", str(self.config)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        deadline = time.monotonic() + 30
        while True:
            if self.process.poll() is not None:
                raise RuntimeError(f"server ended with {self.process.returncode}:\n{self.log()}")
            try:
                if httpx.get(f"{self.url}/health", timeout=1).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            if time.monotonic() > deadline:
                raise RuntimeError(f"server did not become healthy:\n{self.log()}")
            time.sleep(0.02)

    def stop(self, sig: int = signal.SIGTERM) -> None:
        if self.process is None:
            return
        self.process.send_signal(sig)
        self.process.wait(timeout=30)
        self.process = None

    def restart(self, sig: int = signal.SIGTERM) -> None:
        self.stop(sig)
        self.start()

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")[-4000:]

    def client(self, **kwargs: object) -> httpx.Client:
        return httpx.Client(base_url=self.url, headers={"OPEN-SANDBOX-API-KEY": API_KEY}, timeout=60, **kwargs)


@pytest.fixture(scope="session")
def make_server():
    binary = os.environ.get("OSB_BIN", str(ROOT / "dist" / "osb"))
    made: list[Server] = []

    def make(extra: str = "", server_extra: str = "", start: bool = True) -> Server:
        directory = Path(tempfile.mkdtemp(prefix="osb-conformance-"))
        server = Server(binary, directory, extra, server_extra)
        made.append(server)
        if start:
            server.start()
        return server

    yield make
    for server in made:
        if server.process is not None:
            with server.client() as client:
                for item in client.get("/v1/sandboxes", params={"pageSize": 200}).json()["items"]:
                    client.delete(f"/v1/sandboxes/{item['id']}")
        server.stop()
        subprocess.run([binary, "server", "--config", str(server.config), "--purge"], check=False, capture_output=True)
        shutil.rmtree(server.directory, ignore_errors=True)


@pytest.fixture(scope="session")
def server(make_server) -> Server:
    return make_server()


@pytest.fixture
def config(server: Server) -> ConnectionConfig:
    return ConnectionConfig(domain=server.domain, api_key=API_KEY)


@pytest.fixture
def config_sync(server: Server) -> ConnectionConfigSync:
    return ConnectionConfigSync(domain=server.domain, api_key=API_KEY)


@pytest.fixture
def http(server: Server):
    with server.client() as client:
        yield client


@pytest.fixture
async def sandbox(config: ConnectionConfig):
    made = await Sandbox.create(IMAGE, connection_config=config, timeout=timedelta(minutes=10))
    yield made
    await made.kill()
    await made.close()


@pytest.fixture
def sandbox_sync(config_sync: ConnectionConfigSync):
    made = SandboxSync.create(IMAGE, connection_config=config_sync, timeout=timedelta(minutes=10))
    yield made
    made.kill()
    made.close()
