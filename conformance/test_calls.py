"""Every call of the daemon that an official client has is driven by a behaviour with that client."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path

import httpx
import pytest
from behaviours import BEHAVIOURS
from clients import CLIENTS

#: Operations of the daemon's API and what the drivers call them.
CALLS = {
    "GET /ping": "healthy",
    "POST /session": "open_session",
    "POST /session/{id}/run": "run_in_session",
    "DELETE /session/{id}": "delete_session",
    "POST /command": "run",
    "DELETE /command": "interrupt",
    "GET /command/status/{id}": "status",
    "GET /command/{id}/logs": "logs",
    "GET /files/info": "stat",
    "DELETE /files": "delete",
    "POST /files/permissions": "chmod",
    "POST /files/mv": "move",
    "GET /files/search": "search",
    "POST /files/replace": "replace",
    "POST /files/upload": "write",
    "GET /files/download": "read",
    "GET /directories/list": "list_directory",
    "POST /directories": "mkdir",
    "DELETE /directories": "rmdir",
    "GET /metrics": "metrics",
}
#: Operations that no client has a call for, or one alone, and what shows that a test drives them.
ELSEWHERE = {
    "/pty": ("test_pty.py", '"/pty"'),
    "/proxy/{port}": ("test_proxy.py", "/proxy/"),
    "/v1/filesystem/{uid}/{gid}": ("test_files_identity.py", "with_identity"),
}
EXECD = 44772
CURRENT = [spec for spec in CLIENTS if not spec.old]


@pytest.mark.parametrize("spec", CURRENT, ids=lambda spec: spec.name)
@pytest.mark.parametrize("operation", CALLS)
def test_a_behaviour_drives_it(operation, spec):
    call = CALLS[operation]
    if spec.lacks(call):
        pytest.skip(f"{spec.name} has no call for {operation}")
    used = re.compile(rf"\.{call}\(")
    driven = [each.title for each in BEHAVIOURS if each.gap(spec) is None and used.search(inspect.getsource(each.check))]
    assert driven, f"no behaviour drives {operation} with {spec.name}"


@pytest.mark.parametrize("operation", ELSEWHERE)
def test_a_test_of_its_own_drives_it(operation):
    file, words = ELSEWHERE[operation]
    assert words in Path(__file__).with_name(file).read_text()


async def test_metrics_are_watched(sandbox):
    """No client has a call for it."""
    endpoint = await sandbox.get_endpoint(EXECD)
    seen = []
    async with httpx.AsyncClient() as client:
        url = f"http://{endpoint.endpoint}/metrics/watch"
        async with client.stream("GET", url, headers=dict(endpoint.headers or {}), timeout=30) as answer:
            assert answer.status_code == 200
            async for line in answer.aiter_lines():
                seen.append(json.loads(line))
                if len(seen) == 2:
                    break
    assert seen[0]["timestamp"] < seen[1]["timestamp"] and seen[0]["cpu_count"] >= 1
