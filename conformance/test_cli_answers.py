"""What the official command line answers and what ours does, for the same server: the same members in each form."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import yaml

from clients import BY_NAME
from conftest import API_KEY, ROOT
from drivers.cli import CliDriver

OSB = os.environ.get("OSB_BIN", str(ROOT / "dist" / "osb"))
#: Members that only we show, and those that only the official program does; each with the reason.
MORE = {
    "usage": "what an ended command has used",
    "cpu_user_us": "CPU time of an ended command",
    "cpu_system_us": "CPU time of an ended command",
    "peak_memory_bytes": "memory of an ended command",
    "profile": "profiles are ours",
    "path": "`file replace` tells how often, and where",
    "replaced_count": "`file replace` tells how often, and where",
}
LESS = {
    "package_file": "skills are part of the program, not files",
    "source_path": "skills are part of the program, not files",
    "when_to_use": "a part of the skill's text; `content` has all of it",
    "quick_start": "a part of the skill's text; `content` has all of it",
    "json_shapes": "a part of the skill's text; `content` has all of it",
}
#: Answers whose table the official program does not draw as one.
PROSE = {"skills list", "skills show", "config set", "command logs", "diagnostics logs", "diagnostics events"}

#: What a terminal would obey, what is wider than it looks, and what is long.
HOSTILE = "a\x1b[2J\x1b]0;t\x07\x9b2J\r\nb\u202ec\u2028\x7f\x00 日本語👩‍👩‍👧‍👦: - 'x' \"y\" # z\n" + "x" * 10_000
AT = "2026-11-30T17:49:18.189968Z"
PAGE = {"page": 1, "pageSize": 20, "totalItems": 1, "totalPages": 1, "hasNextPage": False}
SNAPSHOT = {
    "id": "snap-1", "sandboxId": "s1", "name": HOSTILE, "createdAt": AT,
    "status": {"state": "Failed", "reason": "R", "message": HOSTILE, "lastTransitionAt": AT},
}
TEMPLATE = {
    "templateId": "tpl-1", "image": "i", "publish": "p", "format": "native", "entrypoint": ["a", "b"],
    "env": {"A": "1"}, "metadata": {"k": "v"}, "resourceLimits": {"cpu": "1"},
    "readiness": {"probe": "tcp://127.0.0.1:1", "warmupSeconds": 2},
    "status": {"phase": "Failed", "manifestRef": "r", "message": "m"}, "createdAt": AT, "updatedAt": AT,
}


class Stored:
    """Answers for what the embedded runtime has not: one snapshot and one template."""

    def __init__(self) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                kind, _, id = self.path.removeprefix("/v1/").partition("?")[0].partition("/")
                item = {"snapshots": SNAPSHOT, "templates": TEMPLATE}[kind]
                self.answer(200, item if id else {"items": [item], "pagination": PAGE})

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                self.answer(*((202, {**SNAPSHOT, "name": "n"}) if "snapshots" in self.path else (201, TEMPLATE)))

            def do_DELETE(self) -> None:
                self.send_response(204)
                self.end_headers()

            def answer(self, status: int, body: Any) -> None:
                text = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.domain = f"127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture(scope="module")
def official(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        # Or it cuts the names of columns where there is no terminal.
        patch.setenv("COLUMNS", "250")
        driver = CliDriver(BY_NAME["cli"], tmp_path_factory.mktemp("cli") / "log")
    yield driver
    driver.close()


@pytest.fixture(scope="module")
def stored():
    fake = Stored()
    yield fake
    fake.stop()


@pytest.fixture(scope="module")
def box(server):
    """A sandbox with a file, a label and a command that has ended."""
    with server.client() as http:
        request = {"image": {"uri": "host"}, "entrypoint": ["sleep", "600"], "metadata": {"k": "v"}, "timeout": 600}
        request["resourceLimits"] = {"cpu": "1", "memory": "256Mi"}
        id = http.post("/v1/sandboxes", json=request).json()["id"]
        options = ["--domain", server.domain, "--api-key", API_KEY]
        words = [OSB, *options, "command", "run", id, "-d", "-o", "json", "--", "echo one; echo two"]
        made = subprocess.run(words, capture_output=True, check=True)
        subprocess.run([OSB, *options, "file", "write", id, "/tmp/a.txt", "-c", "text"], capture_output=True, check=True)
        yield {"ID": id, "EXECUTION": json.loads(made.stdout)["execution_id"]}
        http.delete(f"/v1/sandboxes/{id}")


REAL = [
    "sandbox list", "sandbox get ID", "sandbox renew ID --timeout 10m", "sandbox endpoint ID --port 8000",
    "sandbox health ID", "sandbox metrics ID", "sandbox list --state paused",
    "command status ID EXECUTION", "command logs ID EXECUTION", "command run ID -d -- true",
    "command interrupt ID EXECUTION",
    "file info ID /tmp/a.txt", "file search ID /tmp --pattern a.txt", "file search ID /tmp --pattern none",
    "file write ID /tmp/b -c x", "file mkdir ID /tmp/d", "file rmdir ID /tmp/d", "file rm ID /tmp/b",
    "file chmod ID /tmp/a.txt --mode 644", "file replace ID /tmp/a.txt --old t --new t",
    "diagnostics logs ID --scope all", "diagnostics events ID --scope all",
    "config show", "skills list", "skills show sandbox-lifecycle",
]
CANNED = [
    "snapshot list", "snapshot get snap-1", "snapshot create s1", "snapshot delete snap-1",
    "template list", "template get tpl-1", "template create --image i --publish p", "template delete tpl-1",
]


def members(value: Any, path: str = "") -> set[str]:
    """Every member's name, with those above it; a list counts by what its items have."""
    if isinstance(value, dict):
        here = {f"{path}{name}" for name in value}
        return here.union(*(members(part, f"{path}{name}.") for name, part in value.items()))
    if isinstance(value, list):
        return set().union(*(members(part, f"{path}[].") for part in value), *[[f"{path}[]"]])
    return set()


def other_than(names: set[str], known: dict[str, str]) -> list[str]:
    return sorted(name for name in names if name.rsplit(".", 1)[-1] not in known)


@pytest.fixture
def both(official, server, stored, box, tmp_path):
    """Runs a command line by the official program and by ours."""

    def run(line: str, *more: str) -> tuple[str, str]:
        words = [box.get(word, word) for word in line.split()]
        at = words.index("--") if "--" in words else len(words)
        words[at:at] = more
        domain = stored.domain if line in CANNED else server.domain
        options = ["--no-color", "--domain", domain, "--api-key", API_KEY]
        code, theirs, error = official.osb(["--config", f"{tmp_path}/none.toml", *options], *words)
        assert code == 0, error
        env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
        ours = subprocess.run([OSB, *options, *words], env=env, capture_output=True, text=True, timeout=60)
        assert ours.returncode == 0, ours.stderr
        return theirs.decode(), ours.stdout

    return run


@pytest.mark.parametrize("line", REAL + CANNED)
def test_json_and_yaml_have_the_same_members(line, both):
    for form, load in (("json", json.loads), ("yaml", yaml.safe_load)):
        theirs, ours = (load(text) for text in both(line, "-o", form))
        assert type(theirs) is type(ours), form
        assert other_than(members(theirs) - members(ours), LESS) == [], form
        assert other_than(members(ours) - members(theirs), MORE) == [], form


@pytest.mark.parametrize("line", [line for line in REAL + CANNED if " ".join(line.split()[:2]) not in PROSE])
def test_tables_have_every_column(line, both):
    """Ours may have more."""
    theirs, ours = both(line, "-o", "table")
    assert columns(theirs) - columns(ours) == set(), (theirs, ours)


def columns(table: str) -> set[str]:
    """Names of the columns of a list, or of the properties of one thing, in lower case."""
    lines = [line for line in table.splitlines() if line.strip()]
    if table.startswith(("OK:", "INFO:", "No ")):
        return set()
    if lines[0].startswith("---"):
        return {line.split(":")[0].strip() for line in lines[1:]}
    if any(line.startswith("╭") for line in lines):
        rows = [[cell.strip() for cell in line.strip("│┃").replace("┃", "│").split("│")] for line in lines if line[0] in "│┃"]
        return {row[0] for row in rows[1:] if row[0]} if rows[0] == ["Key", "Value"] else {cell.lower() for cell in rows[0]}
    if lines[0].isupper():
        return {name.lower() for name in lines[0].split()}
    return {line.split("  ")[0] for line in lines}


@pytest.mark.parametrize("line", ["command logs ID EXECUTION", "diagnostics logs ID --scope all", "diagnostics events ID --scope all"])
def test_raw_is_the_same_text(line, both):
    theirs, ours = both(line, "-o", "raw")
    assert theirs.rstrip("\n") == ours.rstrip("\n")


@pytest.mark.parametrize("line", ["sandbox get ID", "file info ID /tmp/a.txt", "snapshot list", "template get tpl-1"])
def test_values_are_the_same(line, both):
    for form, load in (("json", json.loads), ("yaml", yaml.safe_load)):
        theirs, ours = (load(text) for text in both(line, "-o", form))
        assert theirs == ours, form


def test_hostile_text_is_exact_for_programs(both):
    for form, load in (("json", json.loads), ("yaml", yaml.safe_load)):
        ours = load(both("snapshot get snap-1", "-o", form)[1])
        assert (ours["name"], ours["status"]["message"]) == (HOSTILE, HOSTILE), form
