"""Shell sessions through the asynchronous and the synchronous client."""

import asyncio
import time
from datetime import timedelta

import pytest
from opensandbox.exceptions import SandboxApiException
from opensandbox.models.execd import ExecutionHandlers


async def test_state_is_kept_from_run_to_run(sandbox):
    session = await sandbox.commands.create_session(working_directory="/usr")
    run = await sandbox.commands.run_in_session(session, "pwd; export A='x y'; f() { echo f; }; cd /tmp")
    assert (run.id, run.text, run.exit_code) == (session, "/usr", 0)
    run = await sandbox.commands.run_in_session(session, 'echo "$A" >&2; f; pwd')
    assert (run.text, run.logs.stderr) == ("x y\nf\n/tmp", [])
    run = await sandbox.commands.run_in_session(session, "pwd", working_directory="/var")
    assert run.text == "/var"
    assert (await sandbox.commands.run_in_session(session, "pwd")).text == "/var"
    await sandbox.commands.delete_session(session)


async def test_failing_runs_have_their_code_and_the_session_stays(sandbox):
    session = await sandbox.commands.create_session()
    await sandbox.commands.run_in_session(session, "export A=1")
    for command, code in [("exit 3", 3), ("false", 1), ("kill -9 $$", 137), ('echo "unbalanced', 2), ("exec sh -c 'exit 7'", 7), ("set -e; false", 1)]:
        run = await sandbox.commands.run_in_session(session, command)
        assert run.exit_code == code and run.error.name == "CommandExecError", command
        assert (await sandbox.commands.run_in_session(session, "set +e; echo $A")).text == "1", command
    began = time.monotonic()
    run = await sandbox.commands.run_in_session(session, "echo before; sleep 60", timeout=timedelta(seconds=1))
    assert (run.text, run.exit_code) == ("before", 137) and time.monotonic() - began < 4
    await sandbox.commands.delete_session(session)
    for call in (sandbox.commands.run_in_session(session, "true"), sandbox.commands.delete_session(session)):
        with pytest.raises(SandboxApiException) as refused:
            await call
        assert refused.value.status_code == 404


async def test_two_runs_of_one_session_take_turns(sandbox):
    session = await sandbox.commands.create_session()
    runs = await asyncio.gather(*(sandbox.commands.run_in_session(session, f"sleep 0.3; echo {n}") for n in "AB"))
    assert [run.text for run in runs] == ["A", "B"]
    await sandbox.commands.delete_session(session)


async def test_a_session_is_interrupted_and_stays(sandbox):
    session = await sandbox.commands.create_session()

    async def on_stdout(message):
        await sandbox.commands.interrupt(session)

    run = await sandbox.commands.run_in_session(session, "A=1; echo up; sleep 60", handlers=ExecutionHandlers(on_stdout=on_stdout))
    assert run.exit_code in (137, 143)
    assert (await sandbox.commands.run_in_session(session, "echo still")).text == "still"
    await sandbox.commands.delete_session(session)


async def test_deleting_ends_everything(sandbox):
    session = await sandbox.commands.create_session()
    await sandbox.commands.run_in_session(session, "sleep 98761 & (setsid sleep 98761 &); :")
    await sandbox.commands.delete_session(session)
    assert (await sandbox.commands.run("ps -eo args | grep -c '[s]leep 98761'; ls -A /dev/shm /tmp | grep -c execd-sh")).text == "0\n0"


def test_the_synchronous_client(sandbox_sync):
    session = sandbox_sync.commands.create_session(working_directory="/usr")
    assert sandbox_sync.commands.run_in_session(session, "pwd; B=2").text == "/usr"
    assert sandbox_sync.commands.run_in_session(session, "echo $B; exit 5").exit_code == 5
    assert sandbox_sync.commands.run_in_session(session, "echo $B").text == "2"
    big = "x='" + "y" * (1 << 20) + "'; echo ${#x}"
    assert sandbox_sync.commands.run_in_session(session, big).text == str(1 << 20)
    sandbox_sync.commands.delete_session(session)
    with pytest.raises(SandboxApiException):
        sandbox_sync.commands.run_in_session(session, "true")
