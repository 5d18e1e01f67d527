"""The official command line and ours, side by side: every command, option and value, and the keys of every answer.

What is compared is read from the installed `opensandbox-cli` itself, so that a newer one shows what we lack.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator

import click
import pytest
from opensandbox_cli.main import cli
from opensandbox_cli.utils import DurationType, KeyValueType

from conftest import ROOT

OSB = os.environ.get("OSB_BIN", str(ROOT / "dist" / "osb"))
#: Command lines that we refuse and the official program takes, and why.
EXCEPTIONS: dict[str, str] = {}
#: Options that the official program, too, takes only together with others.
COMPANIONS = {
    "--credential-proxy": ["--network-policy-file", "FILE"],
    "--image-auth-username": ["--image", "x", "--image-auth-password", "x"],
    "--image-auth-password": ["--image", "x", "--image-auth-username", "x"],
}
#: Text that an option wants, where not any will do.
VALUES = {"--encoding": ["utf-8"], "--mode": ["644", "0755"], "--rule": ["allow=example.com"], "--timeout": ["10m", "none"]}
#: What a command needs although no single option is required.
NEEDED = {
    ("skills", "install"): ["--target", "claude", "--scope", "project"],
    ("skills", "uninstall"): ["--target", "claude", "--scope", "project"],
    ("template", "create"): ["--image", "x", "--publish", "x"],
}
VALUES |= {"--state": ["Running", "running"], "--since": ["10m"]}


def commands(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    for name, command in group.commands.items():
        yield (*path, name), command
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))


def options(command: click.Command) -> list[click.Option]:
    return [parameter for parameter in command.params if isinstance(parameter, click.Option)]


def values(option: click.Option, file: str) -> list[list[str]]:
    """Values to try with an option, each as the words behind it."""
    if option.is_flag:
        return [[]]
    long = max(option.opts, key=len)
    kind = option.type
    if isinstance(kind, click.Choice):
        return [[form] for choice in kind.choices for form in {choice, choice if kind.case_sensitive else choice.upper()}]
    if isinstance(kind, (click.types.IntParamType, click.IntRange)):
        return [["1"]]
    if isinstance(kind, DurationType):
        return [["1h30m"], ["90"]]
    if isinstance(kind, KeyValueType):
        return [["k=v=w"], ["k="]]
    if isinstance(kind, click.Path):
        return [[file]]
    return [[value] for value in VALUES.get(long, ["x"])]


def positionals(command: click.Command, file: str) -> list[str]:
    """One word for each argument that must be there."""
    arguments = [parameter for parameter in command.params if isinstance(parameter, click.Argument)]
    words = []
    for argument in arguments:
        kind = argument.type
        choice = kind.choices[0] if isinstance(kind, click.Choice) else None
        known = {"key": "connection.domain", "skill_name": "sandbox-lifecycle"}.get(argument.name)
        path = file if isinstance(kind, click.Path) else None
        words += [choice or known or path or "x"] * max(1, abs(argument.nargs) if argument.required else 0)
    return words


COMMANDS = dict(commands(cli))


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    """Runs our program in a home of its own; a settings file that cannot be keeps it from any server."""
    home = tmp_path_factory.mktemp("home")
    env = {"HOME": str(home), "PATH": os.environ["PATH"]}

    def run(*argv: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([OSB, *argv], env=env, cwd=home, input="", capture_output=True, text=True, timeout=30)

    return run


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_every_command_and_option_is_taken(path, ours, tmp_path):
    command = COMMANDS[path]
    shown = ours(*path, "--help")
    assert shown.returncode == 0, shown.stderr
    words = shown.stdout.replace(",", " ").split()
    assert [name for option in options(command) for name in (*option.opts, *option.secondary_opts) if name not in words] == []
    if isinstance(command, click.Group):
        # Without a command a group shows its help, and that is no failure.
        assert ours(*path).returncode == 0
        return
    file = tmp_path / "file.json"
    file.write_text("{}")
    rest = ["sandbox-lifecycle"] if path == ("skills", "install") else positionals(command, str(file))
    needed = {option: [option.opts[0], *values(option, str(file))[0]] for option in options(command) if option.required}
    refused = []
    for option in [None, *options(command)]:
        given = {} if option is None else {name for name in (*option.opts, *option.secondary_opts)}
        for name in sorted(given) or [None]:
            for value in [[]] if option is None else values(option, str(file)):
                # An option that is said twice means what it says last.
                words = [*NEEDED.get(path, []), *(word for words in needed.values() for word in words)]
                words = [] if "--file" in given else words
                words += [] if option is None else [name, *value]
                words += [str(file) if word == "FILE" else word for word in COMPANIONS.get(name, [])]
                rest_of = [] if name == "--all-builtins" else rest
                answer = ours("--config", "/dev/null/config.toml", *path, *words, "--", *rest_of)
                # Two is said of command lines alone.
                if answer.returncode == 2 and " ".join([*path, *words]) not in EXCEPTIONS:
                    refused.append((words, answer.stderr))
    assert refused == []


def test_global_options_are_taken(ours):
    words = ours("--help").stdout.replace(",", " ").split()
    for option in options(cli):
        for name in (*option.opts, *option.secondary_opts):
            assert name in words, name
            for value in values(option, "/dev/null/config.toml"):
                # Said twice: what is said last counts.
                answer = ours(name, *value, name, *value, "--config", "/dev/null/config.toml", "sandbox", "list")
                assert answer.returncode == (0 if name == "--version" else 1), (name, answer.stderr)
