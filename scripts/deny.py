#!/usr/bin/env python3
"""Checks the dependencies against deny.toml: licences, banned crates, sources.

The rules are cargo-deny's and so is the form of the file. This program reads the part of it that we use, so that a
build machine need not compile cargo-deny first, which takes longer than our own tests.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KNOWN = {
    "graph": {"targets"},
    "licenses": {"allow", "exceptions"},
    "bans": {"multiple-versions", "wildcards", "allow-wildcard-paths", "deny"},
    "sources": {"unknown-registry", "unknown-git", "allow-registry"},
}


def read_rules(path: Path) -> dict:
    rules = tomllib.loads(path.read_text())
    for section, keys in rules.items():
        unknown = {section} - KNOWN.keys() or keys.keys() - KNOWN[section]
        if unknown:
            # A rule that nobody checks would look like one that holds.
            sys.exit(f"deny.toml: scripts/deny.py does not know {', '.join(sorted(unknown))} in [{section}]")
    return rules


def metadata(target: str) -> dict:
    command = ["cargo", "metadata", "--format-version=1", "--locked", "--filter-platform", target]
    return json.loads(subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout)


class Licence:
    """An SPDX expression; `A/B` is an old way to write `A OR B`."""

    def __init__(self, text: str) -> None:
        self.words = re.findall(r"[()]|[\w.+:-]+", text.replace("/", " OR "))
        self.at = 0

    def next(self) -> str | None:
        return self.words[self.at] if self.at < len(self.words) else None

    def take(self) -> str:
        word = self.next()
        if word is None:
            raise ValueError("ends too early")
        self.at += 1
        return word

    def allowed(self, allow: set[str]) -> bool:
        result = self.any_of(allow)
        if self.next() is not None:
            raise ValueError(f"unexpected '{self.next()}'")
        return result

    def any_of(self, allow: set[str]) -> bool:
        result = self.all_of(allow)
        while self.next() == "OR":
            self.take()
            result = self.all_of(allow) or result
        return result

    def all_of(self, allow: set[str]) -> bool:
        result = self.one(allow)
        while self.next() == "AND":
            self.take()
            result = self.one(allow) and result
        return result

    def one(self, allow: set[str]) -> bool:
        word = self.take()
        if word == "(":
            result = self.any_of(allow)
            if self.take() != ")":
                raise ValueError("')' expected")
            return result
        if word in (")", "AND", "OR", "WITH"):
            raise ValueError(f"unexpected '{word}'")
        if self.next() == "WITH":
            self.take()
            word = f"{word} WITH {self.take()}"
        return word in allow


def licence_problem(package: dict, rules: dict) -> str | None:
    allow = set(rules.get("allow", []))
    for exception in rules.get("exceptions", []):
        if exception["crate"] == package["name"]:
            allow |= set(exception["allow"])
    text = package["license"]
    if not text:
        return "names no licence"
    try:
        return None if Licence(text).allowed(allow) else f"licence {text} is not allowed"
    except ValueError as error:
        return f"licence '{text}' cannot be read: {error}"


def source_problem(package: dict, rules: dict) -> str | None:
    source = package["source"]
    if source is None:
        return None
    kind, _, address = source.partition("+")
    if kind == "registry" and address in rules.get("allow-registry", []):
        return None
    setting = {"registry": "unknown-registry", "sparse": "unknown-registry", "git": "unknown-git"}.get(kind)
    return None if setting and rules.get(setting) == "allow" else f"source {source} is not allowed"


def wildcards(package: dict, rules: dict) -> list[str]:
    if package["source"] is not None or rules.get("wildcards") != "deny":
        return []
    return [
        f"dependency {dependency['name']} takes any version"
        for dependency in package["dependencies"]
        if dependency["req"] == "*" and not (dependency.get("path") and rules.get("allow-wildcard-paths"))
    ]


def why(package_id: str, parents: dict[str, set[str]], names: dict[str, str]) -> str:
    """One way from a crate of ours down to this one."""
    path, seen = [package_id], {package_id}
    while parent := next((p for p in sorted(parents[path[-1]]) if p not in seen), None):
        path.append(parent)
        seen.add(parent)
    return " <- ".join(names[step] for step in path)


def main() -> int:
    rules = read_rules(ROOT / "deny.toml")
    banned = {entry["crate"]: entry.get("reason", "banned") for entry in rules["bans"].get("deny", [])}
    problems: dict[str, None] = {}
    versions: dict[str, set[str]] = defaultdict(set)
    for target in rules["graph"]["targets"]:
        data = metadata(target)
        packages = {package["id"]: package for package in data["packages"]}
        parents: dict[str, set[str]] = defaultdict(set)
        for node in data["resolve"]["nodes"]:
            for child in node["deps"]:
                parents[child["pkg"]].add(node["id"])
        names = {key: f"{p['name']} {p['version']}" for key, p in packages.items()}
        for node in data["resolve"]["nodes"]:
            package = packages[node["id"]]
            versions[package["name"]].add(package["version"])
            found = [licence_problem(package, rules["licenses"]), source_problem(package, rules["sources"])]
            found += wildcards(package, rules["bans"])
            if package["name"] in banned:
                found.append(f"is banned: {banned[package['name']]} ({why(node['id'], parents, names)})")
            problems |= {f"{names[node['id']]}: {text}": None for text in found if text}
    repeated = sorted(name for name, found in versions.items() if len(found) > 1)
    setting = rules["bans"].get("multiple-versions", "warn")
    if repeated and setting != "allow":
        print(f"deny: several versions of {', '.join(repeated)}")
        if setting == "deny":
            problems["several versions of a crate"] = None
    for problem in problems:
        print(f"deny: error: {problem}", file=sys.stderr)
    print(f"deny: {len(versions)} crates, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
