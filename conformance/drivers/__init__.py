"""One way to speak to every official client.

`Client` is what behaviours use. Below it a driver per kind of client carries out named operations with plain values:
`sdk` (Python and JavaScript), `cli` and `mcp`. Which operations and options a client has is told in `clients.py`.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from typing import Any, Protocol

from clients import Spec


class ClientError(Exception):
    """An operation that the client refused or that failed, in the client's own terms."""

    def __init__(self, told: dict[str, Any]) -> None:
        super().__init__(f"{told['kind']}: [{told.get('code')}] {told.get('message')}")
        self.kind: str = told["kind"]
        self.bases: list[str] = told.get("bases") or []
        self.status: int | None = told.get("status")
        self.code: str | None = told.get("code")
        self.message: str = told.get("message") or ""
        #: The answer itself, where the client keeps it.
        self.body: str = told.get("body") or ""
        self.request_id: str | None = told.get("request_id")
        self.retry_after: float | None = told.get("retry_after")


class Driver(Protocol):
    """Carries out operations."""

    def call(self, connection: dict[str, Any], op: str, args: dict[str, Any]) -> Any: ...

    def prepare(self, connection: dict[str, Any]) -> None:
        """Does what a first call by `connection` would have to do."""

    def close(self) -> None: ...


@dataclass
class Run:
    """A command that was run to its end."""

    id: str | None
    stdout: list[str]
    stderr: list[str]
    exit_code: int | None
    error: dict[str, Any] | None
    complete: bool
    text: str | None = None
    arrivals: list[float] = field(default_factory=list)

    @property
    def output(self) -> str:
        return "".join(self.stdout)


class Client:
    """An official client with a connection to a server."""

    def __init__(self, spec: Spec, driver: Driver, connection: dict[str, Any], declared: frozenset[str]) -> None:
        self.spec = spec
        self._driver = driver
        self._connection = connection
        self._declared = declared
        #: Sandboxes that were made, by whichever connection.
        self.created: list[str] = []

    def at(self, **changes: Any) -> Client:
        """The same client, connected otherwise."""
        for name in set(changes) - {"domain"}:
            self._check(f"connection.{name}")
        other = Client(self.spec, self._driver, {**self._connection, **changes}, self._declared)
        other.created = self.created
        self._driver.prepare(other._connection)
        return other

    def call(self, op: str, *implied: str, **args: Any) -> Any:
        """Operation `op`; members that are `None` are left out. `implied` are features that no argument shows."""
        args = {name: value for name, value in args.items() if value is not None}
        for feature in (op, *implied, *(f"{op}.{name}" for name in args)):
            self._check(feature)
        return self._driver.call(self._connection, op, args)

    def _check(self, feature: str) -> None:
        if self.spec.lacks(feature) or (self.spec.optional(feature) and feature not in self._declared):
            raise AssertionError(f"the behaviour must name {feature!r}, which not every client has")

    def create(self, image: str = "host", **options: Any) -> Box:
        box = Box(self, self.call("create", image=image, **options))
        self.created.append(box.id)
        return box

    def box(self, id: str) -> Box:
        """A sandbox that this client may never have seen."""
        return Box(self, id)

    def connect(self, id: str) -> Box:
        self.call("connect", id=id)
        return Box(self, id)

    def list(self, **filters: Any) -> dict[str, Any]:
        return self.call("list", **filters)


@dataclass
class Box:
    """A sandbox as one client sees it."""

    client: Client
    id: str

    def _call(self, op: str, *implied: str, **args: Any) -> Any:
        return self.client.call(op, *implied, id=self.id, **args)

    def kill(self) -> None:
        self._call("kill")

    def close(self) -> None:
        self._call("close")

    def info(self) -> dict[str, Any]:
        return self._call("info")

    def renew(self, timeout: float) -> str:
        return self._call("renew", timeout=timeout)

    def patch_metadata(self, patch: dict[str, str | None]) -> dict[str, str]:
        return self._call("patch_metadata", patch=patch)

    def pause(self) -> None:
        self._call("pause")

    def snapshot(self) -> None:
        self._call("snapshot")

    def endpoint(self, port: int) -> dict[str, Any]:
        return self._call("endpoint", port=port)

    def signed_endpoint(self, port: int, expires: int) -> str:
        return self._call("signed_endpoint", port=port, expires=expires)

    def healthy(self) -> bool:
        return self._call("healthy")

    def metrics(self) -> dict[str, Any]:
        return self._call("metrics")

    def diagnostics(self, kind: str, scope: str) -> str:
        return self._call("diagnostics", kind=kind, scope=scope)

    def run(self, command: str | None = None, *implied: str, **options: Any) -> Run:
        return Run(**self._call("run", *implied, command=command, **options))

    def start(self, command: str) -> str:
        return self._call("start", command=command)

    def status(self, execution: str) -> dict[str, Any]:
        return self._call("status", execution=execution)

    def logs(self, execution: str, cursor: int | None = None) -> dict[str, Any]:
        return self._call("logs", execution=execution, cursor=cursor)

    def interrupt(self, execution: str) -> None:
        self._call("interrupt", execution=execution)

    def open_session(self, cwd: str | None = None) -> str:
        return self._call("open_session", cwd=cwd)

    def run_in_session(self, session: str, command: str, **options: Any) -> Run:
        return Run(**self._call("run_in_session", session=session, command=command, **options))

    def delete_session(self, session: str) -> None:
        self._call("delete_session", session=session)

    def set_env(self, key: str, value: str) -> None:
        self._call("set_env", key=key, value=value)

    def write(self, path: str, data: str, **options: Any) -> None:
        """Writes text by the client's plainest way."""
        implied = [f"write.{name}" for name in options]
        entry = {"path": path, "data": base64.b64encode(data.encode()).decode(), **options}
        self._call("write", *implied, files=[entry])

    def write_many(self, files: dict[str, str]) -> None:
        entries = [{"path": path, "data": base64.b64encode(data.encode()).decode()} for path, data in files.items()]
        self._call("write", "write.many", files=entries)

    def write_bytes(self, path: str, data: bytes) -> None:
        entry = {"path": path, "data": base64.b64encode(data).decode()}
        self._call("write", "write.bytes", files=[entry])

    def read(self, path: str, **options: Any) -> str:
        return self._call("read", path=path, **options)

    def read_bytes(self, path: str) -> bytes:
        return base64.b64decode(self._call("read_bytes", path=path))

    def stream(self, path: str) -> int:
        """Length of a file that is read piece by piece."""
        return self._call("stream", path=path)

    def stat(self, *paths: str) -> dict[str, dict[str, Any]]:
        return self._call("stat", paths=list(paths))

    def search(self, path: str, pattern: str) -> set[str]:
        return set(self._call("search", path=path, pattern=pattern))

    def list_directory(self, path: str, depth: int | None = None) -> list[dict[str, Any]]:
        return self._call("list_directory", path=path, depth=depth)

    def mkdir(self, *paths: str, mode: int | None = None) -> None:
        self._call("mkdir", paths=list(paths), mode=mode)

    def rmdir(self, *paths: str) -> None:
        self._call("rmdir", paths=list(paths))

    def delete(self, *paths: str) -> None:
        self._call("delete", paths=list(paths))

    def move(self, source: str, destination: str) -> None:
        self._call("move", source=source, destination=destination)

    def chmod(self, path: str, mode: int, **owner: str) -> None:
        self._call("chmod", *(["chmod.owner"] if owner else []), path=path, mode=mode, **owner)

    def replace(self, path: str, old: str, new: str, count: bool | None = None) -> int | None:
        return self._call("replace", path=path, old=old, new=new, count=count)
