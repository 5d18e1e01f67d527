"""Driver of the SDKs: an agent in the SDK's own language does the work."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from clients import Spec
from drivers import ClientError, Driver
from drivers.lines import LineProcess


class SdkDriver(Driver):
    """Passes operations on to the agent."""

    def __init__(self, spec: Spec, log: Path) -> None:
        env = {name: value for name, value in os.environ.items() if not name.startswith("OPEN_SANDBOX")}
        self._process = LineProcess(list(spec.argv), log, env)
        hello = self._process.first_line()
        self.version: str = hello["version"]
        self.features = frozenset(hello["features"])

    def call(self, connection: dict[str, Any], op: str, args: dict[str, Any]) -> Any:
        answer = self._process.ask({"op": op, "connection": connection, "args": args})
        if "error" in answer:
            raise ClientError(answer["error"])
        return answer["ok"]

    def close(self) -> None:
        self._process.close()
