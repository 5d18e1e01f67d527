"""Making, finding, labelling, prolonging and ending sandboxes."""

from __future__ import annotations

import json
import signal
import uuid
from datetime import timedelta

from behaviours import behaviour
from behaviours.support import eventually, moment, refused, seconds_from_now


@behaviour(basic=True)
def a_sandbox_is_made_runs_a_command_and_is_killed(client):
    box = client.create()
    assert box.run("echo hello").output == "hello\n"
    box.kill()
    with refused(client, 404, "DOCKER::SANDBOX_NOT_FOUND"):
        client.box(box.id).info()


@behaviour(basic=True)
def what_was_asked_for_is_told(client):
    box = client.create(metadata={"team": "infra"}, entrypoint=["sleep", "1000"], timeout=900)
    info = box.info()
    assert (info["id"], info["state"], info["image"]) == (box.id, "Running", "host")
    assert info["entrypoint"] == ["sleep", "1000"]
    assert info["metadata"] == {"team": "infra"}
    assert 880 < seconds_from_now(info["expires_at"]) <= 900
    assert -20 < seconds_from_now(info["created_at"]) <= 1


@behaviour()
def a_sandbox_lives_ten_minutes_when_nothing_is_said(client):
    assert 580 < seconds_from_now(client.create().info()["expires_at"]) <= 600


@behaviour("create.manual", basic=True)
def manual_cleanup_has_no_expiry(client):
    box = client.create(manual=True)
    assert box.info()["expires_at"] is None
    with refused(client, 409, "DOCKER::INVALID_EXPIRATION"):
        box.renew(60)


@behaviour(basic=True)
def renewal_moves_the_expiry(client, box):
    told = box.renew(1800)
    assert 1780 < seconds_from_now(told) <= 1800
    assert abs(moment(box.info()["expires_at"]) - moment(told)) < timedelta(seconds=1)


@behaviour()
def an_expired_sandbox_is_gone(client, box, http):
    box.renew(1)
    eventually(lambda: http.get(f"/v1/sandboxes/{box.id}").status_code == 404, 5)
    with refused(client, 404, "DOCKER::SANDBOX_NOT_FOUND"):
        box.info()


@behaviour(basic=True)
def lists_are_filtered_by_metadata(client):
    mark = uuid.uuid4().hex
    values = {"plain": "x", "dots": "a.b-c_d", "empty": "", "example.com/role": "db"}
    box = client.create(metadata={"mark": mark, **values})
    client.create(metadata={"mark": mark, "plain": "y"})
    for key, value in values.items():
        found = client.list(metadata={"mark": mark, key: value})
        assert [item["id"] for item in found["items"]] == [box.id], (key, value)
        assert found["items"][0]["metadata"] == {"mark": mark, **values}
    assert client.list(metadata={"mark": mark})["pagination"]["total_items"] == 2
    assert client.list(metadata={"mark": mark, "plain": "z"})["items"] == []


@behaviour(basic=True)
def lists_come_in_pages(client):
    mark = uuid.uuid4().hex
    boxes = {client.create(metadata={"mark": mark}).id for _ in range(5)}
    seen = []
    for page in (1, 2, 3):
        found = client.list(metadata={"mark": mark}, page=page, page_size=2)
        seen += [item["id"] for item in found["items"]]
        assert found["pagination"] == {
            "page": page, "page_size": 2, "total_items": 5, "total_pages": 3, "has_next_page": page < 3,
        }
    assert len(seen) == 5 and set(seen) == boxes
    beyond = client.list(metadata={"mark": mark}, page=4, page_size=2)
    assert beyond["items"] == [] and not beyond["pagination"]["has_next_page"]


@behaviour()
def lists_are_filtered_by_state(client):
    mark = uuid.uuid4().hex
    running = client.create(metadata={"mark": mark}).id
    ended = client.create(metadata={"mark": mark}, entrypoint=["false"], skip_health_check=True).id

    def ids(*states):
        return {item["id"] for item in client.list(states=list(states), metadata={"mark": mark})["items"]}

    eventually(lambda: ids("Failed") == {ended})
    assert ids("Running") == {running}
    assert ids("Running", "Failed") == {running, ended}
    assert ids("Paused") == set()


@behaviour()
def lists_show_what_was_just_done(client):
    mark = uuid.uuid4().hex

    def ids():
        return {item["id"] for item in client.list(metadata={"mark": mark})["items"]}

    for _ in range(5):
        box = client.create(metadata={"mark": mark})
        assert ids() == {box.id}
        box.kill()
        assert ids() == set()


@behaviour("patch_metadata")
def metadata_is_patched(client):
    box = client.create(metadata={"keep": "1", "drop": "2", "change": "3"})
    wanted = {"keep": "1", "change": "4", "new": ""}
    assert box.patch_metadata({"drop": None, "change": "4", "new": "", "never-there": None}) == wanted
    assert box.info()["metadata"] == wanted
    with refused(client, 400, "INVALID_METADATA_LABEL"):
        box.patch_metadata({"opensandbox.io/id": "mine"})
    assert box.info()["metadata"] == wanted


@behaviour(basic=True)
def what_is_not_there_cannot_be_killed(client, box):
    with refused(client, 404, "DOCKER::SANDBOX_NOT_FOUND"):
        client.box(str(uuid.uuid4())).kill()
    box.kill()
    with refused(client, 404, "DOCKER::SANDBOX_NOT_FOUND"):
        box.kill()


@behaviour("close", basic=True, faults={"js": "its close ends the transport for good"})
def kill_works_after_close(client, box, http):
    box.close()
    box.kill()
    assert http.get(f"/v1/sandboxes/{box.id}").status_code == 404


@behaviour()
def an_image_is_pulled_from_a_registry(client, pulling):
    box = client.at(domain=pulling.domain).create(pulling.image)
    assert box.run("cat /etc/greeting").output == "from the image\n"
    assert box.info()["image"] == pulling.image
    box.kill()


@behaviour("connect", basic=True)
def a_running_sandbox_is_connected_to(client, http):
    body = {"image": {"uri": "host"}, "entrypoint": ["sleep", "1000"], "resourceLimits": {}, "timeout": 600}
    id = http.post("/v1/sandboxes", json=body).json()["id"]
    box = client.connect(id)
    assert box.run("echo connected").output == "connected\n"
    box.kill()
    assert http.get(f"/v1/sandboxes/{id}").status_code == 404


@behaviour("connect")
def connecting_to_what_is_not_there_fails(client):
    with refused(client, 404, "DOCKER::SANDBOX_NOT_FOUND"):
        client.connect(str(uuid.uuid4()))


@behaviour()
def extensions_come_back(client):
    extensions = {"opensandbox.extensions.owner": "me", "opensandbox.extensions.note": "x y=z"}
    info = client.create(extensions={**extensions, "access.renew.extend.seconds": "600"}).info()
    assert info["extensions"] == extensions


@behaviour(basic=True)
def the_environment_arrives(client):
    env = {"PLAIN": "1", "SPACES": " a  b ", "EQUALS": "a=b=c", "QUOTES": "'\"$HOME`id`\\", "UNICODE": "ü€🙂", "EMPTY": "", "LINES": "a\nb"}
    box = client.create(env=env)
    script = "import json,os; print(json.dumps({k: os.environ.get(k) for k in %r}))" % list(env)
    box.write("/tmp/show.py", script)
    assert json.loads(box.run("python3 /tmp/show.py").output) == env


@behaviour()
def large_environments_arrive(client):
    env = {f"PART_{n}": str(n) * 10_000 for n in range(8)}
    box = client.create(env=env)
    assert box.run('echo "${#PART_0} ${#PART_7}"').output == "10000 10000\n"


@behaviour()
def an_entrypoint_that_ends_is_told(client):
    failed = client.create(entrypoint=["bash", "-c", "exit 7"], skip_health_check=True)
    info = eventually(lambda: (found := failed.info())["state"] == "Failed" and found)
    assert "7" in info["message"]
    good = client.create(entrypoint=["true"], skip_health_check=True)
    eventually(lambda: good.info()["state"] == "Terminated")


@behaviour()
def limits_are_what_was_asked(client):
    metrics = client.create(resource={"cpu": "500m", "memory": "512Mi"}).metrics()
    assert metrics["memory_total"] == 512
    assert 0 < metrics["cpu_count"] <= 1


@behaviour(basic=True)
def metrics_are_the_sandboxes_own(client, box):
    metrics = box.metrics()
    assert metrics["cpu_count"] == 1 and metrics["memory_total"] == 2048
    assert 0 <= metrics["memory_used"] < 512 and 0 <= metrics["cpu_percent"] <= 100
    assert metrics["timestamp"] > 1_700_000_000_000


@behaviour(basic=True)
def health_is_told(client, box):
    assert box.healthy() is True


@behaviour("create.platform")
def another_platform_is_refused(client):
    with refused(client, 400, "SANDBOX::INVALID_PARAMETER") as caught:
        client.create(platform={"os": "windows", "arch": "amd64"})
    assert "windows" in caught.error.message or "linux" in caught.error.message


@behaviour("diagnostics")
def logs_and_events_are_shown(client):
    box = client.create(entrypoint=["bash", "-c", "echo from the entrypoint; sleep 1000"])
    eventually(lambda: "from the entrypoint" in box.diagnostics("logs", "container"))
    assert box.diagnostics("events", "runtime").strip()
    with refused(client, 400, "DIAGNOSTICS_SCOPE_UNSUPPORTED"):
        box.diagnostics("logs", "kernel")


@behaviour("pause", "snapshot")
def what_is_not_offered_says_so(client, box):
    with refused(client, 501):
        box.pause()
    with refused(client, 501):
        box.snapshot()
    assert box.run("echo still here").output == "still here\n"


@behaviour(basic=True)
def sandboxes_outlive_the_server(client, spare):
    there = client.at(domain=spare.domain)
    mark = uuid.uuid4().hex
    box = there.create(metadata={"mark": mark})
    box.write("/tmp/kept", "kept")
    before = box.info()
    spare.restart(signal.SIGKILL)
    assert box.info() == before
    assert [item["id"] for item in there.list(metadata={"mark": mark})["items"]] == [box.id]
    assert box.read("/tmp/kept") == "kept"
    assert box.run("cat /tmp/kept; echo").output == "kept\n"
    box.kill()


@behaviour("create.secure_access")
def secure_access_works_without_further_care(client, http):
    box = client.create(secure_access=True)
    assert box.run("echo in").output == "in\n"
    endpoint = box.endpoint(44772)
    assert endpoint["headers"]
    assert http.get(f"http://{endpoint['endpoint']}/ping", headers=endpoint["headers"]).status_code == 200
    assert http.get(f"http://{endpoint['endpoint']}/ping").json()["code"] == "MISSING_OR_INVALID_SECURE_ACCESS"


@behaviour(basic=True)
def all_goes_through_the_server_when_asked(client):
    box = client.at(use_server_proxy=True).create()
    box.write("/tmp/p", "x" * 100_000)
    assert box.run("wc -c < /tmp/p").output.strip() == "100000"
    assert box.read("/tmp/p") == "x" * 100_000
    assert box.endpoint(8000)["endpoint"].endswith(f"/sandboxes/{box.id}/proxy/8000")


@behaviour()
def odd_metadata_is_refused_by_its_own_code(client):
    for key, value in (("a b", "c"), ("k", "v v"), ("k", "x" * 64), ("-k", "v")):
        with refused(client, 400, "SANDBOX::INVALID_METADATA_LABEL"):
            client.create(metadata={key: value})


