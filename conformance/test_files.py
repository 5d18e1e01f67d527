"""Files and directories through the asynchronous client."""

import hashlib

import pytest
from opensandbox.exceptions import SandboxApiException
from opensandbox.models import (
    ContentReplaceEntry,
    DirectoryListEntry,
    MoveEntry,
    SearchEntry,
    SetPermissionEntry,
    WriteEntry,
)

NAMES = ["a b.txt", "50%.txt", "a#b?.txt", "a+b.txt", "ü.txt", "a&b=c.txt", "line\nbreak", "-rf", "'\"back\\slash"]


async def test_write_and_read(sandbox):
    await sandbox.files.write_files([WriteEntry(path="/tmp/hello.txt", data="Hello World", mode=644)])
    assert await sandbox.files.read_file("/tmp/hello.txt") == "Hello World"
    assert (await sandbox.commands.run("stat -c %a /tmp/hello.txt; cat /tmp/hello.txt")).text == "644\nHello World"


@pytest.mark.parametrize("name", NAMES)
async def test_odd_names_survive_every_hop(sandbox, name):
    path = f"/tmp/odd/{name}"
    await sandbox.files.write_file(path, name)
    assert await sandbox.files.read_file(path) == name
    assert path in await sandbox.files.get_file_info([path])
    await sandbox.files.delete_files([path])
    with pytest.raises(SandboxApiException) as gone:
        await sandbox.files.read_file(path)
    assert gone.value.status_code == 404 and gone.value.error.code == "FILE_NOT_FOUND"


@pytest.mark.parametrize("size", [0, 1, 17_000, 19_000, 1 << 20, 20 << 20])
async def test_size_does_not_matter(sandbox, size):
    data = bytes(range(256)) * (size // 256 + 1)
    data = data[:size]
    await sandbox.files.write_file("/tmp/sized.bin", data)
    assert await sandbox.files.read_bytes("/tmp/sized.bin") == data
    digest = (await sandbox.commands.run("sha256sum /tmp/sized.bin")).text.split()[0]
    assert digest == hashlib.sha256(data).hexdigest()


async def test_streamed_read(sandbox):
    await sandbox.commands.run("head -c 3000000 /dev/urandom > /tmp/big")
    parts = [chunk async for chunk in await sandbox.files.read_bytes_stream("/tmp/big")]
    assert sum(map(len, parts)) == 3_000_000


async def test_many_files_in_one_call(sandbox):
    await sandbox.files.write_files([WriteEntry(path=f"/tmp/many/{n}", data=str(n)) for n in range(200)])
    assert (await sandbox.commands.run("cat /tmp/many/199; ls /tmp/many | wc -l")).text == "199200"


@pytest.mark.parametrize(("given", "octal"), [(644, "644"), (755, "755"), (600, "600"), (420, "420")])
async def test_mode_digits_are_octal(sandbox, given, octal):
    await sandbox.files.write_file("/tmp/mode", "x", mode=given)
    assert (await sandbox.commands.run("stat -c %a /tmp/mode")).text == octal
    info = (await sandbox.files.get_file_info(["/tmp/mode"]))["/tmp/mode"]
    assert info.mode == given and info.size == 1 and info.owner == "root" and info.group == "root"


async def test_owner_and_permissions(sandbox):
    await sandbox.files.write_file("/tmp/owned", "x", owner="nobody", group="nogroup")
    assert (await sandbox.commands.run("stat -c '%U %G' /tmp/owned")).text == "nobody nogroup"
    await sandbox.files.set_permissions([SetPermissionEntry(path="/tmp/owned", owner="root", group="root", mode=640)])
    assert (await sandbox.commands.run("stat -c '%U %G %a' /tmp/owned")).text == "root root 640"
    with pytest.raises(SandboxApiException) as refused:
        await sandbox.files.set_permissions([SetPermissionEntry(path="/tmp/owned", owner="nosuchuser", mode=640)])
    assert refused.value.status_code in (400, 500)


async def test_directories(sandbox):
    await sandbox.files.create_directories([WriteEntry(path="/tmp/d/e/f", mode=750)])
    await sandbox.files.create_directories([WriteEntry(path="/tmp/d", mode=700)])
    assert (await sandbox.commands.run("stat -c %a /tmp/d/e/f /tmp/d")).text.splitlines()[0] == "750"
    await sandbox.files.write_file("/tmp/d/b.txt", "")
    await sandbox.files.write_file("/tmp/d/a.txt", "")
    entries = await sandbox.files.list_directory(DirectoryListEntry(path="/tmp/d"))
    assert [entry.path for entry in entries] == ["/tmp/d/a.txt", "/tmp/d/b.txt", "/tmp/d/e"]
    deep = await sandbox.files.list_directory(DirectoryListEntry(path="/tmp/d", depth=3))
    assert [entry.path for entry in deep] == ["/tmp/d/a.txt", "/tmp/d/b.txt", "/tmp/d/e", "/tmp/d/e/f"]
    await sandbox.files.delete_directories(["/tmp/d", "/tmp/absent"])
    with pytest.raises(SandboxApiException) as gone:
        await sandbox.files.list_directory(DirectoryListEntry(path="/tmp/d"))
    assert gone.value.status_code == 404


async def test_an_empty_directory_is_an_empty_list(sandbox):
    await sandbox.files.create_directories([WriteEntry(path="/tmp/empty")])
    assert await sandbox.files.list_directory(DirectoryListEntry(path="/tmp/empty")) == []
    assert await sandbox.files.search(SearchEntry(path="/tmp/empty", pattern="*")) == []


async def test_a_listed_root_that_is_a_symlink_is_refused(sandbox):
    await sandbox.commands.run("ln -s /etc /tmp/link")
    with pytest.raises(SandboxApiException) as refused:
        await sandbox.files.list_directory(DirectoryListEntry(path="/tmp/link"))
    assert refused.value.status_code == 400


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("*", {"a.md", "d/b.md", "d/e/c.md", "d/x.js"}),
        ("**", {"a.md", "d/b.md", "d/e/c.md", "d/x.js"}),
        ("*.md", {"a.md", "d/b.md", "d/e/c.md"}),
        ("**/*.md", {"a.md", "d/b.md", "d/e/c.md"}),
        ("d/*.md", {"d/b.md"}),
        ("*.{js,ts}", {"d/x.js"}),
        ("[ab].md", {"a.md", "d/b.md"}),
        ("nothing*", set()),
    ],
)
async def test_search(sandbox, pattern, found):
    await sandbox.files.write_files([WriteEntry(path=f"/tmp/s/{p}", data="") for p in ("a.md", "d/b.md", "d/e/c.md", "d/x.js")])
    entries = await sandbox.files.search(SearchEntry(path="/tmp/s", pattern=pattern))
    assert {entry.path.removeprefix("/tmp/s/") for entry in entries} == found


async def test_move(sandbox):
    await sandbox.files.write_file("/tmp/m1", "x")
    await sandbox.files.move_files([MoveEntry(src="/tmp/m1", dest="/tmp/new/dir/m2")])
    assert await sandbox.files.read_file("/tmp/new/dir/m2") == "x"
    with pytest.raises(SandboxApiException) as gone:
        await sandbox.files.move_files([MoveEntry(src="/tmp/m1", dest="/tmp/m3")])
    assert gone.value.status_code == 404
    await sandbox.files.write_file("/tmp/m4", "y")
    with pytest.raises(SandboxApiException):
        await sandbox.files.move_files([MoveEntry(src="/tmp/m4", dest="/tmp/new/dir/m2")])


async def test_replace(sandbox):
    await sandbox.files.write_file("/tmp/r", "a b a", mode=640)
    results = await sandbox.files.replace_contents_detailed(
        [ContentReplaceEntry(path="/tmp/r", old_content="a", new_content="cc")]
    )
    assert results[0].replaced_count == 2
    assert await sandbox.files.read_file("/tmp/r") == "cc b cc"
    assert (await sandbox.commands.run("stat -c %a /tmp/r")).text == "640"
    await sandbox.files.replace_contents([ContentReplaceEntry(path="/tmp/r", old_content="zzz", new_content="q")])
    assert await sandbox.files.read_file("/tmp/r") == "cc b cc"


async def test_ranges_and_lines(sandbox):
    await sandbox.files.write_file("/tmp/lines", "one\ntwo\r\n" + "x" * 200_000 + "\nfour")
    assert await sandbox.files.read_file("/tmp/lines", range_header="bytes=0-2") == "one"
    assert await sandbox.files.read_file("/tmp/lines", range_header="bytes=-4") == "four"
    assert await sandbox.files.read_file("/tmp/lines", offset=1, limit=2) == "one\ntwo"
    assert await sandbox.files.read_file("/tmp/lines", offset=3, limit=1) == "x" * 200_000
    assert await sandbox.files.read_file("/tmp/lines", offset=4) == "four"
    assert await sandbox.files.read_file("/tmp/lines", offset=99) == ""


@pytest.mark.parametrize("path", ["/nope", "/tmp/nope/x"])
async def test_what_is_not_there_is_404(sandbox, path):
    for call in (
        sandbox.files.get_file_info([path]),
        sandbox.files.read_file(path),
        sandbox.files.search(SearchEntry(path=path, pattern="*")),
        sandbox.files.replace_contents([ContentReplaceEntry(path=path, old_content="a", new_content="b")]),
    ):
        with pytest.raises(SandboxApiException) as gone:
            await call
        assert gone.value.status_code == 404


async def test_downloading_a_directory_is_400(sandbox):
    with pytest.raises(SandboxApiException) as refused:
        await sandbox.files.read_bytes("/tmp")
    assert refused.value.status_code == 400


async def test_home_and_variables_in_paths(sandbox):
    await sandbox.files.write_file("~/x", "home")
    assert await sandbox.files.read_file("$HOME/x") == "home"
    with pytest.raises(SandboxApiException):
        await sandbox.files.read_file("${NO_SUCH_VARIABLE_HERE}/x")


async def test_ten_writers_of_one_file_leave_one_whole_file(sandbox):
    import asyncio

    blobs = [bytes([n]) * 300_000 for n in range(10)]
    await asyncio.gather(*(sandbox.files.write_file("/tmp/raced", blob) for blob in blobs))
    assert await sandbox.files.read_bytes("/tmp/raced") in blobs
