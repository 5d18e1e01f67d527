"""Create, get, list, renew, label and kill, with the asynchronous client."""

import asyncio
import resource
import uuid
from datetime import datetime, timedelta, timezone

import pytest
from opensandbox import Sandbox, SandboxManager
from opensandbox.config import ConnectionConfig
from opensandbox.exceptions import SandboxApiException, SandboxException
from opensandbox.models import PlatformSpec
from opensandbox.models.sandboxes import SandboxFilter

from conftest import API_KEY, IMAGE


async def make(config, **kwargs):
    return await Sandbox.create(IMAGE, connection_config=config, **kwargs)


async def test_create_gives_a_running_sandbox(config):
    sandbox = await make(config, timeout=timedelta(minutes=5), metadata={"team": "x"}, env={"A": "1"})
    try:
        uuid.UUID(sandbox.id, version=4)
        info = await sandbox.get_info()
        assert info.id == sandbox.id
        assert info.status.state == "Running"
        assert info.status.reason == "CONTAINER_RUNNING"
        assert info.entrypoint == ["tail", "-f", "/dev/null"]
        assert info.metadata == {"team": "x"}
        assert info.image.image == IMAGE
        left = info.expires_at - datetime.now(timezone.utc)
        assert timedelta(minutes=4) < left <= timedelta(minutes=5)
        assert info.expires_at - info.created_at == timedelta(minutes=5)
    finally:
        await sandbox.kill()


async def test_kill_is_final_and_a_second_kill_is_not_found(config):
    sandbox = await make(config)
    await sandbox.kill()
    with pytest.raises(SandboxApiException) as gone:
        await sandbox.get_info()
    assert gone.value.status_code == 404
    assert gone.value.error.code == "DOCKER::SANDBOX_NOT_FOUND"
    with pytest.raises(SandboxApiException) as twice:
        await sandbox.kill()
    assert twice.value.status_code == 404


async def test_kill_after_the_client_was_closed(config):
    sandbox = await make(config)
    async with sandbox:
        await sandbox.commands.run("true")
    await sandbox.kill()
    manager = await SandboxManager.create(config)
    with pytest.raises(SandboxApiException):
        await manager.get_sandbox_info(sandbox.id)
    await manager.close()


async def test_wrong_key_is_401(server):
    bad = ConnectionConfig(domain=server.domain, api_key="wrong")
    with pytest.raises(SandboxApiException) as refused:
        await make(bad)
    assert refused.value.status_code == 401
    assert refused.value.error.code == "INVALID_API_KEY"


async def test_missing_key_is_401(server, monkeypatch):
    monkeypatch.delenv("OPEN_SANDBOX_API_KEY", raising=False)
    with pytest.raises(SandboxApiException) as refused:
        await make(ConnectionConfig(domain=server.domain))
    assert refused.value.status_code == 401
    assert refused.value.error.code == "MISSING_API_KEY"


async def test_unknown_ids_are_404_with_the_request_id(server):
    config = ConnectionConfig(domain=server.domain, api_key=API_KEY, headers={"X-Request-ID": "trace-77"})
    manager = await SandboxManager.create(config)
    for unknown in (str(uuid.uuid4()), "no-such-id"):
        with pytest.raises(SandboxApiException) as gone:
            await manager.get_sandbox_info(unknown)
        assert gone.value.status_code == 404
        assert gone.value.request_id == "trace-77"
        with pytest.raises(SandboxApiException):
            await manager.kill_sandbox(unknown)
        with pytest.raises(SandboxApiException):
            await manager.renew_sandbox(unknown, timedelta(minutes=5))
    await manager.close()


async def test_without_timeout_there_is_no_expiry(config):
    sandbox = await make(config, timeout=None)
    try:
        assert (await sandbox.get_info()).expires_at is None
        with pytest.raises(SandboxApiException) as refused:
            await sandbox.renew(timedelta(minutes=5))
        assert refused.value.status_code == 409
        assert refused.value.error.code == "DOCKER::INVALID_EXPIRATION"
    finally:
        await sandbox.kill()


async def test_renew_extends_and_shortens(sandbox):
    for minutes in (60, 2):
        answer = await sandbox.renew(timedelta(minutes=minutes))
        left = answer.expires_at - datetime.now(timezone.utc)
        assert abs(left - timedelta(minutes=minutes)) < timedelta(seconds=10)
        assert (await sandbox.get_info()).expires_at == answer.expires_at


async def test_patch_metadata_adds_replaces_and_removes(config):
    sandbox = await make(config, metadata={"a": "1", "b": "2"})
    try:
        info = await sandbox.patch_metadata({"a": "9", "b": None, "c": "3", "absent": None})
        assert info.metadata == {"a": "9", "c": "3"}
        assert (await sandbox.get_info()).metadata == {"a": "9", "c": "3"}
        assert (await sandbox.patch_metadata({})).metadata == {"a": "9", "c": "3"}
        for bad in ({"opensandbox.io/x": "1"}, {"bad key": "1"}, {"k": "bad value"}):
            with pytest.raises(SandboxApiException) as refused:
                await sandbox.patch_metadata(bad)
            assert refused.value.status_code == 400
    finally:
        await sandbox.kill()


async def test_parallel_patches_lose_nothing(sandbox):
    await asyncio.gather(*(sandbox.patch_metadata({f"k{n}": str(n)}) for n in range(30)))
    metadata = (await sandbox.get_info()).metadata
    assert {k: v for k, v in metadata.items() if k.startswith("k")} == {f"k{n}": str(n) for n in range(30)}


async def test_list_filters_by_state_and_metadata(config):
    tag = uuid.uuid4().hex
    first = await make(config, metadata={"run": tag, "n": "1"})
    second = await make(config, metadata={"run": tag, "n": "2"})
    manager = await SandboxManager.create(config)
    try:
        both = await manager.list_sandbox_infos(SandboxFilter(metadata={"run": tag}))
        assert [info.id for info in both.sandbox_infos] == [second.id, first.id], "newest first"
        assert both.pagination.total_items == 2 and not both.pagination.has_next_page
        one = await manager.list_sandbox_infos(SandboxFilter(metadata={"run": tag, "n": "1"}, states=["running"]))
        assert [info.id for info in one.sandbox_infos] == [first.id]
        none = await manager.list_sandbox_infos(SandboxFilter(metadata={"run": tag}, states=["Paused", "nonsense"]))
        assert none.sandbox_infos == [] and none.pagination.total_pages == 0
    finally:
        await first.kill()
        await second.kill()
        await manager.close()


async def test_list_pages(config):
    tag = uuid.uuid4().hex
    made = await asyncio.gather(*(make(config, metadata={"run": tag}) for _ in range(5)))
    manager = await SandboxManager.create(config)
    try:
        seen = []
        for page in (1, 2, 3):
            got = await manager.list_sandbox_infos(SandboxFilter(metadata={"run": tag}, page=page, page_size=2))
            assert got.pagination.total_items == 5 and got.pagination.total_pages == 3
            assert got.pagination.has_next_page == (page < 3)
            seen += [info.id for info in got.sandbox_infos]
        assert sorted(seen) == sorted(sandbox.id for sandbox in made)
        beyond = await manager.list_sandbox_infos(SandboxFilter(metadata={"run": tag}, page=9, page_size=2))
        assert beyond.sandbox_infos == [] and beyond.pagination.total_items == 5
    finally:
        await asyncio.gather(*(sandbox.kill() for sandbox in made))
        await manager.close()


async def test_connect_to_a_running_sandbox_keeps_its_expiry(config, sandbox):
    before = (await sandbox.get_info()).expires_at
    again = await Sandbox.connect(sandbox.id, connection_config=config)
    assert (await again.commands.run("echo same")).text == "same"
    assert (await again.get_info()).expires_at == before
    await again.close()


async def test_unknown_image_leaves_nothing(config):
    tag = uuid.uuid4().hex
    with pytest.raises(SandboxApiException) as refused:
        await Sandbox.create("no-such-image:v9", connection_config=config, metadata={"run": tag})
    assert refused.value.error.code == "DOCKER::SANDBOX_IMAGE_PULL_FAILED"
    assert "no-such-image" in str(refused.value)
    manager = await SandboxManager.create(config)
    assert (await manager.list_sandbox_infos(SandboxFilter(metadata={"run": tag}))).sandbox_infos == []
    await manager.close()


async def test_entrypoint_that_does_not_exist_is_refused_by_name(config):
    with pytest.raises(SandboxApiException) as refused:
        await make(config, entrypoint=["/no/such/program", "x"])
    assert refused.value.status_code == 400
    assert refused.value.error.code == "SANDBOX::INVALID_PARAMETER"
    assert "/no/such/program" in str(refused.value)


async def test_entrypoint_argv_is_kept(config):
    sandbox = await make(config, entrypoint=["bash", "-c", "echo a && echo 'b c' > /tmp/o && sleep infinity"])
    try:
        for _ in range(100):
            seen = await sandbox.commands.run("cat /tmp/o 2>/dev/null")
            if seen.text:
                break
            await asyncio.sleep(0.05)
        assert seen.text == "b c"
    finally:
        await sandbox.kill()


@pytest.mark.parametrize(
    ("script", "state", "code"), [("exit 0", "Terminated", "0"), ("exit 7", "Failed", "7"), ("kill -9 $$", "Failed", "137")]
)
async def test_an_ended_entrypoint_is_terminal_with_reason_and_code(config, script, state, code):
    sandbox = await make(config, entrypoint=["bash", "-c", f"sleep 0.3; {script}"], skip_health_check=True)
    try:
        for _ in range(100):
            info = await sandbox.get_info()
            if info.status.state != "Running":
                break
            await asyncio.sleep(0.05)
        assert info.status.state == state
        assert code in info.status.message
        assert info.status.reason in ("CONTAINER_EXITED", "CONTAINER_EXITED_ERROR")
    finally:
        await sandbox.kill()


async def test_expiry_removes_the_sandbox(server, config):
    sandbox = await make(config, timeout=timedelta(minutes=10))
    async with sandbox:
        await sandbox.renew(timedelta(seconds=1))
        await asyncio.sleep(1.5)
        with pytest.raises(SandboxApiException) as gone:
            await sandbox.get_info()
        assert gone.value.status_code == 404


async def test_platform_of_the_host_is_accepted_and_another_refused(config):
    import platform

    arch = {"x86_64": "amd64", "aarch64": "arm64"}[platform.machine()]
    other = {"amd64": "arm64", "arm64": "amd64"}[arch]
    sandbox = await make(config, platform=PlatformSpec(os="linux", arch=arch))
    try:
        assert (await sandbox.get_info()).platform.arch == arch
    finally:
        await sandbox.kill()
    with pytest.raises(SandboxApiException) as refused:
        await make(config, platform=PlatformSpec(os="linux", arch=other))
    assert refused.value.status_code == 400


async def test_extensions_round_trip(config):
    extensions = {"opensandbox.extensions.owner": "me", "access.renew.extend.seconds": "600"}
    sandbox = await make(config, extensions=extensions)
    try:
        info = await sandbox.get_info()
        assert info.extensions["opensandbox.extensions.owner"] == "me"
    finally:
        await sandbox.kill()


async def test_what_is_not_offered_says_so(sandbox):
    for call in (sandbox.pause(), sandbox.create_snapshot("s")):
        with pytest.raises(SandboxException) as refused:
            await call
        assert refused.value.error.code


async def test_a_hundred_at_once(config):
    async def one(n: int) -> str:
        sandbox = await make(config, metadata={"n": str(n)})
        try:
            return (await sandbox.commands.run(f"echo {n}")).text
        finally:
            await sandbox.kill()

    assert await asyncio.gather(*(one(n) for n in range(100))) == [str(n) for n in range(100)]


async def test_environment_and_defaults_inside(config):
    sandbox = await make(config, env={"GREETING": "hello world", "EMPTY": ""})
    try:
        run = sandbox.commands.run
        assert (await run('echo "$GREETING|${EMPTY-unset}|$OPENSANDBOX_ID|$LANG"')).text == (
            f"hello world||{sandbox.id}|C.UTF-8"
        )
        assert (await run("hostname")).text == sandbox.id[:8]
        assert (await run("getent hosts localhost | head -1")).text
        assert (await run("umask")).text.endswith("022")
        # As many as wished, where the server itself may have them.
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        files = 65536 if most == resource.RLIM_INFINITY else min(65536, most)
        assert (await run("ulimit -n; ulimit -c")).text == f"{files}\n0"
        assert (await run("echo $HOME; pwd")).text.splitlines()[0] == "/root"
        assert (await run("stat -c %a /tmp")).text == "1777"
        assert (await run("test -w /dev/null && test -c /dev/urandom && test -d /dev/shm && test -e /dev/pts/ptmx && echo ok")).text == "ok"
    finally:
        await sandbox.kill()


async def test_set_env_persists_for_later_commands(sandbox):
    for value in ("plain", "$HOME stays", "it's \"here\"\n\ttoo", ""):
        await sandbox.commands.set_env("LATER", value)
        assert (await sandbox.commands.run('printf %s "[$LATER]"')).text == f"[{value}]"


async def test_secure_access_asks_for_the_endpoints_token(config):
    import httpx

    sandbox = await make(config, secure_access=True)
    try:
        assert (await sandbox.commands.run("echo in")).text == "in"
        endpoint = await sandbox.get_endpoint(44772)
        async with httpx.AsyncClient() as client:
            url = f"http://{endpoint.endpoint}/ping"
            assert (await client.get(url, headers=endpoint.headers)).status_code == 200
            refused = await client.get(url)
            assert refused.status_code == 401
            assert refused.json()["code"] == "MISSING_OR_INVALID_SECURE_ACCESS"
    finally:
        await sandbox.kill()
