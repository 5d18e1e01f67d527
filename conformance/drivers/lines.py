"""A child process that answers lines of JSON with lines of JSON, many at a time."""

from __future__ import annotations

import itertools
import json
import subprocess
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any


class LineProcess:
    """Starts `argv`; messages are matched by their member `id`."""

    def __init__(self, argv: list[str], log: Path, env: dict[str, str] | None = None) -> None:
        self._log = log
        with log.open("ab") as stderr:
            self._process = subprocess.Popen(
                argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, env=env
            )
        self._ids = itertools.count(1)
        self._waiting: dict[int, Future] = {}
        self._lock = threading.Lock()
        self._reader: threading.Thread | None = None

    def first_line(self) -> dict[str, Any]:
        """What the process says before it is asked anything."""
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            raise RuntimeError(f"{self._process.args[0]} did not start:\n{self._log.read_text()[-4000:]}")
        return json.loads(line)

    def ask(self, message: dict[str, Any], timeout: float = 120) -> dict[str, Any]:
        """The answer to `message`."""
        future: Future = Future()
        with self._lock:
            if self._reader is None:
                self._reader = threading.Thread(target=self._read, daemon=True)
                self._reader.start()
            number = next(self._ids)
            self._waiting[number] = future
            self._write({**message, "id": number})
        return future.result(timeout)

    def tell(self, message: dict[str, Any]) -> None:
        """Sends what has no answer."""
        with self._lock:
            self._write(message)

    def close(self) -> None:
        """Ends the process as clients do: by closing its input."""
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _write(self, message: dict[str, Any]) -> None:
        self._process.stdin.write(json.dumps(message).encode() + b"\n")
        self._process.stdin.flush()

    def _read(self) -> None:
        for line in self._process.stdout:
            message = json.loads(line)
            waiting = self._waiting.pop(message.get("id"), None)
            if waiting is not None:
                waiting.set_result(message)
        for waiting in list(self._waiting.values()):
            waiting.set_exception(RuntimeError(f"{self._process.args[0]} ended:\n{self._log.read_text()[-4000:]}"))
