"""Driver of the official MCP server: JSON-RPC over its standard input and output, one process per connection."""

from __future__ import annotations

import base64
import json
import os
import threading
from pathlib import Path
from typing import Any

from clients import Spec
from drivers import Driver, shapes
from drivers.lines import LineProcess

PROTOCOL = "2025-06-18"


class McpServer:
    """A running MCP server, initialised."""

    def __init__(self, argv: list[str], log: Path) -> None:
        env = {name: value for name, value in os.environ.items() if not name.startswith("OPEN_SANDBOX")}
        self._process = LineProcess(argv, log, env)
        hello = self.ask(
            "initialize",
            {"protocolVersion": PROTOCOL, "capabilities": {}, "clientInfo": {"name": "conformance", "version": "1"}},
        )
        self.name: str = hello["serverInfo"]["name"]
        self._process.tell({"jsonrpc": "2.0", "method": "notifications/initialized"})

    def ask(self, method: str, params: dict[str, Any]) -> Any:
        answer = self._process.ask({"jsonrpc": "2.0", "method": method, "params": params})
        if "error" in answer:
            raise shapes.told("JSON-RPC error", answer["error"]["message"])
        return answer["result"]

    def tool(self, name: str, **arguments: Any) -> Any:
        """Calls a tool; its structured result."""
        result = self.ask("tools/call", {"name": name, "arguments": arguments})
        if result.get("isError"):
            raise shapes.told("isError", result["content"][0]["text"])
        return result["structuredContent"]

    def close(self) -> None:
        self._process.close()


class McpDriver(Driver):
    """Each operation is a method `op_NAME` that calls one tool."""

    def __init__(self, spec: Spec, log: Path) -> None:
        self._argv, self._log = list(spec.argv), log
        self._servers: dict[str, McpServer] = {}
        self._lock = threading.Lock()
        self.features = frozenset(name.removeprefix("op_") for name in dir(self) if name.startswith("op_"))
        self.version = spec.version

    def close(self) -> None:
        for server in self._servers.values():
            server.close()

    def server(self, connection: dict[str, Any]) -> McpServer:
        """The server process for `connection`."""
        argv = ["--domain", connection["domain"]]
        if connection.get("api_key"):
            argv += ["--api-key", connection["api_key"]]
        if connection.get("request_timeout"):
            argv += ["--request-timeout-seconds", str(connection["request_timeout"])]
        if connection.get("use_server_proxy"):
            argv += ["--use-server-proxy"]
        key = json.dumps(argv)
        with self._lock:
            if key not in self._servers:
                self._servers[key] = McpServer([*self._argv, *argv], self._log)
            return self._servers[key]

    def prepare(self, connection: dict[str, Any]) -> None:
        self.server(connection)

    def call(self, connection: dict[str, Any], op: str, args: dict[str, Any]) -> Any:
        return getattr(self, "op_" + op)(self.server(connection), **args)

    def op_create(self, s, image, timeout=600, ready_timeout=None, **options):
        if ready_timeout:
            options["ready_timeout_seconds"] = ready_timeout
        return s.tool("sandbox_create", image=image, timeout_seconds=timeout, **options)["sandbox_id"]

    def op_connect(self, s, id):
        s.tool("sandbox_connect", sandbox_id=id)

    def op_kill(self, s, id):
        s.tool("sandbox_kill", sandbox_id=id)

    def op_info(self, s, id):
        return shapes.info(s.tool("sandbox_get_info", sandbox_id=id))

    def op_list(self, s, **filters):
        found = s.tool("sandbox_list", filter=filters)
        return shapes.page(found["sandbox_infos"], found["pagination"])

    def op_renew(self, s, id, timeout):
        return s.tool("sandbox_renew", sandbox_id=id, timeout_seconds=timeout)["expires_at"]

    def op_endpoint(self, s, id, port):
        return shapes.endpoint(s.tool("sandbox_get_endpoint", sandbox_id=id, port=port, connect_if_missing=True))

    def op_healthy(self, s, id):
        return s.tool("sandbox_healthcheck", sandbox_id=id, connect_if_missing=True)["healthy"]

    def op_metrics(self, s, id):
        return shapes.metrics(s.tool("sandbox_get_metrics", sandbox_id=id, connect_if_missing=True))

    def op_run(self, s, id, command, cwd=None):
        where = {"working_directory": cwd} if cwd else {}
        run = s.tool("command_run", sandbox_id=id, command=command, connect_if_missing=True, **where)
        error = run.get("error")
        return {
            "id": run["id"],
            "stdout": [message["text"] for message in run["logs"]["stdout"]],
            "stderr": [message["text"] for message in run["logs"]["stderr"]],
            "exit_code": run["exit_code"],
            "error": error and {name: error[name] for name in ("name", "value", "traceback")},
            "complete": run.get("complete") is not None,
        }

    def op_start(self, s, id, command):
        return s.tool("command_run", sandbox_id=id, command=command, background=True, connect_if_missing=True)["id"]

    def op_interrupt(self, s, id, execution):
        s.tool("command_interrupt", sandbox_id=id, execution_id=execution, connect_if_missing=True)

    def op_write(self, s, id, files):
        for file in files:
            data = base64.b64decode(file.pop("data"))
            try:
                text = {"content": data.decode()}
            except UnicodeDecodeError:
                text = {"content": data.decode("latin-1"), "encoding": "latin-1"}
            s.tool("file_write", sandbox_id=id, connect_if_missing=True, **file, **text)

    def op_read(self, s, id, path, range=None):
        part = {"range_header": range} if range else {}
        return s.tool("file_read", sandbox_id=id, path=path, connect_if_missing=True, **part)["content"]

    def op_read_bytes(self, s, id, path):
        found = s.tool("file_read", sandbox_id=id, path=path, encoding="latin-1", connect_if_missing=True)
        return base64.b64encode(found["content"].encode("latin-1")).decode()

    def op_search(self, s, id, path, pattern):
        found = s.tool("file_search", sandbox_id=id, path=path, pattern=pattern, connect_if_missing=True)
        return [item["path"] for item in found["result"]]

    def op_mkdir(self, s, id, paths, mode=None):
        entries = [{"path": path} | ({} if mode is None else {"mode": mode}) for path in paths]
        s.tool("file_create_directories", sandbox_id=id, entries=entries, connect_if_missing=True)

    def op_rmdir(self, s, id, paths):
        s.tool("file_delete_directories", sandbox_id=id, paths=paths, connect_if_missing=True)

    def op_delete(self, s, id, paths):
        s.tool("file_delete", sandbox_id=id, paths=paths, connect_if_missing=True)

    def op_move(self, s, id, source, destination):
        entries = [{"source": source, "destination": destination}]
        s.tool("file_move", sandbox_id=id, entries=entries, connect_if_missing=True)

    def op_replace(self, s, id, path, old, new, count=False):
        entries = [{"path": path, "old_content": old, "new_content": new}]
        found = s.tool("file_replace_contents", sandbox_id=id, entries=entries, connect_if_missing=True)
        return found["result"][0]["replaced_count"] if count else None
