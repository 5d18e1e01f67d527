"""A first sandbox, by the official Python SDK: run commands, move files in and out, throw it away.

Expects a running server. Its address and key come from OPEN_SANDBOX_DOMAIN and OPEN_SANDBOX_API_KEY, which the SDK
reads by itself; `make quickstart` sets both.
"""

import asyncio
import time
from contextlib import contextmanager
from datetime import timedelta

from opensandbox import Sandbox
from opensandbox.models import SearchEntry, WriteEntry
from opensandbox.models.execd import RunCommandOpts

# The host's own programs, read-only, under a layer of the sandbox's own: nothing has to be downloaded.
IMAGE = "host"

PRIMES = """\
import sys
limit = int(sys.argv[1])
print(*(n for n in range(2, limit) if all(n % d for d in range(2, int(n**0.5) + 1))))
"""


@contextmanager
def step(title: str):
    began = time.perf_counter()
    yield
    print(f"{(time.perf_counter() - began) * 1000:8.1f} ms  {title}")


async def main() -> None:
    with step("sandbox made and ready"):
        sandbox = await Sandbox.create(IMAGE, timeout=timedelta(minutes=5), metadata={"example": "quickstart"})

    try:
        with step("command run"):
            hello = await sandbox.commands.run("echo hello from $(hostname), process $$")
        print(f"             {hello.text}")

        with step("command failed, as it should"):
            failed = await sandbox.commands.run("cat /etc/shadow && touch /usr/bin/mine")
        print(f"             exit code {failed.exit_code}: {failed.logs.stderr[0].text.strip()}")

        with step("two files written"):
            await sandbox.files.write_files(
                [
                    WriteEntry(path="/tmp/work/primes.py", data=PRIMES, mode=644),
                    WriteEntry(path="/tmp/work/limit.txt", data="30", mode=600),
                ]
            )

        with step("program run on them"):
            result = await sandbox.commands.run(
                "python3 primes.py $(cat limit.txt) | tee result.txt",
                opts=RunCommandOpts(working_directory="/tmp/work"),
            )
        print(f"             {result.text}")

        with step("result read back"):
            content = await sandbox.files.read_file("/tmp/work/result.txt")
            found = await sandbox.files.search(SearchEntry(path="/tmp/work", pattern="*.txt"))
        print(f"             {len(content)} characters; files: {', '.join(sorted(entry.path for entry in found))}")
    finally:
        with step("sandbox gone"):
            await sandbox.kill()
            await sandbox.close()


if __name__ == "__main__":
    asyncio.run(main())
