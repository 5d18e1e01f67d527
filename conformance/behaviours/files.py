"""Files and directories."""

from __future__ import annotations

import hashlib

from behaviours import behaviour
from behaviours.support import refused

TREE = {"a.md": "", "d/b.md": "b", "d/e/c.md": "", "d/x.js": "x"}


def _tree(box, root: str) -> None:
    for path, data in TREE.items():
        box.write(f"{root}/{path}", data)


@behaviour(basic=True)
def text_is_written_and_read(client, box):
    text = "Grüße, 世界 🙂\n\ttab\n" + "x" * 5000
    box.write("/tmp/new/parents/are/made.txt", text)
    assert box.read("/tmp/new/parents/are/made.txt") == text
    box.write("/tmp/new/parents/are/made.txt", "shorter")
    assert box.read("/tmp/new/parents/are/made.txt") == "shorter"


@behaviour()
def empty_files_are_files(client, box):
    box.write("/tmp/empty", "")
    assert box.read("/tmp/empty") == ""
    assert box.run("stat -c '%s %F' /tmp/empty").output == "0 regular empty file\n"


@behaviour(basic=True)
def every_byte_survives(client, box):
    data = bytes(range(256)) * 300 + b"\xff\x00\r\n"
    box.write_bytes("/tmp/bytes", data)
    assert box.read_bytes("/tmp/bytes") == data
    assert box.run("sha256sum < /tmp/bytes").output.split()[0] == hashlib.sha256(data).hexdigest()


@behaviour()
def a_file_of_85_kilobytes_is_no_trouble(client, box):
    text = "".join(f"line {n} of a program that an assistant wrote\n" for n in range(1800))
    assert len(text) > 80_000
    box.write("/tmp/program.py", text)
    assert box.read("/tmp/program.py") == text


@behaviour("stream")
def sixteen_mebibytes_go_both_ways(client, box):
    data = hashlib.shake_128(b"seed").digest(16 << 20)
    box.write_bytes("/tmp/large", data)
    assert box.run("sha256sum < /tmp/large").output.split()[0] == hashlib.sha256(data).hexdigest()
    assert box.read_bytes("/tmp/large") == data
    assert box.stream("/tmp/large") == len(data)


@behaviour(basic=True)
def odd_names_survive(client, box):
    for name in ("a b.txt", "50%.txt", "a#b?.txt", "a+b.txt", "ü€.txt", "a&b=c.txt", "line\nbreak", "-rf", "'\"back\\slash", "*"):
        path = f"/tmp/odd/{name}"
        box.write(path, name)
        assert box.read(path) == name
        assert box.search("/tmp/odd", "*") == {path}
        box.delete(path)
        with refused(client, 404, "FILE_NOT_FOUND"):
            box.read(path)


@behaviour(basic=True)
def mode_digits_spell_the_octal_mode(client, box):
    for mode in (644, 755, 600, 420):
        box.write("/tmp/mode", "x", mode=mode)
        assert box.run("stat -c %a /tmp/mode").output == f"{mode}\n"


@behaviour("write.owner")
def owners_are_set_by_name(client, box):
    box.write("/tmp/owned", "x", owner="nobody", group="nogroup")
    assert box.run("stat -c '%U %G' /tmp/owned").output == "nobody nogroup\n"


@behaviour("stat", basic=True)
def files_are_described(client, box):
    box.write("/tmp/described", "12345", mode=640)
    box.mkdir("/tmp/directory", mode=750)
    found = box.stat("/tmp/described", "/tmp/directory")
    assert set(found) == {"/tmp/described", "/tmp/directory"}
    file = found["/tmp/described"]
    assert (file["path"], file["size"], file["mode"]) == ("/tmp/described", 5, 640)
    assert (file["owner"], file["group"]) == ("root", "root")
    assert found["/tmp/directory"]["mode"] == 750
    with refused(client, 404, "FILE_NOT_FOUND"):
        box.stat("/tmp/described", "/tmp/nowhere")


@behaviour("chmod", "chmod.owner", basic=True)
def permissions_are_changed(client, box):
    box.write("/tmp/changed", "x")
    box.chmod("/tmp/changed", 640, owner="nobody", group="nogroup")
    assert box.run("stat -c '%U %G %a' /tmp/changed").output == "nobody nogroup 640\n"
    box.chmod("/tmp/changed", 777)
    assert box.run("stat -c '%U %G %a' /tmp/changed").output == "nobody nogroup 777\n"
    with refused(client, 404, "FILE_NOT_FOUND"):
        box.chmod("/tmp/nowhere", 644)


@behaviour(basic=True)
def files_are_searched_by_pattern(client, box):
    _tree(box, "/tmp/s")
    for pattern, found in (
        ("*", set(TREE)),
        ("**", set(TREE)),
        ("*.md", {"a.md", "d/b.md", "d/e/c.md"}),
        ("**/*.md", {"a.md", "d/b.md", "d/e/c.md"}),
        ("d/*.md", {"d/b.md"}),
        ("*.{js,ts}", {"d/x.js"}),
        ("[ab].md", {"a.md", "d/b.md"}),
        ("nothing*", set()),
    ):
        assert box.search("/tmp/s", pattern) == {f"/tmp/s/{path}" for path in found}, pattern
    with refused(client, 404, "FILE_NOT_FOUND"):
        box.search("/tmp/nowhere", "*")


@behaviour()
def one_bad_entry_does_not_end_a_search(client, box):
    box.run("mkdir -p /tmp/u/d; touch /tmp/u/x /tmp/u/d/x; chmod 000 /tmp/u/d; ln -s /tmp/u /tmp/u/loop; ln -s nowhere /tmp/u/dangling")
    assert box.search("/tmp/u", "x") == {"/tmp/u/x", "/tmp/u/d/x"}
    assert "/proc/1/status" in box.search("/proc/1", "status")


@behaviour("list_directory")
def directories_are_listed_in_order(client, box):
    _tree(box, "/tmp/l")
    assert [item["path"] for item in box.list_directory("/tmp/l")] == ["/tmp/l/a.md", "/tmp/l/d"]
    assert [item["type"] for item in box.list_directory("/tmp/l")] == ["file", "directory"]
    deep = [item["path"] for item in box.list_directory("/tmp/l", depth=2)]
    assert deep == ["/tmp/l/a.md", "/tmp/l/d", "/tmp/l/d/b.md", "/tmp/l/d/e", "/tmp/l/d/x.js"]
    box.run("ln -s /etc /tmp/link")
    with refused(client, 400):
        box.list_directory("/tmp/link")


@behaviour(basic=True)
def directories_come_and_go(client, box):
    box.mkdir("/tmp/a/b/c", "/tmp/second")
    assert box.run("stat -c '%F' /tmp/a/b/c /tmp/second").output == "directory\ndirectory\n"
    box.mkdir("/tmp/a/private", mode=700)
    assert box.run("stat -c %a /tmp/a/private").output == "700\n"
    box.write("/tmp/a/b/file", "x")
    box.rmdir("/tmp/a", "/tmp/never-there")
    assert box.run("ls -d /tmp/a 2>&1 | wc -l; test -e /tmp/a || echo gone").output == "1\ngone\n"


@behaviour(basic=True)
def files_are_moved(client, box):
    box.write("/tmp/from", "moved")
    box.move("/tmp/from", "/tmp/some/new/place")
    assert box.read("/tmp/some/new/place") == "moved"
    with refused(client, 404, "FILE_NOT_FOUND"):
        box.move("/tmp/from", "/tmp/elsewhere")
    box.write("/tmp/from", "other")
    with refused(client):
        box.move("/tmp/from", "/tmp/some/new/place")
    assert box.read("/tmp/some/new/place") == "moved"


@behaviour(basic=True)
def text_is_replaced(client, box):
    box.write("/tmp/r", "a b a €", mode=640)
    box.replace("/tmp/r", "a", "c$1\\n")
    assert box.read("/tmp/r") == "c$1\\n b c$1\\n €"
    assert box.run("stat -c %a /tmp/r").output == "640\n"
    box.replace("/tmp/r", "not in it", "x")
    with refused(client, 404, "FILE_NOT_FOUND"):
        box.replace("/tmp/nowhere", "a", "b")


@behaviour("replace.count")
def replacements_are_counted(client, box):
    box.write("/tmp/r", "a b a")
    assert box.replace("/tmp/r", "a", "cc", count=True) == 2
    assert box.replace("/tmp/r", "zzz", "q", count=True) == 0
    assert box.read("/tmp/r") == "cc b cc"


@behaviour("read.range", basic=True)
def parts_are_read_by_range(client, box):
    box.write("/tmp/part", "0123456789")
    assert box.read("/tmp/part", range="bytes=0-2") == "012"
    assert box.read("/tmp/part", range="bytes=8-") == "89"
    assert box.read("/tmp/part", range="bytes=-3") == "789"
    with refused(client, 416):
        box.read("/tmp/part", range="bytes=99-")


@behaviour("read.lines")
def parts_are_read_by_line(client, box):
    box.write("/tmp/lines", "one\ntwo\nthree\nfour")
    assert box.read("/tmp/lines", offset=1, limit=2) == "one\ntwo"
    assert box.read("/tmp/lines", offset=4) == "four"
    assert box.read("/tmp/lines", offset=99) == ""


@behaviour("write.many", basic=True)
def many_files_go_in_one_call(client, box):
    box.write_many({f"/tmp/many/{n}": str(n) for n in range(100)})
    assert box.run("cat /tmp/many/99; echo; ls /tmp/many | wc -l").output.split() == ["99", "100"]


@behaviour()
def deleting_is_final_and_repeatable(client, box):
    box.write("/tmp/gone", "x")
    box.delete("/tmp/gone")
    assert box.run("test -e /tmp/gone || echo gone").output == "gone\n"
    box.delete("/tmp/gone")


@behaviour()
def a_directory_is_not_read_as_a_file(client, box):
    with refused(client, 400) as caught:
        box.read("/tmp")
    assert "directory" in caught.error.message + caught.error.body


@behaviour()
def what_a_command_writes_is_read_and_the_other_way_round(client, box):
    box.run("seq 1 1000 > /tmp/numbers")
    assert box.read("/tmp/numbers").splitlines()[-1] == "1000"
    box.write("/tmp/script.sh", "#!/bin/sh\necho ran $1\n", mode=755)
    assert box.run("/tmp/script.sh twice").output == "ran twice\n"
