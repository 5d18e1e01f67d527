#!/usr/bin/env python3
"""Writes docs/configuration.md from the doc comments of the configuration types; `--check` compares instead.

A key is a field whose comment begins with "`key`, …: meaning"; a section is a struct whose comment begins with "`[name]`".
"""

import re
import sys
from pathlib import Path

TOP = Path(__file__).resolve().parent.parent
SOURCES = ("server.rs", "embedded.rs", "images.rs")
PAGE = TOP / "docs" / "configuration.md"

HEAD = """\
# Configuration

One TOML file: `osb server --config FILE`, else the file that `SANDBOX_CONFIG_PATH` names, else `~/.sandbox.toml`. A file
named on purpose must exist. Without any file the server listens on 127.0.0.1 only and makes a key at its first start, kept in
`data_dir/api-key` and, for its user, in `~/.config/opensandbox/credentials.toml`, both readable by the owner alone.

A file needs `[runtime] type = "embedded"` and, to start, a key: `server.api_key`, or `OPENSANDBOX_SERVER_API_KEY`, or
`OPENSANDBOX_INSECURE_SERVER=YES` to serve everybody who reaches the port.

Every plain key of the sections below may also be given as `OPENSANDBOX_<SECTION>_<KEY>` in the environment, which wins, except
in `[renew_intent]`. An unknown key is a warning that names key and line; a wrong value is an error that names the key and never
repeats the value. Sections of the reference server that belong to other runtimes (`[docker]`, `[kubernetes]`, `[egress]`, …) are
read, checked and without effect here.

`osb server --check` reads the file and looks at the machine without starting anything.

This page is generated from the types (`scripts/config_docs.py`).
"""

EXAMPLE = """
## A server for one machine's users

```toml
[server]
host = "127.0.0.1"
port = 8080
api_key = "change-me"

[runtime]
type = "embedded"

[embedded]
network = "internet"
allow_private = ["192.168.10.5/32"]

[embedded.default_limits]
cpu = "2"
memory = "4Gi"
```
"""


def comments(text: str):
    """Pairs of a joined doc comment and the line below it."""
    held: list[str] = []
    for line in text.splitlines():
        line = line.strip()
        if line.startswith("///"):
            held.append(line[3:].strip())
        elif held and not line.startswith("#["):
            yield " ".join(held), line
            held = []


def render() -> str:
    sections: list[tuple[str, str, list[tuple[str, str, str]]]] = []
    by_struct: dict[str, str] = {}
    limits: list[tuple[str, str, str]] = []
    current = None
    for name in SOURCES:
        text = (TOP / "crates/server/src/config" / name).read_text()
        for comment, line in comments(text):
            if struct := re.match(r"pub struct (\w+)", line):
                current = None
                if struct[1] == "DefaultLimits":
                    current = limits
                elif found := re.match(r"`\[([\w.\"]+)\]`[:.]? ?(.*)", comment):
                    current = []
                    sections.append((found[1], found[2], current))
                by_struct[struct[1]] = name
            elif current is not None and (found := re.match(r"`(\w+)`, (no default(?: here)?|default (?:`[^`]*`|[^:.\s]+))(?:[:.] ?(.*)|$)", comment)):
                default = found[2].removeprefix("default ").replace("no default here", "–").replace("no default", "–")
                current.append((found[1], default, found[3] or ""))
    page = HEAD
    for name, about, keys in sections:
        page += f"\n## `[{name}]`\n"
        if about:
            page += f"\n{about[0].upper()}{about[1:]}\n"
        page += table(keys)
        if name == "embedded":
            page += "\n## `[embedded.default_limits]`\n\nWhat a sandbox gets when its request names none.\n" + table(limits)
    return page + EXAMPLE


def table(keys: list[tuple[str, str, str]]) -> str:
    rows = "".join(f"| `{key}` | {default} | {meaning[:1].upper()}{meaning[1:]} |\n" for key, default, meaning in keys)
    return f"\n| key | default | meaning |\n|---|---|---|\n{rows}"


if __name__ == "__main__":
    wanted = render()
    if "--check" in sys.argv:
        if not PAGE.exists() or PAGE.read_text() != wanted:
            sys.exit("docs/configuration.md is not what the types say: run scripts/config_docs.py")
    else:
        PAGE.write_text(wanted)
