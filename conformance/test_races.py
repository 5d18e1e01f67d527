"""Programs in a sandbox that swap directories for links while the file API is at work on them."""

from __future__ import annotations

import pytest
from opensandbox import SandboxSync
from opensandbox.exceptions import SandboxApiException
from opensandbox.models import DirectoryListEntry, SearchEntry, SetPermissionEntry, WriteEntry
from opensandbox.models.execd import RunCommandOpts

#: Exchanges /tmp/race/d, a directory, and /tmp/race/link, a link to /tmp/precious, as fast as it goes.
SWAP = r"""
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
os.makedirs("/tmp/race", exist_ok=True)
while True:
    try: os.makedirs("/tmp/race/d/sub", exist_ok=True)
    except OSError: pass
    if not os.path.islink("/tmp/race/link"):
        try: os.symlink("/tmp/precious", "/tmp/race/link")
        except OSError: pass
    for _ in range(50):
        libc.renameat2(-100, b"/tmp/race/d", -100, b"/tmp/race/link", 2)
"""
ROUNDS = 150


@pytest.fixture
def raced(sandbox_sync: SandboxSync) -> SandboxSync:
    sandbox_sync.files.write_files([WriteEntry(path=f"/tmp/precious/{n}", data="kept", mode=640) for n in range(5)])
    sandbox_sync.files.write_files([WriteEntry(path="/tmp/precious/sub/deep", data="kept"), WriteEntry(path="/tmp/swap.py", data=SWAP)])
    sandbox_sync.commands.run("exec python3 /tmp/swap.py", opts=RunCommandOpts(background=True))
    sandbox_sync.commands.run("until [ -e /tmp/race/link ]; do sleep 0.02; done")
    return sandbox_sync


def attempt(call, *args) -> object:
    """The answer, or `None` where the race was lost in an orderly way."""
    try:
        return call(*args)
    except SandboxApiException as refused:
        # What is filled again while it is emptied cannot be removed.
        assert refused.status_code in (400, 404, 409) or "not empty" in str(refused), refused
        return None


def intact(sandbox: SandboxSync) -> None:
    assert sandbox.commands.run("cat /tmp/precious/[0-4] /tmp/precious/sub/deep").text == "kept" * 6
    assert sandbox.commands.run("stat -c %a /tmp/precious/[0-4] | sort -u").text == "640"


def test_deleting_a_tree_never_follows_a_link(raced):
    for _ in range(ROUNDS):
        attempt(raced.files.delete_directories, ["/tmp/race/d"])
    intact(raced)


def test_listing_and_searching_never_leave_their_root(raced):
    listed = 0
    for _ in range(ROUNDS):
        found = attempt(raced.files.list_directory, DirectoryListEntry(path="/tmp/race/d", depth=3))
        found = (found or []) + (attempt(raced.files.search, SearchEntry(path="/tmp/race/d", pattern="**")) or [])
        assert all(entry.path == "/tmp/race/d/sub" for entry in found), found
        listed += len(found)
    assert listed, "the race was always lost: nothing was tested"


def test_a_tree_that_changes_all_the_time_is_searched_to_its_end(raced):
    for _ in range(ROUNDS // 3):
        found = {entry.path for entry in raced.files.search(SearchEntry(path="/tmp", pattern="*"))}
        assert {f"/tmp/precious/{n}" for n in range(5)} <= found
        assert not any(path.startswith("/tmp/race/") and path.endswith("/deep") for path in found)


def test_permissions_of_what_is_a_link_are_those_of_its_target_or_refused(raced):
    for _ in range(ROUNDS):
        attempt(raced.files.set_permissions, [SetPermissionEntry(path="/tmp/race/d", mode=755)])
    intact(raced)
