"""Sandboxes of images from registries: pulled inside the create call, seen while they are on their way."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import tempfile
import threading
import time
from datetime import timedelta
from pathlib import Path

import httpx
import pytest
import registry as registries
from opensandbox import Sandbox, SandboxSync
from opensandbox.config import ConnectionConfig, ConnectionConfigSync
from opensandbox.exceptions import SandboxApiException
from opensandbox.models.sandboxes import SandboxImageAuth, SandboxImageSpec

from conftest import API_KEY

pytestmark = pytest.mark.skipif(bool(registries.missing()), reason=f"not installed: {registries.missing()}")

ACCOUNT = ("puller", "hunter2-secret")
PULL_FAILED = "DOCKER::SANDBOX_IMAGE_PULL_FAILED"


@pytest.fixture(scope="module")
def scratch():
    directory = Path(tempfile.mkdtemp(prefix="osb-registry-"))
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="module")
def public(scratch):
    registry = registries.Registry(scratch / "public")
    yield registry
    registry.stop()


@pytest.fixture(scope="module")
def private(scratch):
    registry = registries.Registry(scratch / "private", ACCOUNT)
    yield registry
    registry.stop()


@pytest.fixture(scope="module")
def line(public):
    line = registries.SlowLine(public)
    yield line
    line.close()


def plain(*hosts: str) -> str:
    return "".join(f'\n[embedded.registries."{host}"]\nplain_http = true\n' for host in hosts)


@pytest.fixture(scope="module")
def puller(make_server, public, private, line):
    return make_server("ready_slots = 8" + plain(public.host, private.host, line.host))


def body(uri: str, **members: object) -> dict:
    image = {"uri": uri, **({"auth": members.pop("auth")} if "auth" in members else {})}
    return {"image": image, "entrypoint": ["tail", "-f", "/dev/null"], "resourceLimits": {}, "timeout": 600, **members}


def auth(password: str = ACCOUNT[1]) -> dict:
    return {"username": ACCOUNT[0], "password": password}


def create(server, request: dict):
    with server.client() as client:
        return client.post("/v1/sandboxes", json=request)


def created(server, request: dict) -> str:
    answer = create(server, request)
    assert answer.status_code == 202, answer.text
    return answer.json()["id"]


def delete(server, sandbox_id: str) -> int:
    with server.client() as client:
        return client.delete(f"/v1/sandboxes/{sandbox_id}").status_code


def run(server, sandbox_id: str, command: str) -> str:
    with server.client() as client:
        path = f"/v1/sandboxes/{sandbox_id}/proxy/44772/command"
        text = client.post(path, json={"command": command}).text
    events = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.strip()]
    return "".join(event.get("text", "") for event in events if event["type"] == "stdout").strip()


def listed(server, tag: str) -> list[dict]:
    with server.client() as client:
        return client.get("/v1/sandboxes", params={"metadata": f"tag={tag}"}).json()["items"]


def until(what: str, holds, seconds: float = 20):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if got := holds():
            return got
        time.sleep(0.02)
    raise AssertionError(f"never: {what}")


class Call(threading.Thread):
    """A create in a thread of its own."""

    def __init__(self, server, request: dict) -> None:
        super().__init__(daemon=True)
        self.server, self.request, self.answer, self.failure = server, request, None, None
        self.start()

    def run(self) -> None:
        try:
            self.answer = create(self.server, self.request)
        except Exception as failure:
            self.failure = failure

    def wait(self):
        self.join(60)
        assert not self.is_alive(), "the create never ended"
        return self.answer


async def test_official_client_runs_an_image_of_a_private_registry(puller, private):
    reference = private.push("team/sdk:1")
    config = ConnectionConfig(domain=puller.domain, api_key=API_KEY)
    image = SandboxImageSpec(reference, auth=SandboxImageAuth(username=ACCOUNT[0], password=ACCOUNT[1]))
    sandbox = await Sandbox.create(image, connection_config=config, timeout=timedelta(minutes=10))
    try:
        assert (await sandbox.commands.run("echo $FROM_IMAGE")).text == "yes"
        info = await sandbox.get_info()
        assert info.image.image == reference and info.image.auth is None
    finally:
        await sandbox.kill()
        await sandbox.close()


def test_official_sync_client_is_told_why_a_pull_failed(puller, private):
    reference = private.push("team/closed:1")
    config = ConnectionConfigSync(domain=puller.domain, api_key=API_KEY)
    image = SandboxImageSpec(reference, auth=SandboxImageAuth(username=ACCOUNT[0], password="wrong-hunter3"))
    with pytest.raises(SandboxApiException) as refused:
        SandboxSync.create(image, connection_config=config)
    assert refused.value.error.code == PULL_FAILED
    assert reference in str(refused.value) and "hunter3" not in str(refused.value)


def test_account_is_used_once_and_kept_nowhere(puller, private):
    reference = private.push("team/secret:1", ballast=100_000)
    for account in ({}, {"auth": auth("wrong-hunter3")}):
        answer = create(puller, body(reference, **account))
        assert (answer.status_code, answer.json()["code"]) == (500, PULL_FAILED), answer.text
        assert "credentials" in answer.json()["message"] and private.host in answer.json()["message"]
        assert "hunter" not in answer.text
    sandbox = created(puller, body(reference, auth=auth()))
    with puller.client() as client:
        for path in ("", "/diagnostics/inspect", "/diagnostics/summary"):
            text = client.get(f"/v1/sandboxes/{sandbox}{path}").text
            assert "hunter2" not in text and ACCOUNT[0] not in text
    assert delete(puller, sandbox) == 204
    # Once it is stored, everybody may use it, whatever account they bring.
    again = created(puller, body(reference, auth=auth("wrong-hunter3")))
    assert delete(puller, again) == 204
    places = [puller.log_path]
    for directory, _, names in os.walk(puller.data_dir):
        places += [Path(directory) / name for name in names if "images/layers" not in directory]
    for path in places:
        try:
            data = path.read_bytes() if path.is_file() else b""
        except FileNotFoundError:
            continue  # of the sandbox that has just been deleted
        assert b"hunter" not in data, path


def test_image_config_counts_for_entrypoint_and_commands(puller, public):
    config = {
        "Env": ["PATH=/bin", "FROM_IMAGE=yes", "BOTH=image"],
        "WorkingDir": "/work/deep",
        "User": "worker",
        "Entrypoint": ["/no/such/entrypoint"],
        "Cmd": ["never"],
        "Volumes": {"/data/deep": {}},
    }
    reference = public.push("config:1", config=config)
    sandbox = created(
        puller,
        body(reference, entrypoint=["sh", "-c", "pwd; id -u; echo $FROM_IMAGE $BOTH; exec sleep 1000"], env={"BOTH": "request"}),
    )
    with puller.client() as client:
        log = until("the entrypoint spoke", lambda: (text := client.get(f"/v1/sandboxes/{sandbox}/diagnostics/logs").text).count("\n") >= 2 and text)
    assert log.split() == ["/work/deep", "1000", "yes", "request"]
    assert run(puller, sandbox, "pwd; id -u; echo $FROM_IMAGE $BOTH").split() == ["/work/deep", "1000", "yes", "request"]
    assert run(puller, sandbox, "ls -d /data/deep") == "/data/deep"
    delete(puller, sandbox)


def test_an_image_with_nothing_but_sh_and_a_user_without_a_name(puller, public):
    config = {"User": "65534", "WorkingDir": "/not/there/yet"}
    sandbox = created(puller, body(public.push("bare:1", config=config)))
    assert run(puller, sandbox, "[ 1 = 1 ] && id -u; pwd").split() == ["65534", "/not/there/yet"]
    assert delete(puller, sandbox) == 204


def test_pending_sandbox_shows_progress_and_then_runs(puller, public, line):
    reference = line.reference(public.push("slow/progress:1", ballast=2 << 20))
    line.allow(1_500_000)
    call = Call(puller, body(reference, metadata={"tag": "progress"}))

    def downloading():
        items = listed(puller, "progress")
        return items if items and "downloading" in items[0]["status"]["message"] else None

    (pending,) = until("it downloads", downloading)
    assert (pending["status"]["state"], pending["status"]["reason"]) == ("Pending", "IMAGE_PULLING")
    assert "layers" in pending["status"]["message"] and reference in pending["status"]["message"]
    with puller.client() as client:
        path = f"/v1/sandboxes/{pending['id']}"
        assert client.patch(f"{path}/metadata", json={"more": "x"}).status_code == 200
        assert "IMAGE_PULLING" in client.get(f"{path}/diagnostics/events").text
        assert client.get(f"{path}/proxy/44772/ping").status_code == 502
    line.allow(100 << 20)
    answer = call.wait()
    assert answer.status_code == 202, answer.text
    assert (answer.json()["id"], answer.json()["createdAt"]) == (pending["id"], pending["createdAt"])
    assert answer.json()["metadata"] == {"tag": "progress", "more": "x"}
    assert run(puller, pending["id"], "wc -c </ballast") == str(2 << 20)
    # What is seen after a restart is what was answered.
    puller.restart(signal.SIGKILL)
    assert listed(puller, "progress")[0]["status"]["state"] == "Running"
    assert delete(puller, pending["id"]) == 204


def test_creates_at_once_share_one_download(puller, public, line):
    name = "slow/shared:1"
    reference = line.reference(public.push(name, ballast=1 << 20))
    line.allow(-line._allowed + 200_000)
    calls = [Call(puller, body(reference, metadata={"tag": "shared"})) for _ in range(3)]
    until("all wait", lambda: len(listed(puller, "shared")) == 3)
    line.allow(100 << 20)
    answers = [call.wait() for call in calls]
    assert [answer.status_code for answer in answers] == [202] * 3, [answer.text for answer in answers]
    blobs = public.blob_downloads(name)
    # A layer that another image brought does not travel at all.
    assert len(blobs) == len(set(blobs)) >= 2, "each blob travels once"
    for answer in answers:
        delete(puller, answer.json()["id"])


def test_deleting_a_pending_sandbox_ends_the_pull(puller, public, line):
    reference = line.reference(public.push("slow/deleted:1", ballast=4 << 20))
    line.allow(-line._allowed + 1_000_000)
    call = Call(puller, body(reference, metadata={"tag": "deleted"}))
    (pending,) = until("it waits", lambda: listed(puller, "deleted"))
    assert delete(puller, pending["id"]) == 204
    assert delete(puller, pending["id"]) == 404
    answer = call.wait()
    assert (answer.status_code, answer.json()["code"]) == (409, "DOCKER::SANDBOX_NOT_RUNNING")
    assert listed(puller, "deleted") == []
    line.allow(100 << 20)
    time.sleep(1)
    sent = line.sent
    time.sleep(1)
    assert line.sent - sent < 100_000 and line.sent < 100 << 20, "nothing is fetched for nobody"
    assert list((puller.data_dir / "images" / "tmp").iterdir()) == []
    # Another create takes up what is there.
    sandbox = created(puller, body(reference))
    assert delete(puller, sandbox) == 204


def test_a_client_that_leaves_finds_the_image_next_time(puller, public, line):
    name = "slow/left:1"
    reference = line.reference(public.push(name, ballast=1 << 20))
    line.allow(-line._allowed + 100_000)
    with puller.client() as client, pytest.raises(httpx.ReadTimeout):
        client.post("/v1/sandboxes", json=body(reference, metadata={"tag": "left"}), timeout=1)
    until("its sandbox is gone", lambda: not listed(puller, "left"))
    line.allow(100 << 20)
    sandbox = created(puller, body(reference))
    blobs = public.blob_downloads(name)
    assert len(blobs) == len(set(blobs)) >= 2
    assert delete(puller, sandbox) == 204


def test_kill_while_pulling_leaves_a_clean_store_and_no_row(make_server, public):
    line = registries.SlowLine(public)
    server = make_server("ready_slots = 4" + plain(line.host))
    reference = line.reference(public.push("slow/killed:1", ballast=4 << 20))
    line.allow(1_500_000)
    call = Call(server, body(reference, metadata={"tag": "killed"}))
    until("it waits", lambda: listed(server, "killed"))
    time.sleep(0.5)
    server.stop(signal.SIGKILL)
    call.wait()
    rows = sqlite3.connect(server.data_dir / "opensandbox.db").execute("SELECT count(*) FROM sandboxes").fetchone()
    assert rows == (0,)
    server.start()
    assert listed(server, "killed") == []
    assert list((server.data_dir / "images" / "tmp").iterdir()) == []
    assert list((server.data_dir / "images" / "layers").iterdir()) == []
    line.release()
    sandbox = created(server, body(reference))
    assert run(server, sandbox, "wc -c </ballast") == str(4 << 20)
    assert delete(server, sandbox) == 204
    line.close()


def test_stopping_does_not_wait_for_a_pull(make_server, public):
    line = registries.SlowLine(public)
    server = make_server("ready_slots = 4" + plain(line.host))
    reference = line.reference(public.push("slow/stopped:1", ballast=4 << 20))
    line.allow(1_000_000)
    call = Call(server, body(reference, metadata={"tag": "stopped"}))
    until("it waits", lambda: listed(server, "stopped"))
    began = time.monotonic()
    server.stop()
    assert time.monotonic() - began < 4
    answer = call.wait()
    assert answer.status_code == 503 and answer.headers["retry-after"], answer.text
    server.start()
    assert listed(server, "stopped") == []
    line.close()


def test_a_stored_layer_does_not_travel_again(make_server, public):
    base, app = public.push("layers/base:1"), public.push("layers/app:1", ballast=100_000)
    server = make_server("ready_slots = 4" + plain(public.host))
    delete(server, created(server, body(base)))
    assert len(public.blob_downloads("layers/base:1")) == 2, "configuration and layer"
    sandbox = created(server, body(app))
    assert run(server, sandbox, "wc -c </ballast; echo $FROM_IMAGE").split() == ["100000", "yes"]
    assert len(public.blob_downloads("layers/app:1")) == 2, "its configuration, and the layer that is new"
    delete(server, sandbox)
    # Not when a registry is asked each time either.
    server.config.write_text(server.config.read_text().replace("ready_slots", 'images = {pull_policy = "Always"}\nready_slots'))
    server.restart(signal.SIGTERM)
    delete(server, created(server, body(app)))
    assert len(public.blob_downloads("layers/app:1")) == 3, "the configuration alone"


def test_a_full_server_pulls_nothing(make_server, public):
    reference = public.push("full:1")
    server = make_server("ready_slots = 2\nmax_sandboxes = 1" + plain(public.host))
    only = created(server, {**body("host"), "entrypoint": ["sleep", "1000"]})
    asked = public.log_path.read_text().count("/v2/full/")
    answer = create(server, body(reference, metadata={"tag": "full"}))
    assert (answer.status_code, answer.json()["code"]) == (429, "SANDBOX::CAPACITY_EXHAUSTED"), answer.text
    assert int(answer.headers["retry-after"]) >= 1
    assert public.log_path.read_text().count("/v2/full/") == asked and listed(server, "full") == []
    assert delete(server, only) == 204
    assert delete(server, created(server, body(reference))) == 204


def test_a_disk_that_fills_up_while_unpacking_is_told_and_cleaned(make_server, public):
    reference = public.push("disk:1", ballast=30 << 20)
    server = make_server('ready_slots = 2\ndisk_reserve = "1Mi"' + plain(public.host), start=False)
    server.data_dir.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=48m", "tmpfs", server.data_dir], check=True)
    try:
        server.start()
        answer = create(server, body(reference))
        assert (answer.status_code, answer.json()["code"]) == (429, "SANDBOX::CAPACITY_EXHAUSTED"), answer.text
        expected = f"image '{reference}' could not be pulled: the server's disk is full; free some space there"
        assert answer.json()["message"] == expected and answer.headers["retry-after"]
        for directory in ("tmp", "layers"):
            assert list((server.data_dir / "images" / directory).iterdir()) == []
        host = created(server, {**body("host"), "entrypoint": ["sleep", "1000"]})
        assert delete(server, host) == 204
    finally:
        server.stop()
        subprocess.run([server.binary, "server", "--config", str(server.config), "--purge"], check=False, capture_output=True)
        subprocess.run(["umount", server.data_dir], check=True)
        server.process = None


def test_the_bound_of_all_images_is_told_without_names(make_server, public):
    server = make_server('ready_slots = 2\nimages = {max_disk = "6Mi"}' + plain(public.host))
    private = created(server, body(public.push("bound/private:1", ballast=2 << 20)))
    other = public.push("bound/other:1", ballast=3 << 20)
    answer = create(server, body(other))
    assert (answer.status_code, answer.json()["code"]) == (429, "SANDBOX::CAPACITY_EXHAUSTED"), answer.text
    assert "6.0 MiB" in answer.json()["message"] and "private" not in answer.text
    assert delete(server, private) == 204
    until("there is room again", lambda: create(server, body(other)).status_code == 202)
    answer = create(server, body(public.push("bound/huge:1", ballast=8 << 20)))
    assert (answer.status_code, answer.json()["code"]) == (500, PULL_FAILED), answer.text
    assert f"more than {6 << 20} bytes" in answer.json()["message"]


def test_answers_of_registries_become_ours(make_server):
    with registries.Refusing() as registry:
        server = make_server("ready_slots = 2" + plain(registry.host))
        for asked, status, code, word in [
            (401, 500, PULL_FAILED, "credentials"),
            (403, 500, PULL_FAILED, "denies access"),
            (404, 500, PULL_FAILED, "not found"),
            (429, 429, PULL_FAILED, "limits the rate"),
            (500, 500, PULL_FAILED, "not available"),
        ]:
            answer = create(server, body(f"{registry.host}/app:{asked}", metadata={"tag": "refused"}))
            assert (answer.status_code, answer.json()["code"]) == (status, code), (asked, answer.text)
            assert word in answer.json()["message"] and registry.host in answer.json()["message"], answer.text
            assert answer.headers.get("retry-after") == ("3600" if asked == 429 else None)
        assert listed(server, "refused") == []


def test_failures_name_their_cause(puller, public):
    public.push("there:1")
    for uri, status, code, word in [
        (f"{public.host}/there:2", 500, PULL_FAILED, "not found"),
        (f"{public.host}/nowhere:1", 500, PULL_FAILED, "not found"),
        (f"{public.host}/there@sha256:{'0' * 64}", 500, PULL_FAILED, "not found"),
        ("127.0.0.1:1/a:1", 500, PULL_FAILED, "not available"),
        ("Not/A Name", 400, "SANDBOX::INVALID_PARAMETER", "invalid image name"),
    ]:
        answer = create(puller, body(uri, metadata={"tag": "failed"}))
        assert (answer.status_code, answer.json()["code"]) == (status, code), (uri, answer.text)
        assert word in answer.json()["message"], answer.text
    assert listed(puller, "failed") == []


def test_an_image_for_another_processor_is_refused(puller, public):
    other = "arm64" if registries.ARCH == "amd64" else "amd64"
    reference = public.push("foreign:1", arch=other)
    answer = create(puller, body(reference))
    assert (answer.status_code, answer.json()["code"]) == (400, "SANDBOX::INVALID_PARAMETER"), answer.text
    assert other in answer.json()["message"]


def test_policies_of_pulling(make_server, public):
    reference = public.push("policy:1")
    always = make_server('ready_slots = 4\n[embedded.images]\npull_policy = "Always"' + plain(public.host))
    for expected in (b"one", b"two"):
        public.push("policy:1", files={"version": expected})
        sandbox = created(always, body(reference))
        assert run(always, sandbox, "cat /version") == expected.decode()
        delete(always, sandbox)
    host = created(always, {**body("host"), "entrypoint": ["sleep", "100"]})
    delete(always, host)

    never = make_server('ready_slots = 4\n[embedded.images]\npull_policy = "Never"' + plain(public.host))
    answer = create(never, body(reference))
    assert (answer.status_code, answer.json()["code"]) == (500, PULL_FAILED)
    assert "pull_policy" in answer.json()["message"]


def test_default_registry_aliases_and_stored_accounts(make_server, private, scratch):
    private.push("short:1")
    private.push("team/aliased:1")
    password = scratch / "password"
    password.write_text(ACCOUNT[1] + "\n")
    server = make_server(
        f'''ready_slots = 4
image_aliases = {{ "nick:*" = "{private.host}/team/aliased:1" }}
[embedded.images]
default_registry = "{private.host}"
[embedded.registries."{private.host}"]
plain_http = true
username = "{ACCOUNT[0]}"
password_file = "{password}"
'''
    )
    for uri in ("short:1", "nick:5"):
        sandbox = created(server, body(uri))
        assert run(server, sandbox, "echo $FROM_IMAGE") == "yes"
        with server.client() as client:
            assert client.get(f"/v1/sandboxes/{sandbox}").json()["image"] == {"uri": uri}
        delete(server, sandbox)


def test_plain_http_is_never_tried_unasked(make_server, private):
    private.push("plain:1")
    server = make_server("ready_slots = 4")
    answer = create(server, body(f"{private.host}/plain:1", auth=auth()))
    assert answer.json()["code"] == PULL_FAILED
    assert "plain_http" in answer.json()["message"], answer.text
