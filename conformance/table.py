"""Writes the table behaviour × client into README.md; with `--check` only says whether it is up to date."""

from __future__ import annotations

import sys
from pathlib import Path

from behaviours import BEHAVIOURS, PARTS
from clients import CLIENTS

PAGE = Path(__file__).with_name("README.md")
BEGIN, END = "<!-- table: made by table.py -->\n", "<!-- end of table -->\n"
#: How a gap is shown; what is checked is a tick.
SIGNS = {None: "✓", "lacks": "–", "fault": "✗", "old": ""}


def table() -> str:
    """The table, with what is behind each ✗ below it."""
    lines = ["| client | package | version |", "|---|---|---|"]
    lines += [f"| {spec.name} | {spec.package} | {spec.version} |" for spec in CLIENTS]
    lines.append("")
    head = " | ".join(spec.name.replace("python-", "py ") for spec in CLIENTS)
    notes = []
    checked = 0
    for part in PARTS:
        lines += [f"| {part} | {head} |", "|---|" + ":-:|" * len(CLIENTS)]
        for behaviour in (each for each in BEHAVIOURS if each.part == part):
            gaps = [behaviour.gap(spec) for spec in CLIENTS]
            checked += gaps.count(None)
            lines.append(f"| {behaviour.title} | " + " | ".join(SIGNS[gap] for gap in gaps) + " |")
            notes += [f"- {behaviour.title}: `{name}`: {why}" for name, why in behaviour.faults.items()]
        lines.append("")
    lines.append(f"{len(BEHAVIOURS)} behaviours, {checked} checks.")
    if notes:
        lines += ["", "✗ is a client's own fault:", "", *notes]
    return "\n".join(lines) + "\n"


def main() -> int:
    page = PAGE.read_text()
    before, rest = page.split(BEGIN)
    after = rest.split(END)[1]
    wanted = before + BEGIN + "\n" + table() + "\n" + END + after
    if sys.argv[1:] == ["--check"]:
        if page != wanted:
            print("conformance/README.md is out of date: run conformance/table.py", file=sys.stderr)
        return page != wanted
    PAGE.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
