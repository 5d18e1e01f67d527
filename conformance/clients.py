"""The official clients that the behaviours are checked with, and what each cannot do.

A feature is an operation (`kill`) or an option of one (`run.timeout`). What is written here is compared with what the
installed clients say of themselves, so that the table in README.md tells the truth.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
VENV = HERE.parent / ".venv"


@dataclass(frozen=True)
class Spec:
    """A client."""

    name: str
    package: str
    version: str
    #: Which driver speaks to it: `python`, `js`, `cli` or `mcp`.
    kind: str
    #: Program and arguments that start it, or the agent in front of it.
    argv: tuple[str, ...]
    missing: frozenset[str]
    #: Whether only the basic behaviours are checked.
    old: bool = False

    def lacks(self, feature: str) -> bool:
        return feature in self.missing

    @staticmethod
    def optional(feature: str) -> bool:
        """Whether some client lacks it."""
        return feature in OPTIONAL


#: Text of an error only: neither its class nor its status can be seen from outside.
TEXT_ERRORS = {"error.kind", "error.status", "error.retry_after"}
NO_SDK = TEXT_ERRORS | {
    "close", "connect", "connection.headers", "create.platform", "create.secure_access", "patch_metadata", "read.lines",
    "run.arrivals", "run.env", "run.interrupt_at_init", "run.joined", "run.uid", "set_env", "signed_endpoint",
    "list_directory", "write.many",
}


def python(face: str, version: str = "1.1.1", missing: set[str] = frozenset()) -> Spec:
    """The Python SDK of `version`; `face` is `async` or `sync`."""
    old = version != "1.1.1"
    return Spec(
        name=f"python-{version}" if old else f"python-{face}",
        package="opensandbox (PyPI)",
        version=version,
        kind="python",
        argv=(
            str((VENV / "clients" / f"python-{version}" if old else VENV) / "bin" / "python"),
            str(HERE / "agents" / "python_agent.py"),
            face,
        ),
        missing=frozenset(missing),
        old=old,
    )


SINCE_1_1 = {"error.code", "error.retry_after", "run.argv", "set_env"}
SINCE_0_1_13 = SINCE_1_1 | {"list_directory", "read.lines", "replace.count"}
SINCE_0_1_9 = SINCE_0_1_13 | {
    "create.platform", "create.secure_access", "diagnostics", "patch_metadata", "signed_endpoint", "snapshot",
}

CLIENTS = (
    python("async"),
    python("sync"),
    Spec(
        name="js",
        package="@alibaba-group/opensandbox (npm)",
        version="0.1.11",
        kind="js",
        argv=("node", str(HERE / "agents" / "js" / "agent.mjs")),
        missing=frozenset({"diagnostics", "error.retry_after", "run.argv", "run.joined", "set_env"}),
    ),
    Spec(
        name="cli",
        package="opensandbox-cli (PyPI)",
        version="1.1.1",
        kind="cli",
        argv=(str(VENV / "bin" / "python"), str(HERE / "agents" / "cli_forks.py")),
        missing=frozenset(NO_SDK | {"read.range", "replace.count", "run.exact"}),
    ),
    Spec(
        name="mcp",
        package="opensandbox-mcp (PyPI)",
        version="1.1.1",
        kind="mcp",
        argv=(str(VENV / "bin" / "opensandbox-mcp"),),
        missing=frozenset(
            NO_SDK - {"connect"}
            | {
                "chmod", "chmod.owner", "create.manual", "diagnostics", "logs", "pause", "run.argv", "run.timeout",
                "open_session", "run_in_session", "delete_session", "snapshot", "stat", "status", "stream",
            }
        ),
    ),
    python("async", "0.1.7", SINCE_0_1_9),
    python("sync", "0.1.9", SINCE_0_1_13),
    python("async", "0.1.13", SINCE_1_1),
    python("sync", "0.1.16", SINCE_1_1),
)

OPTIONAL = frozenset().union(*(spec.missing for spec in CLIENTS))
BY_NAME = {spec.name: spec for spec in CLIENTS}
