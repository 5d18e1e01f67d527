"""Runs last: what a thousand uses leave on the host."""

import asyncio
import os
from pathlib import Path

from opensandbox import Sandbox

from conftest import IMAGE, Server


def descendants(root: int) -> set[int]:
    """The process and what it has started, to any depth; sandboxes hang below the server that made them."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            # Behind the name, which may hold anything: state, then the parent.
            parent = int(Path(f"/proc/{name}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
        children.setdefault(parent, []).append(int(name))
    found, open_ = set(), [root]
    while open_:
        pid = open_.pop()
        found.add(pid)
        open_ += children.get(pid, [])
    return found


def processes(server: Server, group: str) -> int:
    """Processes in the server's cgroups, whoever is their parent now, and those below the server itself."""
    parents, own = {}, {server.process.pid}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            # Behind the name, which may hold anything: state, then the parent.
            stat = Path(f"/proc/{name}/stat").read_text(errors="replace").rpartition(")")[2].split()
            if group in Path(f"/proc/{name}/cgroup").read_text():
                own.add(int(name))
        except (FileNotFoundError, ProcessLookupError):
            continue  # It has ended meanwhile.
        parents[int(name)] = int(stat[1])
    while below := {pid for pid, parent in parents.items() if parent in own} - own:
        own |= below
    return len(own)


def counts(server: Server) -> dict[str, int]:
    """What this server has on a host where others may come and go: all of it carries its instance id or directory."""
    instance = (server.data_dir / "instance").read_text().strip()
    group = f"/opensandbox-{instance}"
    mounts = Path("/proc/mounts").read_text().splitlines()
    found = {
        "mounts": len([line for line in mounts if instance in line or str(server.data_dir) in line]),
        "veths": len([name for name in os.listdir("/sys/class/net") if name.startswith(f"osb{instance}")]),
        "cgroups": len([path for path, _, _ in os.walk("/sys/fs/cgroup") if group in path]),
        "fds": len(os.listdir(f"/proc/{server.process.pid}/fd")),
        "processes": processes(server, group),
    }
    # Were the names others, nothing would be found and nothing could leak.
    assert found["veths"] and found["cgroups"] and found["processes"] > 1, found
    return found


async def test_nothing_is_left_after_many_sandboxes(make_server):
    from opensandbox.config import ConnectionConfig

    from conftest import API_KEY

    # Few, so that the number of slots at rest varies little.
    server = make_server(extra="ready_slots = 2")
    config = ConnectionConfig(domain=server.domain, api_key=API_KEY)

    async def one() -> None:
        sandbox = await Sandbox.create(IMAGE, connection_config=config)
        await sandbox.commands.run("echo x > /tmp/f; sleep 100 &")
        await sandbox.kill()
        await sandbox.close()

    async def settle() -> dict[str, int]:
        last, same = None, 0
        for _ in range(100):
            await asyncio.sleep(0.1)
            now = counts(server)
            same = same + 1 if now == last else 0
            last = now
            if same >= 8:
                break
        return last

    await asyncio.gather(*(one() for _ in range(40)))
    before = await settle()
    for _ in range(4):
        await asyncio.gather(*(one() for _ in range(40)))
    after = await settle()
    # At rest there may be four slots more or less, each with this much; a leak would be 160 times something.
    of_slot = {"mounts": 0, "veths": 1, "cgroups": 10, "fds": 24, "processes": 2}
    for name, value in before.items():
        assert after[name] <= value + 4 * of_slot[name], (name, before, after)
