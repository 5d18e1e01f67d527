"""Starts one server for the whole run and hands out connections to it.

The server is the binary named by OSB_BIN (default: dist/osb). Its data directory is made for the run and removed
after it; leftovers of sandboxes are counted by `test_zz_leaks.py`, which runs last. Servers with other settings, and
what only looks like a server, are made when a test first asks for them.
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

pytest.register_assert_rewrite("behaviours")

import registry as registries  # noqa: E402
from front import NeverReady  # noqa: E402

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
        # Plain HTTP needs no certificates, whose loading takes longer than most tests.
        headers = {"OPEN-SANDBOX-API-KEY": API_KEY}
        return httpx.Client(base_url=self.url, headers=headers, timeout=60, verify=False, **kwargs)


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


@pytest.fixture(scope="session")
def spare(make_server) -> Server:
    """A server that tests may restart."""
    return make_server(extra="ready_slots = 4")


@pytest.fixture(scope="session")
def strip(make_server) -> Server:
    """A server that leaves line ends out, as older ones did."""
    return make_server(extra='ready_slots = 4\n[execd]\nline_endings = "strip"')


@pytest.fixture(scope="session")
def tight(make_server) -> Server:
    """A server with room for one sandbox."""
    return make_server(extra="ready_slots = 2\nmax_sandboxes = 1")


@pytest.fixture(scope="session")
def pulling(make_server, tmp_path_factory) -> Server:
    """A server beside a registry that holds its `image`."""
    if missing := registries.missing():
        pytest.skip(f"not installed: {missing}")
    registry = registries.Registry(tmp_path_factory.mktemp("registry"))
    server = make_server(f'ready_slots = 4\n[embedded.registries."{registry.host}"]\nplain_http = true')
    server.image = registry.push("greeting:1", files={"etc/greeting": b"from the image\n"})
    yield server
    registry.stop()


@pytest.fixture
def never_ready(server: Server):
    """The server behind a front that never lets a daemon's ping through."""
    with NeverReady(server.port, API_KEY) as front:
        yield front


@pytest.fixture
def closed_port() -> int:
    return free_port()


@pytest.fixture
def silent_port():
    """A port whose connections are accepted and never answered."""
    with socket.create_server(("127.0.0.1", 0), backlog=100) as listener:
        yield listener.getsockname()[1]


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
