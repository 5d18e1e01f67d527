"""The synchronous client: one test a call, since the asynchronous tests go deeper."""

from datetime import timedelta

import pytest
from opensandbox import SandboxManagerSync, SandboxSync
from opensandbox.exceptions import SandboxApiException
from opensandbox.models import SearchEntry, WriteEntry
from opensandbox.models.execd import RunCommandOpts
from opensandbox.models.execd_sync import ExecutionHandlersSync
from opensandbox.models.sandboxes import SandboxFilter

from conftest import IMAGE


def test_create_run_and_kill(config_sync):
    sandbox = SandboxSync.create(IMAGE, connection_config=config_sync, metadata={"kind": "sync"})
    with sandbox:
        run = sandbox.commands.run("echo hi; exit 4")
        assert run.text.startswith("hi") and run.exit_code == 4
    sandbox.kill()
    with pytest.raises(SandboxApiException) as gone:
        sandbox.get_info()
    assert gone.value.status_code == 404


def test_manager_lists_labels_renews_and_kills(config_sync):
    sandbox = SandboxSync.create(IMAGE, connection_config=config_sync, metadata={"kind": "sync-manager"})
    with SandboxManagerSync.create(config_sync) as manager:
        page = manager.list_sandbox_infos(SandboxFilter(metadata={"kind": "sync-manager"}, states=["Running"]))
        assert [info.id for info in page.sandbox_infos] == [sandbox.id]
        assert manager.patch_sandbox_metadata(sandbox.id, {"kind": None, "n": "1"}).metadata == {"n": "1"}
        manager.renew_sandbox(sandbox.id, timedelta(minutes=30))
        manager.kill_sandbox(sandbox.id)
        with pytest.raises(SandboxApiException):
            manager.get_sandbox_info(sandbox.id)
    sandbox.close()


def test_files(sandbox_sync):
    sandbox_sync.files.write_files([WriteEntry(path="/tmp/x/a", data=b"\x00\x01"), WriteEntry(path="/tmp/x/b", data="é")])
    assert sandbox_sync.files.read_bytes("/tmp/x/a") == b"\x00\x01"
    assert sandbox_sync.files.read_file("/tmp/x/b") == "é"
    assert len(sandbox_sync.files.search(SearchEntry(path="/tmp/x", pattern="*"))) == 2
    assert b"".join(sandbox_sync.files.read_bytes_stream("/tmp/x/a")) == b"\x00\x01"


def test_handlers_and_background(sandbox_sync):
    lines = []
    handlers = ExecutionHandlersSync(on_stdout=lambda message: lines.append(message.text))
    sandbox_sync.commands.run("echo a; echo b", handlers=handlers)
    assert lines == ["a\n", "b\n"]
    run = sandbox_sync.commands.run("echo later", opts=RunCommandOpts(background=True))
    for _ in range(100):
        if not sandbox_sync.commands.get_command_status(run.id).running:
            break
    assert sandbox_sync.commands.get_background_command_logs(run.id).content == "later\n"


def test_metrics_and_health(sandbox_sync):
    assert sandbox_sync.is_healthy()
    assert sandbox_sync.get_metrics().cpu_count == 1


def test_through_the_server_proxy_by_option(server):
    from opensandbox.config import ConnectionConfigSync

    from conftest import API_KEY

    config = ConnectionConfigSync(domain=server.domain, api_key=API_KEY, use_server_proxy=True)
    sandbox = SandboxSync.create(IMAGE, connection_config=config)
    try:
        sandbox.files.write_file("/tmp/p", "x" * 100_000)
        assert sandbox.commands.run("wc -c < /tmp/p").text.strip() == "100000"
    finally:
        sandbox.kill()
        sandbox.close()


def test_an_endpoint_has_no_scheme_and_answers(sandbox_sync):
    import httpx

    endpoint = sandbox_sync.get_endpoint(44772)
    assert "://" not in endpoint.endpoint and not endpoint.endpoint.endswith("/")
    assert httpx.get(f"http://{endpoint.endpoint}/ping").status_code == 200
