"""Drives the official Python SDK of the interpreter it runs under, by JSON lines.

Arguments: `async` or `sync`, which of the SDK's two faces to use. A line in is `{"id", "op", "args", "connection"}`, a
line out `{"id", "ok"}` or `{"id", "error"}`; requests are carried out as they come, many at a time. The first line out
tells the SDK's version and what it can do. Bytes travel as base64.
"""

import asyncio
import base64
import inspect
import json
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from importlib.metadata import version

import opensandbox
from opensandbox import models
from opensandbox.exceptions import SandboxException
from opensandbox.models import execd, sandboxes

SYNC = sys.argv[1] == "sync"
if SYNC:
    from opensandbox import SandboxManagerSync as Manager
    from opensandbox import SandboxSync as Sandbox
    from opensandbox.config import ConnectionConfigSync as Config
    from opensandbox.models.execd_sync import ExecutionHandlersSync as Handlers
else:
    from opensandbox import Sandbox
    from opensandbox import SandboxManager as Manager
    from opensandbox.config import ConnectionConfig as Config
    from opensandbox.models.execd import ExecutionHandlers as Handlers


async def do(call, *args, **kwargs):
    """Calls the SDK: in a thread of its own when it blocks."""
    return await (asyncio.to_thread(call, *args, **kwargs) if SYNC else call(*args, **kwargs))


def callback(function):
    """A handler of the kind that the SDK takes."""
    if SYNC:
        return function

    async def handler(value):
        function(value)

    return handler


def seconds(value):
    return None if value is None else timedelta(seconds=value)


def given(**options):
    """Those that were set."""
    return {name: value for name, value in options.items() if value is not None}


def moment(value):
    return None if value is None else value.isoformat()


def info(value):
    return {
        "id": value.id,
        "state": value.status.state,
        "reason": value.status.reason,
        "message": value.status.message,
        "image": value.image.image if value.image else None,
        "entrypoint": value.entrypoint,
        "metadata": value.metadata or {},
        "extensions": getattr(value, "extensions", None) or {},
        "created_at": moment(value.created_at),
        "expires_at": moment(value.expires_at),
    }


def execution(value, arrivals=()):
    error = value.error
    return {
        "id": value.id,
        "stdout": [message.text for message in value.logs.stdout],
        "stderr": [message.text for message in value.logs.stderr],
        "text": value.text,
        "exit_code": value.exit_code,
        "error": error and {"name": error.name, "value": error.value, "traceback": error.traceback},
        "complete": value.complete is not None,
        "arrivals": list(arrivals),
    }


def entry(value):
    return {
        "path": value.path,
        "type": getattr(value, "entry_type", None),
        "mode": value.mode,
        "owner": value.owner,
        "group": value.group,
        "size": value.size,
        "modified_at": moment(value.modified_at),
    }


class Agent:
    """The operations. Each is a method `op_NAME(connection, …)`."""

    def __init__(self):
        self.sandboxes = {}

    def config(self, connection):
        return Config(
            **given(
                domain=connection["domain"],
                api_key=connection.get("api_key"),
                headers=connection.get("headers"),
                request_timeout=seconds(connection.get("request_timeout")),
                use_server_proxy=connection.get("use_server_proxy"),
            )
        )

    async def manager(self, connection, method, *args):
        made = Manager.create(self.config(connection))
        manager = made if SYNC else await made
        try:
            return await do(getattr(manager, method), *args)
        finally:
            await do(manager.close)

    async def op_create(self, c, image, timeout=600, ready_timeout=None, manual=None, platform=None, **options):
        if platform:
            options["platform"] = sandboxes.PlatformSpec(**platform)
        sandbox = await do(
            Sandbox.create,
            image,
            connection_config=self.config(c),
            timeout=None if manual else seconds(timeout),
            **given(ready_timeout=seconds(ready_timeout), **options),
        )
        self.sandboxes[sandbox.id] = sandbox
        return sandbox.id

    async def op_connect(self, c, id):
        self.sandboxes[id] = await do(Sandbox.connect, id, connection_config=self.config(c))

    async def op_close(self, c, id):
        await do(self.sandboxes[id].close)

    async def op_kill(self, c, id):
        await (do(self.sandboxes[id].kill) if id in self.sandboxes else self.manager(c, "kill_sandbox", id))

    async def op_info(self, c, id):
        return info(
            await (do(self.sandboxes[id].get_info) if id in self.sandboxes else self.manager(c, "get_sandbox_info", id))
        )

    async def op_list(self, c, **filters):
        page = await self.manager(c, "list_sandbox_infos", sandboxes.SandboxFilter(**filters))
        return {"items": [info(item) for item in page.sandbox_infos], "pagination": page.pagination.model_dump()}

    async def op_renew(self, c, id, timeout):
        return moment((await do(self.sandboxes[id].renew, seconds(timeout))).expires_at)

    async def op_patch_metadata(self, c, id, patch):
        return (await do(self.sandboxes[id].patch_metadata, patch)).metadata or {}

    async def op_pause(self, c, id):
        await do(self.sandboxes[id].pause)

    async def op_snapshot(self, c, id):
        await do(self.sandboxes[id].create_snapshot, "named")

    async def op_endpoint(self, c, id, port):
        found = await do(self.sandboxes[id].get_endpoint, port)
        return {"endpoint": found.endpoint, "headers": found.headers or {}}

    async def op_signed_endpoint(self, c, id, port, expires):
        return (await do(self.sandboxes[id].get_signed_endpoint, port, expires)).endpoint

    async def op_healthy(self, c, id):
        return await do(self.sandboxes[id].is_healthy)

    async def op_metrics(self, c, id):
        found = await do(self.sandboxes[id].get_metrics)
        return {
            "cpu_count": found.cpu_count,
            "cpu_percent": found.cpu_used_percentage,
            "memory_total": found.memory_total_in_mib,
            "memory_used": found.memory_used_in_mib,
            "timestamp": found.timestamp,
        }

    async def op_diagnostics(self, c, id, kind, scope):
        sandbox = self.sandboxes[id]
        call = sandbox.get_diagnostic_logs if kind == "logs" else sandbox.get_diagnostic_events
        return (await do(call, scope)).content

    async def op_run(
        self, c, id, command=None, argv=None, cwd=None, env=None, timeout=None, uid=None, gid=None, interrupt_at_init=False
    ):
        commands = self.sandboxes[id].commands
        began, arrivals = time.monotonic(), []
        handlers = {"on_stdout": callback(lambda message: arrivals.append(time.monotonic() - began))}
        if interrupt_at_init and SYNC:
            handlers["on_init"] = lambda init: commands.interrupt(init.id)
        elif interrupt_at_init:

            async def interrupt(init):
                await commands.interrupt(init.id)

            handlers["on_init"] = interrupt
        opts = execd.RunCommandOpts(
            **given(working_directory=cwd, envs=env, timeout=seconds(timeout), uid=uid, gid=gid)
        )
        run = await do(commands.run, argv or command, opts=opts, handlers=Handlers(**handlers))
        return execution(run, arrivals)

    async def op_start(self, c, id, command):
        run = await do(self.sandboxes[id].commands.run, command, opts=execd.RunCommandOpts(background=True))
        return run.id

    async def op_status(self, c, id, execution):
        found = await do(self.sandboxes[id].commands.get_command_status, execution)
        return {
            "running": found.running,
            "exit_code": found.exit_code,
            "content": found.content,
            "finished": found.finished_at is not None,
        }

    async def op_logs(self, c, id, execution, cursor=None):
        found = await do(self.sandboxes[id].commands.get_background_command_logs, execution, cursor)
        return {"content": found.content, "cursor": found.cursor}

    async def op_interrupt(self, c, id, execution):
        await do(self.sandboxes[id].commands.interrupt, execution)

    async def op_open_session(self, c, id, cwd=None):
        return await do(self.sandboxes[id].commands.create_session, **given(working_directory=cwd))

    async def op_run_in_session(self, c, id, session, command, cwd=None, timeout=None):
        options = given(working_directory=cwd, timeout=seconds(timeout))
        return execution(await do(self.sandboxes[id].commands.run_in_session, session, command, **options), [])

    async def op_delete_session(self, c, id, session):
        await do(self.sandboxes[id].commands.delete_session, session)

    async def op_set_env(self, c, id, key, value):
        await do(self.sandboxes[id].commands.set_env, key, value)

    async def op_write(self, c, id, files):
        await do(
            self.sandboxes[id].files.write_files,
            [models.WriteEntry(**{**file, "data": base64.b64decode(file["data"])}) for file in files],
        )

    async def op_read(self, c, id, path, range=None, offset=None, limit=None):
        return await do(
            self.sandboxes[id].files.read_file, path, **given(range_header=range, offset=offset, limit=limit)
        )

    async def op_read_bytes(self, c, id, path):
        return base64.b64encode(await do(self.sandboxes[id].files.read_bytes, path)).decode()

    async def op_stream(self, c, id, path):
        digest = []
        if SYNC:
            await asyncio.to_thread(lambda: digest.extend(map(len, self.sandboxes[id].files.read_bytes_stream(path))))
        else:
            async for chunk in await self.sandboxes[id].files.read_bytes_stream(path):
                digest.append(len(chunk))
        return sum(digest)

    async def op_stat(self, c, id, paths):
        found = await do(self.sandboxes[id].files.get_file_info, paths)
        return {path: entry(value) for path, value in found.items()}

    async def op_search(self, c, id, path, pattern):
        found = await do(self.sandboxes[id].files.search, models.SearchEntry(path=path, pattern=pattern))
        return [item.path for item in found]

    async def op_list_directory(self, c, id, path, depth=None):
        asked = models.DirectoryListEntry(path=path, depth=depth)
        return [entry(item) for item in await do(self.sandboxes[id].files.list_directory, asked)]

    async def op_mkdir(self, c, id, paths, mode=None):
        entries = [models.WriteEntry(path=path, **given(mode=mode)) for path in paths]
        await do(self.sandboxes[id].files.create_directories, entries)

    async def op_rmdir(self, c, id, paths):
        await do(self.sandboxes[id].files.delete_directories, paths)

    async def op_delete(self, c, id, paths):
        await do(self.sandboxes[id].files.delete_files, paths)

    async def op_move(self, c, id, source, destination):
        await do(
            self.sandboxes[id].files.move_files, [models.MoveEntry(src=source, dest=destination)]
        )

    async def op_chmod(self, c, id, path, mode, owner=None, group=None):
        asked = models.SetPermissionEntry(path=path, mode=mode, owner=owner, group=group)
        await do(self.sandboxes[id].files.set_permissions, [asked])

    async def op_replace(self, c, id, path, old, new, count=False):
        asked = [models.ContentReplaceEntry(path=path, old_content=old, new_content=new)]
        files = self.sandboxes[id].files
        if not count:
            await do(files.replace_contents, asked)
            return None
        return (await do(files.replace_contents_detailed, asked))[0].replaced_count


def features():
    """What this SDK can do, read off its signatures: `operation` or `operation.option`."""
    found = {name.removeprefix("op_") for name in vars(Agent) if name.startswith("op_")}
    found |= {"connection.headers", "connection.api_key", "connection.request_timeout", "connection.use_server_proxy"}
    create = inspect.signature(Sandbox.create).parameters
    found |= {f"create.{name}" for name in create} | {"create.manual"}
    commands = inspect.signature(opensandbox.services.Commands.run).parameters["command"].annotation
    found |= {f"run.{name}" for name in ("arrivals", "cwd", "env", "exact", "interrupt_at_init", "timeout", "uid")}
    lines = [execd.OutputMessage(text=text, timestamp=1) for text in ("a\n", "b\n")]
    if execd.Execution(logs=execd.ExecutionLogs(stdout=lines)).text == "a\nb":
        found.add("run.joined")
    if "list" in str(commands):
        found.add("run.argv")
    for name, member in (
        ("patch_metadata", "patch_metadata"),
        ("snapshot", "create_snapshot"),
        ("signed_endpoint", "get_signed_endpoint"),
        ("diagnostics", "get_diagnostic_logs"),
    ):
        if not hasattr(Sandbox, member):
            found.discard(name)
    if not hasattr(opensandbox.services.Commands, "set_env"):
        found.discard("set_env")
    files = opensandbox.services.Filesystem
    if not hasattr(files, "list_directory"):
        found.discard("list_directory")
    if hasattr(files, "replace_contents_detailed"):
        found.add("replace.count")
    read = inspect.signature(files.read_file).parameters
    found.add("read.range")
    if "offset" in read:
        found.add("read.lines")
    found |= {"chmod.owner", "list.page", "write.bytes", "write.many", "write.owner"}
    return sorted(found)


def problem(error):
    if not isinstance(error, SandboxException):
        return {"kind": type(error).__name__, "message": str(error)}
    retry_after = getattr(error, "retry_after", None)
    return {
        "kind": type(error).__name__,
        "bases": [base.__name__ for base in type(error).__mro__],
        "status": getattr(error, "status_code", None),
        "code": error.error.code,
        "message": error.error.message or str(error),
        "body": (getattr(error, "response_body", None) or b"").decode(errors="replace"),
        "request_id": error.request_id,
        "retry_after": retry_after.total_seconds() if retry_after else None,
    }


async def main():
    agent, lock, loop = Agent(), threading.Lock(), asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(64))

    def say(line):
        with lock:
            sys.stdout.write(json.dumps(line) + "\n")
            sys.stdout.flush()

    async def serve(request):
        try:
            done = await getattr(agent, "op_" + request["op"])(request["connection"], **request["args"])
            say({"id": request["id"], "ok": done})
        except Exception as error:  # Whatever the client raised is the answer.
            say({"id": request["id"], "error": problem(error)})

    say({"version": version("opensandbox"), "features": features()})
    reader = asyncio.StreamReader(limit=1 << 30)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(0, "rb"))
    tasks = set()
    while line := await reader.readline():
        task = asyncio.create_task(serve(json.loads(line)))
        tasks.add(task)
        task.add_done_callback(tasks.discard)


asyncio.run(main())
