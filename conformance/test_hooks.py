"""Hooks of a sandbox's life, with the clients that have them: the Python SDK, and the program's request file."""

import json
import os
import subprocess
import time

import pytest
from opensandbox import Sandbox, SandboxManager, SandboxSync
from opensandbox.exceptions import SandboxApiException
from opensandbox.models.sandboxes import LifecycleHook, PeriodicLifecycleHook, SandboxFilter, SandboxLifecycle

from clients import VENV
from conftest import API_KEY, IMAGE, ROOT

PROGRAMS = {"official": str(VENV / "bin" / "opensandbox"), "ours": os.environ.get("OSB_BIN", str(ROOT / "dist" / "osb"))}


def hook(*words, **more):
    return LifecycleHook(command=list(words), **more)


async def until(what, seconds=20):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := await what():
            return found
    raise AssertionError("it never came")


async def read(sandbox, path):
    run = await sandbox.commands.run(f"cat {path} 2>/dev/null || true")
    return "".join(message.text for message in run.logs.stdout)


async def test_the_first_hook_comes_before_the_entrypoint(config):
    sandbox = await Sandbox.create(
        IMAGE,
        entrypoint=["sh", "-c", "cat /tmp/made > /tmp/seen; exec sleep 300"],
        env={"WORD": "prepared"},
        lifecycle=SandboxLifecycle(pre_start=hook("sh", "-c", "sleep 0.3; echo $WORD > /tmp/made")),
        connection_config=config,
    )
    try:
        async def seen():
            return await read(sandbox, "/tmp/seen")

        assert (await until(seen)).strip() == "prepared"
        assert "LIFECYCLE" not in "".join(m.text for m in (await sandbox.commands.run("env")).logs.stdout)
    finally:
        await sandbox.kill()


async def test_periodic_hooks_run(config):
    hooks = SandboxLifecycle(periodic=[
        PeriodicLifecycleHook(name="tick", schedule="@every 1s", command=["sh", "-c", "echo tick >> /tmp/ticks"]),
        PeriodicLifecycleHook(name="late", schedule="CRON_TZ=UTC 0 0 1 1 *", command=["touch", "/tmp/late"]),
    ])
    sandbox = await Sandbox.create(IMAGE, lifecycle=hooks, connection_config=config)
    try:
        async def ticked():
            return (await read(sandbox, "/tmp/ticks")).count("tick") >= 2

        await until(ticked)
        assert await read(sandbox, "/tmp/late") == ""
    finally:
        await sandbox.kill()


async def test_a_hook_that_fails_leaves_no_sandbox_and_says_why(config):
    for words, seconds, told in (
        (("sh", "-c", "echo the reason >&2; exit 3"), 60, ("exit status 3", "the reason")),
        (("sh", "-c", "echo stuck; sleep 300"), 1, ("1 seconds have passed", "stuck")),
        (("/no/such/program",), 60, ("/no/such/program",)),
    ):
        with pytest.raises(SandboxApiException) as failed:
            await Sandbox.create(
                IMAGE,
                metadata={"hooked": "yes"},
                lifecycle=SandboxLifecycle(pre_start=hook(*words, timeout_seconds=seconds)),
                connection_config=config,
            )
        assert failed.value.status_code == 500
        assert failed.value.error.code == "DOCKER::SANDBOX_START_FAILED"
        assert all(part in str(failed.value) for part in ("preStart hook", *told)), str(failed.value)
    manager = await SandboxManager.create(config)
    found = await manager.list_sandbox_infos(SandboxFilter(metadata={"hooked": "yes"}))
    assert found.sandbox_infos == []
    await manager.close()


async def test_hooks_that_cannot_be_followed_are_refused(config):
    for schedule in ("61 * * * *", "@reboot", "@every 0s", "TZ=../etc 0 0 * * *"):
        hooks = SandboxLifecycle(periodic=[PeriodicLifecycleHook(name="n", schedule=schedule, command=["true"])])
        with pytest.raises(SandboxApiException) as refused:
            await Sandbox.create(IMAGE, lifecycle=hooks, connection_config=config)
        assert refused.value.status_code == 400
        assert refused.value.error.code == "SANDBOX::INVALID_PARAMETER"
        assert "schedule" in str(refused.value)


def test_the_blocking_client_has_them_too(config_sync):
    sandbox = SandboxSync.create(
        IMAGE, lifecycle=SandboxLifecycle(pre_start=hook("touch", "/tmp/made")), connection_config=config_sync
    )
    try:
        assert sandbox.commands.run("ls /tmp/made").exit_code == 0
    finally:
        sandbox.kill()


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_programs_send_them_in_a_request_file(server, config_sync, program, tmp_path):
    request = {
        "image": {"uri": IMAGE}, "entrypoint": ["sleep", "300"], "resourceLimits": {}, "timeout": 120,
        "lifecycle": {"preStart": {"command": ["touch", "/tmp/made"], "timeoutSeconds": 5}},
    }
    (tmp_path / "request.json").write_text(json.dumps(request))
    environment = {
        **os.environ, "HOME": str(tmp_path), "OPEN_SANDBOX_DOMAIN": server.domain, "OPEN_SANDBOX_API_KEY": API_KEY,
        "OPEN_SANDBOX_PROTOCOL": "http",
    }
    called = subprocess.run(
        [PROGRAMS[program], "sandbox", "create", "--file", "request.json", "-o", "json"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60,
    )
    assert called.returncode == 0, called.stderr
    sandbox = SandboxSync.connect(json.loads(called.stdout)["id"], connection_config=config_sync)
    try:
        assert sandbox.commands.run("ls /tmp/made").exit_code == 0
    finally:
        sandbox.kill()


async def test_a_client_that_leaves_takes_its_hook_along(config):
    import asyncio

    create = asyncio.create_task(Sandbox.create(
        IMAGE,
        metadata={"left": "yes"},
        lifecycle=SandboxLifecycle(pre_start=hook("sleep", "4325", timeout_seconds=600)),
        connection_config=config,
    ))

    def sleeps():
        return subprocess.run(["pgrep", "-xf", "sleep 4325"], capture_output=True).returncode == 0

    async def until_sleeping(wanted):
        end = time.monotonic() + 20
        while sleeps() != wanted:
            assert time.monotonic() < end, "the hook was not seen"
            await asyncio.sleep(0.02)

    await until_sleeping(True)
    create.cancel()
    with pytest.raises(BaseException):
        await create
    await until_sleeping(False)
    manager = await SandboxManager.create(config)
    found = await manager.list_sandbox_infos(SandboxFilter(metadata={"left": "yes"}))
    assert found.sandbox_infos == []
    await manager.close()
