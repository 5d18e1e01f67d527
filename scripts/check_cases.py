#!/usr/bin/env python3
"""Every test that conformance/README.md names exists, and every reported fault of its share has a row.

A name in backticks with two or more underscores is a test, and so is whatever follows a file: `file.rs::name` must be
in that file.
"""

import pathlib
import re
import sys

TOP = pathlib.Path(__file__).resolve().parent.parent
README = TOP / "conformance/README.md"
#: Entries of the project's case list that must have a row: commands, sessions and files.
CASES = set(range(1, 77))
#: Of the list of what is fixed upstream.
LATER = set(range(51, 60))


def tests() -> dict[str, set[str]]:
    """The files that each test's name is in."""
    found: dict[str, set[str]] = {}
    for pattern, form in [("crates/**/*.rs", r"\bfn ([a-z0-9_]+)"), ("conformance/**/*.py", r"\bdef ([a-z0-9_]+)")]:
        for path in TOP.glob(pattern):
            for name in re.findall(form, path.read_text(errors="replace")):
                found.setdefault(name, set()).add(str(path.relative_to(TOP)))
    return found


def numbers(cell: str) -> set[int]:
    listed: set[int] = set()
    for first, last in re.findall(r"(\d+)(?:–(\d+))?", cell):
        listed |= set(range(int(first), int(last or first) + 1))
    return listed


def main() -> int:
    known, faults = tests(), []
    cases, later = set(), set()
    for line in README.read_text().split("## Reported faults", 1)[1].splitlines():
        row = re.match(r"\| ([^|]+) \| ", line)
        if not row:
            continue
        ours, _, theirs = row[1].partition("next")
        cases |= numbers(ours)
        later |= numbers(theirs)
        for file, name in re.findall(r"`(?:([\w/.]+)::)?([a-z0-9_]+)`", line):
            is_test = file or name.count("_") > 1
            if is_test and not any(path.endswith("/" + file.rpartition("/")[2]) or not file for path in known.get(name, ())):
                faults.append(f"{README.name}: {file or 'no file'} has no test {name}")
    faults += [f"{README.name}: case {number} has no row" for number in sorted(CASES - cases)]
    faults += [f"{README.name}: entry {number} of what comes later has no row" for number in sorted(LATER - later)]
    print(*faults, sep="\n", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
