"""Files as another user: by the Python clients, and on the wire through the server's proxy."""

import asyncio
import json

import pytest
from opensandbox.exceptions import SandboxApiException
from opensandbox.models import ContentReplaceEntry, DirectoryListEntry, MoveEntry, SearchEntry, SetPermissionEntry, WriteEntry

ALICE = (12_001, 13_001)
BOB = (12_002, 13_002)


async def shell(sandbox, command):
    run = await sandbox.commands.run(command)
    assert run.exit_code == 0, (run.text, run.logs.stderr)
    return run.text


async def denied(call):
    with pytest.raises(SandboxApiException) as refused:
        await call
    assert refused.value.status_code == 500 and "permission" in str(refused.value).lower()


async def test_what_is_made_belongs_to_the_identity(sandbox):
    await shell(sandbox, "mkdir -m 700 /tmp/home && chown 12001:13001 /tmp/home")
    files = sandbox.files_with_identity(*ALICE)
    await files.write_files([WriteEntry(path="/tmp/home/a/f", data="one two"), WriteEntry(path="/tmp/home/large", data=b"x" * (5 << 20))])
    await files.create_directories([WriteEntry(path="/tmp/home/d/e", mode=750)])
    await files.replace_contents([ContentReplaceEntry(path="/tmp/home/a/f", old_content="two", new_content="2")])
    await files.move_files([MoveEntry(src="/tmp/home/a/f", dest="/tmp/home/new/f")])
    await files.set_permissions([SetPermissionEntry(path="/tmp/home/new/f", mode=600)])
    assert await files.read_file("/tmp/home/new/f") == "one 2"
    assert len(await files.read_bytes("/tmp/home/large")) == 5 << 20
    info = (await files.get_file_info(["/tmp/home/new/f"]))["/tmp/home/new/f"]
    assert (info.owner, info.group, info.mode) == ("12001", "13001", 600)
    found = await files.search(SearchEntry(path="/tmp/home", pattern="*"))
    assert sorted(entry.path for entry in found) == ["/tmp/home/large", "/tmp/home/new/f"]
    listed = await files.list_directory(DirectoryListEntry(path="/tmp/home", depth=1))
    assert [entry.path.rsplit("/", 1)[1] for entry in listed] == ["a", "d", "large", "new"]
    assert await shell(sandbox, "find /tmp/home ! -uid 12001 -o ! -gid 13001") == ""
    await files.delete_files(["/tmp/home/large"])
    await files.delete_directories(["/tmp/home/new", "/tmp/home/d"])
    assert await shell(sandbox, "ls /tmp/home") == "a"
    # The plain calls still act as root.
    await sandbox.files.write_file("/tmp/home/root", "x")
    assert await shell(sandbox, "stat -c %u:%g /tmp/home/root") == "0:0"


async def test_the_kernel_says_no(sandbox):
    await shell(sandbox, "cd /tmp; mkdir -m 700 shut; echo secret > shut/f; echo bob > bob; chown 12002:13002 bob; mkdir mine; chown 12001 mine; ln -s ../shut/f mine/link; ln bob mine/hard")
    files = sandbox.files_with_identity(*ALICE)
    for path in ("/tmp/shut/f", "/tmp/mine/link"):
        await denied(files.read_bytes(path))
        await denied(files.write_file(path, "x"))
    await denied(files.get_file_info(["/tmp/shut/f"]))
    await denied(files.list_directory(DirectoryListEntry(path="/tmp/shut", depth=1)))
    await denied(files.write_file("/tmp/mine/hard", "x"))
    await denied(files.write_file("/etc/new", "x"))
    await denied(files.delete_files(["/tmp/bob"]))
    await denied(files.move_files([MoveEntry(src="/tmp/bob", dest="/tmp/mine/bob")]))
    await denied(files.set_permissions([SetPermissionEntry(path="/tmp/bob", mode=666)]))
    await denied(files.delete_directories(["/tmp/shut"]))
    await denied(files.read_bytes("/proc/1/environ"))
    assert await shell(sandbox, "cat /tmp/shut/f /tmp/bob; ls -A /tmp/mine") == "secret\nbob\nhard\nlink"


async def test_accounts_bring_their_groups_and_home(sandbox):
    await shell(
        sandbox,
        "echo 'alice:x:12001:13001::/tmp/alice:/bin/sh' >> /etc/passwd; echo 'staff2:x:13050:alice' >> /etc/group;"
        "mkdir /tmp/alice; chown 12001:13001 /tmp/alice; echo staff > /tmp/staff; chgrp 13050 /tmp/staff; chmod 640 /tmp/staff",
    )
    files = sandbox.files_with_identity(*ALICE)
    assert await files.read_file("/tmp/staff") == "staff\n"
    await denied(sandbox.files_with_identity(*BOB).read_file("/tmp/staff"))
    await files.write_file("~/f", "x")
    assert await shell(sandbox, "stat -c %U /tmp/alice/f") == "alice"


async def test_many_identities_at_once(sandbox):
    await shell(sandbox, "mkdir -m 1777 /tmp/all")

    async def one(n):
        files = sandbox.files_with_identity(20_000 + n, 30_000 + n)
        path = f"/tmp/all/{n}"
        await files.create_directories([WriteEntry(path=path, mode=700)])
        await files.write_file(f"{path}/f", str(n) * 1000)
        assert await files.read_file(f"{path}/f") == str(n) * 1000
        await sandbox.files.write_file(f"/tmp/all/root-{n}", "x")

    await asyncio.gather(*(one(n) for n in range(60)))
    owners = await shell(sandbox, "cd /tmp/all; stat -c '%n %u %g' */f root-*")
    for line in owners.splitlines():
        name, uid, gid = line.split()
        n = int(name.split("/")[0]) if "/" in name else None
        assert (int(uid), int(gid)) == ((20_000 + n, 30_000 + n) if n is not None else (0, 0)), line
    assert len(owners.splitlines()) == 120
    # What served them ends when it has nothing to do, under whatever name it ran.
    for _ in range(40):
        if await shell(sandbox, "cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' ' | grep -c '[f]ile-worker' || :") == "0":
            break
        await asyncio.sleep(0.25)
    else:
        raise AssertionError("workers stay")


async def test_a_fork_bomb_does_not_take_it_along(config):
    from opensandbox import Sandbox

    # All processes that the work may have are used up.
    made = await Sandbox.create("host", connection_config=config)
    try:
        await made.commands.run("i=0; while [ $i -lt 5000 ]; do sleep 300 & i=$((i+1)); done; :")
        files = made.files_with_identity(*ALICE)
        await files.write_file("/tmp/f", "x")
        assert await files.read_file("/tmp/f") == "x"
    finally:
        await made.kill()
        await made.close()


def test_the_synchronous_client(sandbox_sync):
    files = sandbox_sync.files_with_identity(*BOB)
    files.write_file("/tmp/bob", "bob")
    assert files.read_file("/tmp/bob") == "bob"
    assert sandbox_sync.commands.run("stat -c %u:%g /tmp/bob").text == "12002:13002"
    with pytest.raises(SandboxApiException):
        files.write_file("/usr/bob", "bob")


async def test_on_the_wire(sandbox, http):
    endpoint = await sandbox.get_endpoint(44772)
    base = f"/sandboxes/{sandbox.id}/proxy/44772/v1/filesystem"
    http.headers.update(endpoint.headers or {})

    def answer(ids, rest, method="GET", **kwargs):
        return http.request(method, f"{base}/{ids}{rest}", **kwargs)

    form = [
        ("metadata", ("metadata", json.dumps({"path": "/tmp/wire", "owner": None, "group": None, "mode": 640}), "application/json")),
        ("file", ("wire", b"line 1\nline 2\n", "application/octet-stream")),
    ]
    assert (answer("7/8", "/files/upload", "POST", files=form).status_code, (await shell(sandbox, "stat -c '%u:%g %a' /tmp/wire"))) == (200, "7:8 640")
    got = answer("7/8", "/files/download", params={"path": "/tmp/wire"}, headers={"Range": "bytes=5-"})
    assert (got.status_code, got.text, got.headers["content-range"]) == (206, "1\nline 2\n", "bytes 5-13/14")
    got = answer("7/8", "/files/download", params={"path": "/tmp/wire", "offset": 2})
    assert (got.text, got.headers["content-type"]) == ("line 2", "text/plain; charset=utf-8")
    got = answer("9/9", "/files/download", params={"path": "/tmp/wire"})
    assert (got.status_code, got.json()["code"]) == (500, "RUNTIME_ERROR") and "permission" in got.json()["message"]
    # The group is enough to read.
    assert answer("9/8", "/files/download", params={"path": "/tmp/wire"}).text == "line 1\nline 2\n"
    assert answer("7/8", "/files/info", params={"path": "/nope"}).json()["code"] == "FILE_NOT_FOUND"
    for ids in ("4294967295/1", "1/4294967295", "-1/1", "%201/1", "0x1/1", "root/1"):
        got = answer(ids, "/files/info", params={"path": "/"})
        assert (got.status_code, got.json()["code"]) == (400, "INVALID_REQUEST_BODY"), ids
    for ids in ("65536/1", "1/65536", "4294967294/0"):
        got = answer(ids, "/files/info", params={"path": "/"})
        assert (got.status_code, got.json()["code"]) == (503, "FILESYSTEM_IDENTITY_UNAVAILABLE"), ids
        assert "0 to 65535" in got.json()["message"]
    assert answer("65535/65535", "/files/info", params={"path": "/"}).status_code == 200
    assert answer("7/8", "/nothing").status_code == 404
