"""Runs the official `osb` many times in little time: its modules are loaded once, each call is a fork of its own.

By JSON lines: in `{"id", "argv", "stdin"}`, out `{"id", "exit", "stdout", "stderr"}`; bytes as base64.
"""

import base64
import json
import os
import selectors
import sys
import tempfile
from importlib.metadata import version

from opensandbox_cli.commands import command, file, sandbox  # noqa: F401  (loaded for all children)
from opensandbox_cli.main import cli


def child(argv, stdin, stdout, stderr):
    for source, target in ((stdin, 0), (stdout, 1), (stderr, 2)):
        os.dup2(source.fileno(), target)
    sys.stdin, sys.stdout, sys.stderr = open(0, closefd=False), open(1, "w", closefd=False), open(2, "w", closefd=False)
    status = 0
    try:
        cli(argv, prog_name="osb")
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        import traceback

        traceback.print_exc()
        status = 99
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def main():
    answers = os.fdopen(os.dup(1), "w")

    def say(line):
        answers.write(json.dumps(line) + "\n")
        answers.flush()

    def begin(line):
        request = json.loads(line)
        stdin, stdout, stderr = (tempfile.TemporaryFile() for _ in range(3))
        stdin.write(base64.b64decode(request["stdin"]))
        stdin.seek(0)
        pid = os.fork()
        if pid == 0:
            child(request["argv"], stdin, stdout, stderr)
        end = os.pidfd_open(pid)

        def finish():
            watch.unregister(end)
            os.close(end)
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            texts = []
            for output in (stdout, stderr):
                output.seek(0)
                texts.append(base64.b64encode(output.read()).decode())
                output.close()
            stdin.close()
            say({"id": request["id"], "exit": status, "stdout": texts[0], "stderr": texts[1]})

        watch.register(end, selectors.EVENT_READ, finish)

    say({"version": version("opensandbox-cli")})
    watch = selectors.DefaultSelector()
    watch.register(0, selectors.EVENT_READ, None)
    waiting = b""
    while True:
        for key, _ in watch.select():
            if key.data:
                key.data()
                continue
            read = os.read(0, 1 << 20)
            if not read:
                return
            *lines, waiting = (waiting + read).split(b"\n")
            for line in lines:
                begin(line)


main()
