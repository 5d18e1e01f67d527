"""Failures, as each client tells them."""

from __future__ import annotations

import re
import time
import uuid

from behaviours import behaviour
from behaviours.support import refused


@behaviour(basic=True)
def an_unknown_sandbox_is_not_found(client):
    with refused(client, 404, "DOCKER::SANDBOX_NOT_FOUND"):
        client.box(str(uuid.uuid4())).info()


@behaviour(basic=True)
def a_wrong_key_is_refused(client):
    with refused(client, 401, "INVALID_API_KEY") as caught:
        client.at(api_key="wrong-key-of-mine").list()
    assert "wrong-key-of-mine" not in caught.error.message


@behaviour()
def a_missing_key_is_asked_for(client):
    with refused(client, 401, "MISSING_API_KEY") as caught:
        client.at(api_key="").list()
    assert "OPEN-SANDBOX-API-KEY" in caught.error.message


@behaviour()
def an_image_that_is_not_there_is_named(client, pulling):
    missing = pulling.image.replace(":1", ":no-such-tag")
    with refused(client, code="DOCKER::SANDBOX_IMAGE_PULL_FAILED") as caught:
        client.at(domain=pulling.domain).create(missing)
    assert client.spec.lacks("error.code") or missing in caught.error.message + caught.error.body


@behaviour(basic=True)
def a_missing_file_is_not_found(client, box):
    with refused(client, 404, "FILE_NOT_FOUND") as caught:
        box.read("/tmp/nowhere/at-all")
    assert "/tmp/nowhere/at-all" in caught.error.message + caught.error.body


@behaviour("connection.headers", basic=True)
def the_callers_request_id_comes_back(client):
    wanted = f"trace-{uuid.uuid4()}"
    with refused(client, 404) as caught:
        client.at(headers={"X-Request-ID": wanted}).box(str(uuid.uuid4())).info()
    assert caught.error.request_id == wanted


@behaviour()
def every_error_has_a_request_id(client):
    with refused(client, 404) as caught:
        client.box(str(uuid.uuid4())).info()
    assert re.fullmatch("[0-9a-f]{32}", caught.error.request_id)


@behaviour()
def a_server_that_is_not_there_is_a_connection_error(client, closed_port):
    kind = "SandboxConnectionException" if client.spec.kind == "python" else "TypeError"
    nowhere = client.at(domain=f"127.0.0.1:{closed_port}")
    began = time.monotonic()
    with refused(client, kind=kind):
        nowhere.list()
    assert time.monotonic() - began < 30


@behaviour()
def a_server_that_never_answers_is_a_timeout(client, silent_port):
    kind = "SandboxTimeoutException" if client.spec.kind == "python" else "Error"
    silent = client.at(domain=f"127.0.0.1:{silent_port}", request_timeout=1)
    began = time.monotonic()
    with refused(client, kind=kind):
        # A POST, which no client repeats by itself.
        silent.create()
    assert 0.9 < time.monotonic() - began < 20


@behaviour()
def a_sandbox_that_is_not_ready_in_time_is_removed(client, never_ready):
    there = client.at(domain=never_ready.domain, use_server_proxy=True)
    with refused(client, kind="SandboxReadyTimeoutException"):
        there.create(ready_timeout=1)
    assert never_ready.created and not never_ready.alive()


@behaviour()
def a_full_server_says_when_to_come_back(client, tight):
    kind = "SandboxRateLimitException" if client.spec.kind == "python" else "SandboxApiException"
    there = client.at(domain=tight.domain)
    first = there.create()
    with refused(client, 429, "SANDBOX::CAPACITY_EXHAUSTED", kind=kind) as caught:
        there.create()
    if not client.spec.lacks("error.retry_after"):
        assert caught.error.retry_after >= 1
    first.kill()
    there.create().kill()


@behaviour()
def errors_never_show_secrets(client):
    secret = "hunter2-very-secret"
    with refused(client) as caught:
        client.create(env={"PASSWORD": secret}, metadata={"bad key": "x"})
    assert secret not in caught.error.message


@behaviour()
def an_impossible_entrypoint_is_named(client):
    with refused(client) as caught:
        client.create(entrypoint=["/no/such/program"])
    assert "/no/such/program" in caught.error.message
