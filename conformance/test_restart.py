"""The server may come and go; sandboxes stay."""

import signal
import subprocess
import time
from datetime import timedelta

import pytest
from opensandbox import SandboxSync
from opensandbox.config import ConnectionConfigSync
from opensandbox.exceptions import SandboxApiException
from opensandbox.models.execd import RunCommandOpts

from conftest import API_KEY, IMAGE, free_port


@pytest.fixture(scope="module")
def own(make_server):
    return make_server(extra="ready_slots = 4")


def connect(own, **kwargs):
    return ConnectionConfigSync(domain=own.domain, api_key=API_KEY, **kwargs)


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGKILL])
def test_a_sandbox_survives_the_server(own, sig):
    sandbox = SandboxSync.create(IMAGE, connection_config=connect(own), timeout=timedelta(minutes=9), metadata={"s": "1"})
    sandbox.files.write_file("/tmp/kept", "kept")
    run = sandbox.commands.run("sleep 300", opts=RunCommandOpts(background=True))
    before = sandbox.get_info()
    own.restart(sig)
    after = sandbox.get_info()
    assert (after.expires_at, after.metadata, after.status.state, after.created_at) == (
        before.expires_at, before.metadata, "Running", before.created_at,
    )
    assert sandbox.files.read_file("/tmp/kept") == "kept"
    assert sandbox.commands.get_command_status(run.id).running
    sandbox.kill()
    sandbox.close()


def test_expiry_survives_a_restart(own):
    sandbox = SandboxSync.create(IMAGE, connection_config=connect(own))
    sandbox.renew(timedelta(seconds=2))
    own.stop()
    time.sleep(2.5)
    own.start()
    with pytest.raises(SandboxApiException) as gone:
        sandbox.get_info()
    assert gone.value.status_code == 404
    sandbox.close()


def test_an_end_while_the_server_is_away_is_told(own):
    sandbox = SandboxSync.create(
        IMAGE, connection_config=connect(own), entrypoint=["bash", "-c", "sleep 1; exit 5"], skip_health_check=True
    )
    own.stop()
    time.sleep(1.5)
    own.start()
    info = sandbox.get_info()
    assert info.status.state == "Failed" and "5" in info.status.message
    sandbox.kill()
    sandbox.close()


def test_a_second_server_on_the_same_data_directory_is_refused(own):
    other = own.directory / "other.toml"
    other.write_text(own.config.read_text().replace(f"port = {own.port}", f"port = {free_port()}"))
    for config, word in ((other, "is in use by another server"), (own.config, "cannot listen on")):
        second = subprocess.run(
            [own.binary, "server", "--config", str(config)], capture_output=True, text=True, timeout=30, stdin=subprocess.DEVNULL
        )
        assert second.returncode == 1
        assert word in second.stderr
        assert "panicked" not in second.stderr
