#!/usr/bin/env python3
"""Compares docs/errors.md with the source: every code that the server or the daemon can answer is on the page with each
status that the source gives it, and no other code is. Exits with 1 and one line for each difference.

A code counts as answered when its constant is used outside the list of codes, or it is written as text where errors are made.
Tests do not count.
"""

import re
import sys
from http import HTTPStatus
from pathlib import Path

TOP = Path(__file__).resolve().parent.parent
PAGE = TOP / "docs" / "errors.md"

# Section of the page, list of constants, where they are used.
PARTS = [
    ("Of the server", "crates/protocol/src/error.rs", "crates/server/src"),
    ("Of the daemon in the sandbox", "crates/protocol/src/execd.rs", "crates/execd/src"),
]

CONSTANT = re.compile(r'pub const (\w+): &str =\s*"([^"]+)"')
USE = re.compile(r"\bcode::([A-Z][A-Z_]+)\b")
# Codes of these forms are not in the lists.
PREFIXED = re.compile(r'"([A-Z]+::[A-Z_]+)"')
BARE = re.compile(r'StatusCode::\w+,\s*"([A-Z_]+)"')
PAIR = re.compile(r'StatusCode::([A-Z_]+),\s*(?:code::([A-Z_]+)|"([A-Z_]+)")')
ROW = re.compile(r"^\| `([A-Z][A-Z_:]*)` \| ([0-9, ]+) \|")


def source(directory: str) -> str:
    """The crate's code without its tests, which stand at the end of files."""
    files = sorted((TOP / directory).rglob("*.rs"))
    return "\n".join(file.read_text().split("#[cfg(test)]\nmod ")[0] for file in files)


def constants() -> dict[str, dict[str, str]]:
    """The lists of codes, by file: name to code."""
    found = {}
    for _, listed, _ in PARTS:
        text = (TOP / listed).read_text()
        found[listed] = dict(CONSTANT.findall(text[text.index("pub mod code {"):]))
    return found


def answered(listed: str, directory: str, lists: dict[str, dict[str, str]]) -> dict[str, set[int]]:
    """Codes that the source answers, with the statuses that stand beside them."""
    text = source(directory)
    # The daemon shares some of the server's codes.
    names = {name: code for codes in lists.values() for name, code in codes.items()} | lists[listed]
    unknown = set(USE.findall(text)) - set(names)
    if unknown:
        raise SystemExit(f"{directory}: codes that no list has: {', '.join(sorted(unknown))}")
    codes = {names[name] for name in USE.findall(text)} | set(PREFIXED.findall(text)) | set(BARE.findall(text))
    found: dict[str, set[int]] = {code: set() for code in codes}
    for status, name, bare in PAIR.findall(text):
        code = names[name] if name else bare
        found.setdefault(code, set()).add(HTTPStatus[STATUS.get(status, status)].value)
    return found


# Where the names of the two languages differ.
STATUS = {"PAYLOAD_TOO_LARGE": "REQUEST_ENTITY_TOO_LARGE", "RANGE_NOT_SATISFIABLE": "REQUESTED_RANGE_NOT_SATISFIABLE"}


def described() -> dict[str, dict[str, set[int]]]:
    """The page's rows by section: code to statuses."""
    found: dict[str, dict[str, set[int]]] = {}
    section = ""
    for line in PAGE.read_text().splitlines():
        if line.startswith("## "):
            section = line[3:]
        row = ROW.match(line)
        if row:
            codes = found.setdefault(section, {})
            if row[1] in codes:
                raise SystemExit(f"docs/errors.md: {row[1]} stands twice in '{section}'")
            codes[row[1]] = {int(status) for status in row[2].split(",")}
    return found


def main() -> int:
    page, lists = described(), constants()
    problems = []
    for section, listed, directory in PARTS:
        source_codes, page_codes = answered(listed, directory, lists), page.get(section, {})
        if len(source_codes) < 5:
            problems.append(f"{directory}: hardly any codes found: the search for them is broken")
        for code in sorted(source_codes.keys() - page_codes.keys()):
            problems.append(f"docs/errors.md, {section}: {code} is missing")
        for code in sorted(page_codes.keys() - source_codes.keys()):
            problems.append(f"docs/errors.md, {section}: {code} is answered no more")
        for code in sorted(source_codes.keys() & page_codes.keys()):
            for status in sorted(source_codes[code] - page_codes[code]):
                problems.append(f"docs/errors.md, {section}: {code} also comes with status {status}")
    for line in problems:
        print(line, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
