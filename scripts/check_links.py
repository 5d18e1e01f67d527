#!/usr/bin/env python3
"""Checks that links in our pages lead somewhere: relative paths exist, and anchors are headings of the page they name.

Nothing is fetched: addresses elsewhere are not looked at. Exits with 1 and one line for each broken link.
"""

import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

TOP = Path(__file__).resolve().parent.parent

FENCE = re.compile(r"^ {0,3}(```|~~~)")
HEADING = re.compile(r"^ {0,3}#{1,6}\s+(.*?)\s*#*\s*$")
CODE = re.compile(r"(`+)(?!`).*?(?<!`)\1(?!`)")
LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
DEFINITION = re.compile(r"^ {0,3}\[[^\]]+\]:\s*<?(\S+?)>?(?:\s|$)")
SCHEME = re.compile(r"^[a-z][a-z0-9+.-]*:", re.IGNORECASE)


def pages() -> list[Path]:
    """Every page that is or could be committed."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=TOP, capture_output=True, text=True, check=True,
    )
    names = sorted(name for name in listed.stdout.split("\0") if name)
    return [TOP / name for name in names if (TOP / name).is_file()]


def prose(text: str):
    """Lines outside fenced code, with their numbers."""
    fence = None
    for number, line in enumerate(text.splitlines(), 1):
        mark = FENCE.match(line)
        if mark and fence is None:
            fence = mark[1]
        elif mark and mark[1] == fence:
            fence = None
        elif fence is None:
            yield number, line


def anchors(text: str) -> set[str]:
    """Anchors of a page's headings, as the usual viewers make them."""
    found: set[str] = set()
    for _, line in prose(text):
        heading = HEADING.match(line)
        if not heading:
            continue
        title = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading[1]).lower()
        slug = re.sub(r"[^\w\- ]", "", title).replace(" ", "-")
        count, name = 0, slug
        while name in found:
            count += 1
            name = f"{slug}-{count}"
        found.add(name)
    return found


def links(text: str):
    """Targets of a page's links, with their lines."""
    for number, line in prose(text):
        line = CODE.sub("", line)
        for target in LINK.findall(line):
            yield number, target
        definition = DEFINITION.match(line)
        if definition:
            yield number, definition[1]


def problem(page: Path, target: str) -> str | None:
    """What is wrong with a link, if anything."""
    if SCHEME.match(target) or target.startswith("//"):
        return None
    path, _, anchor = target.partition("#")
    if path.startswith("/"):
        return "begins with /: write it relative to the page"
    aim = (page.parent / unquote(path)).resolve() if path else page
    if not aim.is_relative_to(TOP):
        return "leads out of the repository"
    if not aim.exists():
        return "there is no such file"
    if anchor and aim.suffix == ".md" and anchor not in anchors(aim.read_text()):
        return f"there is no heading #{anchor}"
    return None


def main() -> int:
    broken = count = 0
    for page in pages():
        for number, target in links(page.read_text()):
            count += 1
            wrong = problem(page, target)
            if wrong:
                broken += 1
                print(f"{page.relative_to(TOP)}:{number}: {target}: {wrong}", file=sys.stderr)
    if count == 0:
        print("no links found: the search for them is broken", file=sys.stderr)
        return 1
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
