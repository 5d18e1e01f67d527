"""Runs last: what a thousand uses leave on the host."""

import asyncio
import os
from pathlib import Path

from opensandbox import Sandbox

from conftest import IMAGE


def counts(pid: int) -> dict[str, int]:
    return {
        "mounts": len(Path("/proc/mounts").read_text().splitlines()),
        "veths": len([name for name in os.listdir("/sys/class/net")]),
        "cgroups": sum(len(directories) for _, directories, _ in os.walk("/sys/fs/cgroup")),
        "fds": len(os.listdir(f"/proc/{pid}/fd")),
        "processes": len([name for name in os.listdir("/proc") if name.isdigit()]),
    }


async def test_nothing_is_left_after_many_sandboxes(make_server):
    from opensandbox.config import ConnectionConfig

    from conftest import API_KEY

    server = make_server(extra="ready_slots = 16")
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
            now = counts(server.process.pid)
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
    for name, value in before.items():
        assert after[name] <= value + (8 if name == "processes" else 4), (name, before, after)
