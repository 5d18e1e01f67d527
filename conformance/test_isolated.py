"""Isolated sessions through the asynchronous, the synchronous and the JavaScript client."""

import asyncio
import json
import os
import subprocess
import uuid
from pathlib import Path

import pytest
from conftest import API_KEY
from opensandbox.exceptions import SandboxApiException
from opensandbox.models.execd import ExecutionHandlers
from opensandbox.models.filesystem import DirectoryListEntry, MoveEntry, SearchEntry, WriteEntry
from opensandbox.models.isolated import (
    BindMount,
    CreateIsolatedSessionRequest,
    EnvPassthroughSpec,
    IsolatedOverlaySpec,
    IsolatedRunOpts,
    IsolatedWorkspaceSpec,
)


async def command(sandbox, text):
    run = await sandbox.commands.run(text)
    assert run.exit_code == 0, run.text
    return run.text.strip()


def asks(path="/workspace", mode=None, **more):
    return CreateIsolatedSessionRequest(workspace=IsolatedWorkspaceSpec(path=path, mode=mode), **more)


async def test_what_the_sandbox_can_do(sandbox):
    can = await sandbox.isolation.capabilities()
    assert can.available and can.setpriv_available and can.userns_available, can
    assert not can.commit_supported and not can.diff_supported and can.message is None, can
    assert can.hardening.init_mode == "pid1" and can.hardening.seccomp.state == "active"


async def test_changes_of_an_overlay_are_the_sessions_own(sandbox):
    await command(sandbox, "mkdir -p /workspace && echo lower >/workspace/f && echo gone >/workspace/g")
    session = await sandbox.isolation.create(asks(idle_timeout_seconds=900))
    assert uuid.UUID(session.session_id)
    run = await session.run("pwd; cat f; echo upper >f; rm g; touch new; ls; touch /etc/x")
    assert run.exit_code == 1 and run.id is None
    assert run.text.startswith("/workspace\nlower\nf\nnew\n") and "Read-only" in run.text, run.text
    assert run.error.name == "ExitError" and run.error.value == "1"
    assert await command(sandbox, "cat /workspace/f /workspace/g; ls /workspace") == "lower\ngone\nf\ng"
    state = await session.get()
    assert state.status == "active" and state.idle_timeout_seconds == 900 and state.idle_remaining_seconds >= 890
    assert state.workspace.path == "/workspace" and state.last_run_at >= state.created_at
    assert [one.session_id for one in await sandbox.isolation.list()] == [session.session_id]
    await session.delete()
    with pytest.raises(SandboxApiException) as refused:
        await session.run("true")
    assert refused.value.status_code == 404
    assert await sandbox.isolation.list() == []


async def test_one_shell_lives_on(sandbox):
    async with sandbox.isolation.session(asks(path="/tmp", mode="rw")) as session:
        await session.run("x=5; f() { echo f$x; }; alias a='echo alias'; cd /usr")
        assert (await session.run("f; a; pwd")).text == "f5\nalias\n/usr"
        run = await session.run('echo "$A"; x=9', opts=IsolatedRunOpts(envs={"A": "it's"}))
        assert run.text == "it's" and run.exit_code == 0
        assert (await session.run("echo $x ${A-none}")).text == "5 none"
        run = await session.run("sleep 60; echo no", opts=IsolatedRunOpts(timeout_seconds=1))
        assert run.error.name == "RuntimeError" and "no" not in [line.text for line in run.logs.stdout]
        assert (await session.run("f")).text == "f5"
        run = await session.run("exit 3")
        assert run.error.name == "RuntimeError" and "session terminated" in run.error.value
        assert (await session.get()).status == "dead"
        assert (await session.run("true")).error.name == "RuntimeError"


async def test_lines_come_as_they_are_written(sandbox):
    await command(sandbox, "rm -f /tmp/go; mkfifo /tmp/go")
    seen = []

    async def on_stdout(message):
        seen.append(message.text)
        if len(seen) == 1:
            await command(sandbox, "echo on >/tmp/go")

    async with sandbox.isolation.session(asks(path="/tmp", mode="rw", profile="balanced")) as session:
        # It ends only if the first line is seen while it runs.
        run = await session.run("echo up; cat /tmp/go", handlers=ExecutionHandlers(on_stdout=on_stdout))
        assert seen == ["up", "on"] and run.exit_code == 0


async def test_runs_in_the_background(sandbox):
    await command(sandbox, "mkdir -p /workspace")
    async with sandbox.isolation.session(asks()) as session:
        started = await session.run_background("echo one; until [ -e go ]; do sleep 0.05; done; echo two; exit 7")
        assert started.session_id == session.session_id
        status = await session.run_status(started.run_id)
        assert status.running and status.exit_code is None and status.finished_at is None
        assert (await session.run("touch go")).exit_code == 0
        for _ in range(200):
            status = await session.run_status(started.run_id)
            if not status.running:
                break
            await asyncio.sleep(0.05)
        assert status.exit_code == 7 and status.error is None and status.finished_at >= status.started_at
        logs = await session.run_logs(started.run_id)
        assert (logs.text, logs.cursor) == ("one\ntwo\n", 8)
        logs = await session.run_logs(started.run_id, 4)
        assert (logs.text, logs.cursor) == ("two\n", 8)
        with pytest.raises(SandboxApiException) as refused:
            await session.run_status(str(uuid.uuid4()))
        assert refused.value.status_code == 404
    async with sandbox.isolation.session(asks(mode="ro")) as session:
        with pytest.raises(SandboxApiException) as refused:
            await session.run_background("true")
        assert refused.value.status_code == 400


async def test_files_of_a_session(sandbox):
    await command(sandbox, "mkdir -p /workspace/dir && echo lower >/workspace/dir/a")
    async with sandbox.isolation.session(asks()) as session:
        files = session.files
        await files.write_files([WriteEntry(path="/workspace/b.txt", data="bé"), WriteEntry(path="deep/c.txt", data=b"\0c")])
        assert (await session.run("cat b.txt; ls deep")).text == "béc.txt"
        assert await files.read_file("/b.txt") == "bé" and await files.read_bytes("/workspace/deep/c.txt") == b"\0c"
        info = (await files.get_file_info(["/workspace/b.txt"]))["/workspace/b.txt"]
        assert (info.size, info.mode, info.owner, info.group) == (3, 755, "", "")
        found = await files.search(SearchEntry(path="/workspace", pattern="*.txt"))
        assert sorted(entry.path for entry in found) == ["b.txt", "deep/c.txt"]
        assert len(await files.list_directory(DirectoryListEntry(path="/workspace"))) == 3
        await files.move_files([MoveEntry(src="/workspace/b.txt", dest="/workspace/moved")])
        await files.delete_files(["/workspace/dir/a"])
        assert (await session.run("ls; ls dir")).text == "deep\ndir\nmoved"
        with pytest.raises(SandboxApiException) as refused:
            await files.read_file("/workspace/dir/a")
        assert refused.value.status_code == 404
        await session.run("ln -s /etc/passwd out; ln -s ../../../etc/passwd up")
        for name in ("out", "up"):
            with pytest.raises(SandboxApiException) as refused:
                await files.read_file(f"/workspace/{name}")
            assert refused.value.status_code == 404
        with pytest.raises(SandboxApiException) as refused:
            await files.read_file("../etc/passwd")
        assert refused.value.status_code == 500
    assert await command(sandbox, "find /workspace -type f") == "/workspace/dir/a"


async def test_what_a_session_is_made_of(sandbox):
    await command(sandbox, "mkdir -p /workspace /data/in /mnt/x /opt/t && echo in >/data/in/f && chmod 777 /mnt/x")
    request = asks(
        mode="ro",
        overlays=[IsolatedOverlaySpec(path="/opt/t", persist=False)],
        extra_writable=["/mnt/x"],
        binds=[BindMount(source="/data/in", dest="/srv", readonly=True)],
        share_net=False,
        uid=1000,
        gid=1000,
        env_passthrough=EnvPassthroughSpec(mode="allow", keys=["PATH"]),
    )
    async with sandbox.isolation.session(request) as session:
        run = await session.run("id -u; id -g; cat /srv/f; touch /srv/x 2>/dev/null || echo ro; touch /mnt/x/w && echo rw; touch /workspace/x 2>/dev/null || echo ro; env | cut -d= -f1 | sort | tr '\\n' ' '; cat /proc/net/dev | wc -l; hostname")
        assert run.text == "1000\n1000\nin\nro\nrw\nro\nPATH PWD SHLVL _ 3\nsandbox", run.text
    assert await command(sandbox, "stat -c %u /mnt/x/w") == "1000"
    async with sandbox.isolation.session(asks(mode="rw", uid=4321, gid=4321, uid_mode="userns")) as session:
        assert (await session.run("id -u; touch mine; stat -c %u mine")).text == "4321\n4321"
    assert await command(sandbox, "stat -c %u /workspace/mine") == "0"
    for request, status in [
        (asks(path="relative"), 400),
        (asks(mode="odd"), 400),
        (asks(path="/nowhere"), 400),
        (asks(profile="odd"), 400),
        (asks(extra_writable=["/etc"]), 400),
        (asks(binds=[BindMount(source="/etc/passwd")]), 400),
        (asks(uid=4294967294), 503),
    ]:
        with pytest.raises(SandboxApiException) as refused:
            await sandbox.isolation.create(request)
        assert refused.value.status_code == status, (request, refused.value)
    assert await sandbox.isolation.list() == []


async def test_run_once_and_attach(sandbox):
    run = await sandbox.isolation.run_once("echo hi; cat", workspace="/tmp")
    assert (run.text, run.exit_code) == ("hi", 0)
    session = await sandbox.isolation.create(asks(path="/tmp", mode="rw"))
    again = await sandbox.isolation.attach(session.session_id)
    assert again.info.workspace.mode == "rw" and (await again.run("echo x")).text == "x"
    await again.delete()
    with pytest.raises(SandboxApiException) as refused:
        await sandbox.isolation.attach(session.session_id)
    assert refused.value.status_code == 404


def test_the_synchronous_client(sandbox_sync):
    sandbox_sync.commands.run("mkdir -p /workspace")
    assert sandbox_sync.isolation.capabilities().available
    with sandbox_sync.isolation.session(asks()) as session:
        assert session.run("echo hi; echo x >f").text == "hi"
        assert session.files.read_file("f") == "x\n"
        started = session.run_background("echo bg")
        for _ in range(200):
            if not session.run_status(started.run_id).running:
                break
        assert session.run_logs(started.run_id).text == "bg\n"
    assert sandbox_sync.isolation.list() == []


async def test_nobody_else_may_do_what_sessions_are_made_with(sandbox):
    """Before, while and after there are sessions: commands get no namespace, no mount, and no way to what makes them."""
    probe = r"""
for try in "unshare -U true" "unshare -m true" "unshare -r true" "unshare -n true" "mount -t tmpfs none /tmp" \
    "mount --bind /tmp /mnt" "umount /sys" "umount -l /sys" "umount /proc/keys" "nsenter -t 1 -m true" "nsenter -U -t 1 true" \
    "readlink /proc/1/fd/0" "cat /proc/1/maps" "ls /proc/1/root/" "cat /proc/1/environ" "hostname other"; do
  $try >/dev/null 2>&1 && echo "WORKED: $try"
done
for name in interrupts kallsyms iomem keys cmdline; do [ -s /proc/$name ] && echo "SEEN: /proc/$name"; done
for pid in /proc/[0-9]*; do
  name=$(cat $pid/comm 2>/dev/null)
  [ "$name" = isolator ] || continue
  for fd in $pid/fd/*; do readlink $fd >/dev/null 2>&1 && echo "OPEN: $fd"; done
  ls $pid/root/ >/dev/null 2>&1 && echo "OPEN: $pid/root"
  ls $pid/cwd/ >/dev/null 2>&1 && echo "OPEN: $pid/cwd"
  cat $pid/maps 2>/dev/null | grep -q . && echo "OPEN: $pid/maps"
  nsenter -t ${pid#/proc/} -U -m true 2>/dev/null && echo "ENTERED $pid"
  timeout 1 strace -o /dev/null -p ${pid#/proc/} 2>/dev/null; [ $? = 124 ] && echo "TRACED $pid"
  dd if=$pid/mem bs=1 count=1 2>/dev/null && echo "READ $pid/mem"
done
grep -E 'Seccomp:|NoNewPrivs' /proc/self/status | tr -d '\t\n'; echo
"""
    quiet = await command(sandbox, probe)
    assert quiet == "NoNewPrivs:1Seccomp:2", quiet
    async with sandbox.isolation.session(asks(path="/tmp")) as session:
        assert (await session.run("echo x >/tmp/x")).exit_code == 0
        assert await command(sandbox, probe) == quiet
        inside = await session.run(probe)
        assert inside.text.strip() == quiet, inside.text
        # The covers of the sandbox's /proc are there too, and what is hidden is on no path.
        run = await session.run("ls /dev/shm/disk /dev/shm/memory /uppers /sys/uppers /sys/proc 2>&1 | grep -vc 'No such'; ls -A /sys | grep -c '^uppers$'")
        assert run.text == "0\n0", run.text
        # The uppers are on no path of the sandbox.
        assert await command(sandbox, f"find / -xdev -path '*{session.session_id}*' 2>/dev/null | wc -l") == "0"
    assert await command(sandbox, probe) == quiet


async def test_a_daemon_that_dies_takes_its_sessions_along(sandbox):
    session = await sandbox.isolation.create(asks(path="/tmp"))
    await session.run("sleep 308 & echo x >/tmp/x")
    try:
        await sandbox.commands.run("kill -9 $PPID")
    except Exception:
        pass
    for _ in range(100):
        run = await sandbox.commands.run("ps -e -o args= | grep -c '^sleep 308'")
        if run.text.strip() == "0":
            break
        await asyncio.sleep(0.1)
    assert run.text.strip() == "0"
    with pytest.raises(SandboxApiException) as refused:
        await session.get()
    assert refused.value.status_code == 404
    async with sandbox.isolation.session(asks(path="/tmp")) as session:
        assert (await session.run("echo up")).text == "up"


async def test_a_storm_of_processes_ends_with_its_session(sandbox):
    session = await sandbox.isolation.create(asks(path="/tmp"))
    storm = asyncio.create_task(session.run("f() { f | f & }; f; sleep 30"))
    await asyncio.sleep(1)
    await session.delete()
    assert (await asyncio.wait_for(storm, 30)).error.name == "RuntimeError"
    for _ in range(100):
        run = await sandbox.commands.run("ls -d /proc/[0-9]* | wc -l")
        if run.exit_code == 0 and int(run.text) < 20:
            break
        await asyncio.sleep(0.1)
    assert int(run.text) < 20


def test_the_javascript_client(server, sandbox_sync):
    """Background runs are not in its published version."""
    sandbox_sync.commands.run("mkdir -p /workspace && echo lower >/workspace/f")
    script = """
import { ConnectionConfig, Sandbox } from "@alibaba-group/opensandbox";
const connectionConfig = new ConnectionConfig({ domain: process.env.DOMAIN, apiKey: process.env.KEY, useServerProxy: true });
const box = await Sandbox.connect({ sandboxId: process.env.ID, connectionConfig });
const can = await box.isolation.capabilities();
const session = await box.isolation.create({ workspace: { path: "/workspace" } });
const run = await session.run("cat f; echo upper >f; (exit 4)");
await session.files.writeFiles([{ path: "/workspace/new", data: "js" }]);
const text = await session.files.readFile("f");
const listed = (await box.isolation.list()).length;
const state = await session.get();
const once = await box.isolation.runOnce("echo once", "/workspace");
await session.delete();
console.log(JSON.stringify({ can: can.available, out: run.logs.stdout.map(l => l.text), code: run.exitCode ?? run.error?.value, text, listed, status: state.status, once: once.logs.stdout.map(l => l.text) }));
process.exit(0);
"""
    environment = {**os.environ, "DOMAIN": server.domain, "KEY": API_KEY, "ID": sandbox_sync.id}
    ran = subprocess.run(
        ["node", "--input-type=module", "-e", script],
        cwd=Path(__file__).parent / "agents" / "js",
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.returncode == 0, ran.stderr
    seen = json.loads(ran.stdout.splitlines()[-1])
    assert seen["can"] and seen["out"] == ["lower"] and str(seen["code"]) == "4", seen
    assert seen["text"] == "upper\n" and seen["listed"] == 1 and seen["status"] == "active" and seen["once"] == ["once"], seen
