"""Driver of the official `osb`: arguments in, exit code and text out."""

from __future__ import annotations

import base64
import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

from clients import Spec
from drivers import Driver, shapes
from drivers.lines import LineProcess

ERROR = re.compile(r"^(?:ERROR \[(?P<title>[^\]]*)\]|Error): ?(?P<text>.*)", re.S | re.M)


def shell(command: str) -> list[str]:
    """The words of a command, or a shell that runs it: `osb` quotes every word that it is given."""
    return command.split() if re.fullmatch(r"[\w./ -]+", command) else ["bash", "-c", command]


class CliDriver(Driver):
    """Each operation is a method `op_NAME`, each call of `osb` a process."""

    def __init__(self, spec: Spec, log: Path) -> None:
        env = {name: value for name, value in os.environ.items() if not name.startswith("OPEN_SANDBOX")}
        self._process = LineProcess(list(spec.argv), log, env)
        self.version: str = self._process.first_line()["version"]
        self.features = frozenset(name.removeprefix("op_") for name in dir(self) if name.startswith("op_"))
        self._scratch = tempfile.TemporaryDirectory(prefix="osb-conformance-cli-")

    def close(self) -> None:
        self._process.close()
        self._scratch.cleanup()

    def call(self, connection: dict[str, Any], op: str, args: dict[str, Any]) -> Any:
        options = ["--no-color", "--config", f"{self._scratch.name}/none.toml", "--domain", connection["domain"]]
        if connection.get("api_key"):
            options += ["--api-key", connection["api_key"]]
        if connection.get("request_timeout"):
            options += ["--request-timeout", str(connection["request_timeout"])]
        if connection.get("use_server_proxy"):
            options += ["--use-server-proxy"]
        return getattr(self, "op_" + op)(options, **args)

    def osb(self, options: list[str], *argv: str, stdin: bytes = b"") -> tuple[int, bytes, bytes]:
        """Runs `osb`: exit code, standard output, standard error."""
        answer = self._process.ask({"argv": [*options, *argv], "stdin": base64.b64encode(stdin).decode()})
        return answer["exit"], base64.b64decode(answer["stdout"]), base64.b64decode(answer["stderr"])

    def _good(self, options: list[str], *argv: str, stdin: bytes = b"") -> bytes:
        exit_code, stdout, stderr = self.osb(options, *argv, stdin=stdin)
        if exit_code:
            text = stderr.decode(errors="replace")
            found = ERROR.search(text)
            raise shapes.told(f"exit {exit_code}", found["text"] if found else text)
        return stdout

    def _json(self, options: list[str], *argv: str) -> Any:
        return json.loads(self._good(options, *argv, "-o", "json"))

    def op_create(self, o, image, timeout=None, manual=None, ready_timeout=None, skip_health_check=None, **parts):
        argv = ["sandbox", "create", "--image", image]
        if manual or timeout:
            argv += ["--timeout", "none" if manual else f"{timeout}s"]
        if ready_timeout:
            argv += ["--ready-timeout", f"{ready_timeout}s"]
        if skip_health_check:
            argv += ["--skip-health-check"]
        for name, option in (("env", "env"), ("metadata", "metadata"), ("extensions", "extension"), ("resource", "resource")):
            for key, value in parts.get(name, {}).items():
                argv += [f"--{option}", f"{key}={value}"]
        for word in parts.get("entrypoint", []):
            argv += [f"--entrypoint={word}"]
        return self._json(o, *argv)["id"]

    def op_kill(self, o, id):
        self._good(o, "sandbox", "kill", id)

    def op_info(self, o, id):
        return shapes.info(self._json(o, "sandbox", "get", id))

    def op_list(self, o, states=(), metadata=None, page=None, page_size=None):
        argv = ["sandbox", "list"]
        for state in states:
            argv += ["--state", state]
        for key, value in (metadata or {}).items():
            argv += ["--metadata", f"{key}={value}"]
        if page is not None:
            argv += ["--page", str(page)]
        if page_size is not None:
            argv += ["--page-size", str(page_size)]
        found = self._json(o, *argv)
        return shapes.page(found["items"], found["pagination"])

    def op_renew(self, o, id, timeout):
        return self._json(o, "sandbox", "renew", id, "--timeout", f"{timeout}s")["expires_at"]

    def op_pause(self, o, id):
        self._good(o, "sandbox", "pause", id)

    def op_snapshot(self, o, id):
        self._good(o, "snapshot", "create", id, "--name", "named")

    def op_endpoint(self, o, id, port):
        return shapes.endpoint(self._json(o, "sandbox", "endpoint", id, "--port", str(port)))

    def op_healthy(self, o, id):
        return self._json(o, "sandbox", "health", id)["healthy"]

    def op_metrics(self, o, id):
        return shapes.metrics(self._json(o, "sandbox", "metrics", id))

    def op_diagnostics(self, o, id, kind, scope):
        return self._good(o, "diagnostics", kind, id, "--scope", scope).decode()

    def op_run(self, o, id, command=None, argv=None, cwd=None, timeout=None):
        words = ["command", "run", id]
        if cwd:
            words += ["--workdir", cwd]
        if timeout:
            words += ["--timeout", f"{timeout}s"]
        words += ["--argv", "--", *argv] if argv else ["--", *shell(command)]
        return self._ran(o, words)

    def _ran(self, o, words):
        exit_code, stdout, stderr = self.osb(o, *words)
        text = stderr.decode(errors="replace")
        found = ERROR.search(text)
        error = None
        if found and found["title"] == "Execution Error":
            name, _, value = found["text"].strip().partition(": ")
            error, text = {"name": name, "value": value, "traceback": []}, text[: found.start()]
        elif exit_code:
            raise shapes.told(f"exit {exit_code}", found["text"] if found else text)
        return {
            "id": None,
            "stdout": [stdout.decode()] if stdout else [],
            "stderr": [text] if text else [],
            "exit_code": int(error["value"]) if error else 0,
            "error": error,
            "complete": exit_code == 0,
        }

    def op_open_session(self, o, id, cwd=None):
        return self._json(o, "command", "session", "create", id, *(["--workdir", cwd] if cwd else []))["session_id"]

    def op_run_in_session(self, o, id, session, command, cwd=None, timeout=None):
        words = ["command", "session", "run", id, session]
        words += ["--workdir", cwd] if cwd else []
        words += ["--timeout", f"{timeout}s"] if timeout else []
        # Each word is quoted: what shall change the session's state cannot be in a shell of its own.
        return self._ran(o, [*words, "--", *command.split()])

    def op_delete_session(self, o, id, session):
        self._good(o, "command", "session", "delete", id, session)

    def op_start(self, o, id, command):
        return json.loads(self._good(o, "command", "run", id, "-d", "-o", "json", "--", *shell(command)))["execution_id"]

    def op_status(self, o, id, execution):
        found = self._json(o, "command", "status", id, execution)
        return {
            "running": found["running"],
            "exit_code": found.get("exit_code"),
            "content": found.get("content"),
            "finished": found.get("finished_at") is not None,
        }

    def op_logs(self, o, id, execution, cursor=None):
        found = self._json(o, "command", "logs", id, execution, *(["--cursor", str(cursor)] if cursor is not None else []))
        return {"content": found["content"], "cursor": found["cursor"]}

    def op_interrupt(self, o, id, execution):
        self._good(o, "command", "interrupt", id, execution)

    def op_write(self, o, id, files):
        for file in files:
            data = base64.b64decode(file["data"])
            try:
                data.decode()
            except UnicodeDecodeError:
                with tempfile.NamedTemporaryFile(dir=self._scratch.name) as local:
                    local.write(data)
                    local.flush()
                    self._good(o, "file", "upload", id, local.name, file["path"])
                continue
            words = [word for name in ("mode", "owner", "group") if name in file for word in (f"--{name}", str(file[name]))]
            self._good(o, "file", "write", id, file["path"], *words, stdin=data)

    def op_read(self, o, id, path):
        return self._good(o, "file", "cat", id, path).decode()

    def op_read_bytes(self, o, id, path):
        with tempfile.TemporaryDirectory(dir=self._scratch.name) as directory:
            local = Path(directory, "download")
            self._good(o, "file", "download", id, path, str(local))
            return base64.b64encode(local.read_bytes()).decode()

    def op_stream(self, o, id, path):
        return len(base64.b64decode(self.op_read_bytes(o, id, path)))

    def op_stat(self, o, id, paths):
        rows = self._json(o, "file", "info", id, *paths)
        return {row["path"]: {**row, "type": row.get("entry_type", row.get("type"))} for row in rows}

    def op_search(self, o, id, path, pattern):
        found = self._json(o, "file", "search", id, path, "--pattern", pattern)
        return [item["path"] for item in (found["items"] if isinstance(found, dict) else found)]

    def op_mkdir(self, o, id, paths, mode=None):
        self._good(o, "file", "mkdir", id, *paths, *(["--mode", str(mode)] if mode is not None else []))

    def op_rmdir(self, o, id, paths):
        self._good(o, "file", "rmdir", id, *paths)

    def op_delete(self, o, id, paths):
        self._good(o, "file", "rm", id, "--", *paths)

    def op_move(self, o, id, source, destination):
        self._good(o, "file", "mv", id, source, destination)

    def op_chmod(self, o, id, path, mode, **owner):
        words = [word for name, value in owner.items() for word in (f"--{name}", value)]
        self._good(o, "file", "chmod", id, path, "--mode", str(mode), *words)

    def op_replace(self, o, id, path, old, new):
        self._good(o, "file", "replace", id, path, "--old", old, "--new", new)
