"""Every behaviour with every official client that can show it, and the table that says so."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

from behaviours import BEHAVIOURS
from clients import CLIENTS, OPTIONAL, Spec
from drivers import Client, Driver
from drivers.cli import CliDriver
from drivers.mcp import McpDriver
from drivers.sdk import SdkDriver

from conftest import API_KEY

KINDS = {"python": SdkDriver, "js": SdkDriver, "cli": CliDriver, "mcp": McpDriver}
#: Options that only our drivers know of, so that no client tells of them.
OURS = frozenset({"error.code", "error.kind", "error.status", "error.retry_after"})
PAIRS = [
    pytest.param(behaviour, spec, id=f"{spec.name}-{behaviour.name}")
    for spec in CLIENTS
    for behaviour in BEHAVIOURS
    if behaviour.gap(spec) is None
]


@pytest.fixture(scope="session")
def driver_of(tmp_path_factory):
    logs = tmp_path_factory.mktemp("clients")
    drivers: dict[str, Driver] = {}

    def get(spec: Spec) -> Driver:
        if spec.name not in drivers:
            drivers[spec.name] = KINDS[spec.kind](spec, logs / f"{spec.name}.log")
        return drivers[spec.name]

    yield get
    for driver in drivers.values():
        driver.close()


@pytest.mark.parametrize(("behaviour", "spec"), PAIRS)
def test_behaviour(behaviour, spec, driver_of, server, http, request):
    client = Client(spec, driver_of(spec), {"domain": server.domain, "api_key": API_KEY}, behaviour.needs)
    wanted = inspect.signature(behaviour.check).parameters
    given = {name: request.getfixturevalue(name) for name in wanted if name not in ("client", "box")}
    if "box" in wanted:
        given["box"] = client.create()
    try:
        behaviour.check(client, **given)
    finally:
        for id in client.created:
            http.delete(f"/v1/sandboxes/{id}")


@pytest.mark.parametrize("spec", CLIENTS, ids=lambda spec: spec.name)
def test_the_client_is_what_the_list_says(spec, driver_of, server):
    driver = driver_of(spec)
    assert driver.version == spec.version
    if spec.kind in ("python", "js"):
        told = {feature for feature in OPTIONAL - OURS if feature not in driver.features}
        assert told == spec.missing - OURS
    else:
        operations = {feature for feature in OPTIONAL if "." not in feature}
        assert operations - driver.features == {feature for feature in spec.missing if "." not in feature}


def test_the_mcp_server_has_the_tools_that_its_driver_calls(driver_of, server):
    spec = next(spec for spec in CLIENTS if spec.kind == "mcp")
    mcp = driver_of(spec).server({"domain": server.domain, "api_key": API_KEY})
    assert mcp.name == "OpenSandbox Sandbox"
    tools = {tool["name"]: set(tool["inputSchema"]["properties"]) for tool in mcp.ask("tools/list", {})["tools"]}
    assert len(tools) == 19
    # What the table says this client lacks would be arguments of these.
    assert tools["command_run"] == {"sandbox_id", "command", "background", "working_directory", "connect_if_missing"}
    assert not {"offset", "limit"} & tools["file_read"]


def test_the_console_script_is_the_same_program(server):
    osb = Path(sys.executable).with_name("osb")
    options = ["--no-color", "--domain", server.domain, "--api-key", API_KEY]
    listed = subprocess.run([osb, *options, "sandbox", "list", "-o", "json"], capture_output=True, text=True, timeout=60)
    assert listed.returncode == 0 and '"pagination"' in listed.stdout
    missing = subprocess.run([osb, *options, "sandbox", "get", "nope"], capture_output=True, text=True, timeout=60)
    assert missing.returncode == 1 and "DOCKER::SANDBOX_NOT_FOUND" in missing.stderr


def test_the_table_is_up_to_date():
    script = Path(__file__).with_name("table.py")
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
