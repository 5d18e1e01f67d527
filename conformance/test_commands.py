"""Commands through the asynchronous client."""

import asyncio
import time
from datetime import timedelta

import pytest
from opensandbox.exceptions import SandboxApiException
from opensandbox.models.execd import ExecutionHandlers, RunCommandOpts


async def test_output_exit_code_and_events(sandbox):
    run = await sandbox.commands.run("echo out; echo err >&2; exit 3")
    assert [message.text for message in run.logs.stdout] == ["out\n"]
    assert [message.text for message in run.logs.stderr] == ["err\n"]
    assert run.exit_code == 3
    assert run.error.name == "CommandExecError" and run.error.value == "3"
    assert run.error.traceback == ["exit status 3"]
    assert run.complete is None
    good = await sandbox.commands.run("true")
    assert good.exit_code == 0 and good.error is None and good.complete is not None
    assert len(good.id) == 32


@pytest.mark.parametrize(
    ("script", "text"),
    [
        ("printf hello", "hello"),
        ("printf 'a\\n\\nb\\n'", "a\n\nb"),
        ("printf 'one\\r\\ntwo\\r\\n'", "one\ntwo"),
        ("head -c 1000000 /dev/zero | tr '\\0' a", "a" * 1000000),
        ("printf '\\xc3\\xa4\\xe2\\x82\\xac'", "ä€"),
        ("printf '\\xff\\xfe'", "\ufffd\ufffd"),
        ("seq 1 5000", "\n".join(str(n) for n in range(1, 5001))),
    ],
)
async def test_every_byte_of_output_arrives(sandbox, script, text):
    assert (await sandbox.commands.run(script)).text == text


async def test_lines_arrive_when_they_are_written(sandbox):
    seen = []

    async def on_stdout(message):
        seen.append(time.monotonic())

    await sandbox.commands.run("for i in 1 2 3; do echo $i; sleep 0.3; done", handlers=ExecutionHandlers(on_stdout=on_stdout))
    assert len(seen) == 3
    assert all(0.2 < later - earlier < 0.6 for earlier, later in zip(seen, seen[1:]))


@pytest.mark.parametrize("script", ["sleep 30 &", "(sleep 30 &) ; true", "setsid sleep 30 & disown", "nohup sh -c 'sleep 30 &'"])
async def test_a_run_ends_with_its_process_not_with_its_pipes(sandbox, script):
    began = time.monotonic()
    run = await sandbox.commands.run(script)
    assert run.exit_code == 0
    assert time.monotonic() - began < 2


async def test_stdin_is_empty(sandbox):
    assert (await sandbox.commands.run("cat; read x || echo eof; printf a | cat")).text == "eof\na"


async def test_argv_is_not_touched_by_a_shell(sandbox):
    run = await sandbox.commands.run(["printf", "%s|", "a b", "$HOME", "*", "; exit 9"])
    assert run.text == "a b|$HOME|*|; exit 9|"


async def test_working_directory_environment_and_identity(sandbox):
    opts = RunCommandOpts(working_directory="/usr", envs={"X": "1 2"}, uid=65534, gid=65534)
    run = await sandbox.commands.run('pwd; echo "$X"; id -u; id -g', opts=opts)
    assert run.text == "/usr\n1 2\n65534\n65534"


@pytest.mark.parametrize("cwd", ["/no/such/dir", "/etc/passwd"])
async def test_a_bad_working_directory_is_400(sandbox, cwd):
    with pytest.raises(SandboxApiException) as refused:
        await sandbox.commands.run("true", opts=RunCommandOpts(working_directory=cwd))
    assert refused.value.status_code == 400
    assert refused.value.error.code == "INVALID_REQUEST_BODY"


async def test_timeout_kills_the_tree_and_keeps_the_output(sandbox):
    began = time.monotonic()
    run = await sandbox.commands.run(
        "echo before; sleep 98765 & setsid sleep 98766 & sleep 98767", opts=RunCommandOpts(timeout=timedelta(seconds=1))
    )
    assert 0.9 < time.monotonic() - began < 4
    assert run.logs.stdout[0].text == "before\n"
    assert run.exit_code == 137
    assert (await sandbox.commands.run("pgrep -f 'sleep 9876' | wc -l")).text.strip() in ("0", "1")
    assert (await sandbox.commands.run("ps -eo args | grep -c '[s]leep 9876'")).text == "0"


async def test_timeout_kills_what_forks_without_end(sandbox):
    script = "for i in 1 2 3 4; do setsid sh -c 'while :; do setsid sleep 98765 & sleep 0.01; done' & done; wait"
    run = await sandbox.commands.run(script, opts=RunCommandOpts(timeout=timedelta(seconds=1)))
    assert run.exit_code == 137 and "all processes of the command were killed" in run.error.traceback[-1]
    assert (await sandbox.commands.run("ps -eo args | grep -c '[s]leep 98765'")).text == "0"


@pytest.mark.parametrize(("script", "code"), [("kill -9 $$", 137), ("kill -SEGV $$", 139), ("kill -TERM $$", 143)])
async def test_death_by_signal_is_128_plus_signal(sandbox, script, code):
    assert (await sandbox.commands.run(script)).exit_code == code


async def test_interrupt_from_the_first_event(sandbox):
    async def on_init(init):
        await sandbox.commands.interrupt(init.id)

    began = time.monotonic()
    run = await sandbox.commands.run("sleep 60", handlers=ExecutionHandlers(on_init=on_init))
    assert time.monotonic() - began < 10
    assert run.error is not None and run.exit_code in (130, 137, 143)


async def test_background_status_logs_and_interrupt(sandbox):
    began = time.monotonic()
    run = await sandbox.commands.run(
        "echo one; sleep 0.5; echo two >&2; sleep 60", opts=RunCommandOpts(background=True)
    )
    assert time.monotonic() - began < 1
    status = await sandbox.commands.get_command_status(run.id)
    assert status.running and status.exit_code is None and "echo one" in status.content
    await asyncio.sleep(1)
    logs = await sandbox.commands.get_background_command_logs(run.id)
    assert logs.content == "one\ntwo\n" and logs.cursor == 8
    more = await sandbox.commands.get_background_command_logs(run.id, cursor=4)
    assert more.content == "two\n"
    end = await sandbox.commands.get_background_command_logs(run.id, cursor=8)
    assert end.content == "" and end.cursor == 8
    await sandbox.commands.interrupt(run.id)
    status = await sandbox.commands.get_command_status(run.id)
    assert not status.running and status.exit_code in (130, 137, 143) and status.finished_at is not None


async def test_the_log_of_a_program_that_writes_without_end(sandbox):
    run = await sandbox.commands.run("exec yes", opts=RunCommandOpts(background=True))
    await asyncio.sleep(1)
    first = await sandbox.commands.get_background_command_logs(run.id)
    assert 0 < len(first.content) <= 64 << 20 and set(first.content) == {"y", "\n"}
    assert (await sandbox.commands.get_background_command_logs(run.id, cursor=first.cursor)).cursor >= first.cursor
    await sandbox.commands.interrupt(run.id)


async def test_an_environment_file_that_is_too_large_locks_nobody_out(sandbox):
    fill = '(printf BIG=; head -c 200000 /dev/zero | tr "\\0" x; printf "\\nSMALL=1\\n") > "$EXECD_ENVS"'
    made = await sandbox.commands.run(f'mkdir -p "$(dirname "$EXECD_ENVS")"; {fill}')
    assert made.exit_code == 0
    assert (await sandbox.commands.run('echo "${#BIG} $SMALL"')).text == "0 1"


async def test_background_cat_ends_at_once(sandbox):
    run = await sandbox.commands.run("cat", opts=RunCommandOpts(background=True))
    for _ in range(50):
        status = await sandbox.commands.get_command_status(run.id)
        if not status.running:
            break
        await asyncio.sleep(0.02)
    assert status.exit_code == 0


async def test_unknown_command_ids(sandbox):
    for call in (
        sandbox.commands.get_command_status("0" * 32),
        sandbox.commands.get_background_command_logs("0" * 32),
        sandbox.commands.interrupt("0" * 32),
    ):
        with pytest.raises(SandboxApiException):
            await call


async def test_a_command_not_found_is_127(sandbox):
    run = await sandbox.commands.run("no-such-program-here")
    assert run.exit_code == 127
    direct = await sandbox.commands.run(["no-such-program-here"])
    assert direct.error is not None and direct.error.traceback


async def test_sixteen_commands_at_once(sandbox):
    runs = await asyncio.gather(*(sandbox.commands.run(f"echo {n}; sleep 0.1; exit {n}") for n in range(16)))
    assert [run.exit_code for run in runs] == list(range(16))
    assert [run.logs.stdout[0].text for run in runs] == [f"{n}\n" for n in range(16)]


async def test_no_zombies_after_a_storm_of_orphans(sandbox):
    await sandbox.commands.run("for i in $(seq 2000); do (sleep 0.01 &) ; done; sleep 0.3")
    assert (await sandbox.commands.run("ps -eo stat | grep -c '^Z'")).text == "0"


async def test_metrics_are_the_sandboxes_own(sandbox):
    metrics = await sandbox.get_metrics()
    assert metrics.cpu_count == 1
    assert metrics.memory_total_in_mib == 2048
    assert 0 <= metrics.memory_used_in_mib < 512
    assert 0 <= metrics.cpu_used_percentage <= 100
    assert abs(metrics.timestamp / 1000 - time.time()) < 10
