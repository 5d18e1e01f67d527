"""Commands: what they print, how they end, how they are ended."""

from __future__ import annotations

import time

from behaviours import behaviour
from behaviours.support import eventually, refused


@behaviour(basic=True)
def output_and_exit_code_arrive(client, box):
    run = box.run("echo out; echo err >&2; exit 3")
    assert run.output == "out\n" and "".join(run.stderr) == "err\n"
    assert run.exit_code == 3 and not run.complete
    assert (run.error["name"], run.error["value"]) == ("CommandExecError", "3")
    good = box.run("true")
    assert good.exit_code == 0 and good.complete and good.error is None


@behaviour("run.exact", basic=True)
def every_line_end_is_kept(client, box):
    for printed, text in (
        ("hello", "hello"),
        ("a\\n\\nb\\n", "a\n\nb\n"),
        ("one\\r\\ntwo\\r\\n", "one\r\ntwo\r\n"),
        ("10%%\\r20%%\\r", "10%\r20%\r"),
        ("\\n\\n\\n", "\n\n\n"),
        ("mixed\\n\\r\\nend\\r", "mixed\n\r\nend\r"),
    ):
        assert box.run(f"printf '{printed}'").output == text, printed


@behaviour("run.exact", basic=True)
def a_server_for_old_clients_strips_line_ends(client, strip):
    box = client.at(domain=strip.domain).create()
    assert box.run("printf 'a\\n\\nb\\r\\nc'").stdout == ["a", "\n", "b", "c"]
    box.kill()


@behaviour("run.joined")
def lines_are_joined_by_the_client(client, box):
    assert box.run("printf 'a\\n\\nb\\r\\nc\\n'").text == "a\n\nb\nc"


@behaviour("run.exact", basic=True)
def any_text_is_printed(client, box):
    assert box.run("printf 'ä€🙂 \\xe6\\x97\\xa5'; sleep 0.02; printf '\\xe6\\x9c'; sleep 0.02; printf '\\xac'").output == "ä€🙂 日本"
    assert box.run("printf '\\xff\\xfe'").output == "\ufffd\ufffd"
    assert box.run("printf 'a\\033[1mb\\a\\000c'").output == "a\033[1mb\a\0c"


@behaviour()
def thousands_of_lines_keep_their_order(client, box):
    assert box.run("seq 1 5000").output.splitlines() == [str(n) for n in range(1, 5001)]


@behaviour()
def a_very_long_line_arrives_whole(client, box):
    assert box.run("head -c 300000 /dev/zero | tr '\\0' a; echo").output == "a" * 300_000 + "\n"


@behaviour(faults={"cli": "an argument of a process may have 128 KiB"})
def a_command_may_be_a_megabyte(client, box):
    assert box.run(f"x='{'y' * 1_000_000}'; echo ${{#x}}").output == "1000000\n"


@behaviour("run.cwd", basic=True)
def the_working_directory_is_set(client, box):
    assert box.run("pwd", cwd="/usr/lib").output == "/usr/lib\n"
    for nowhere in ("/no/such/dir", "/etc/passwd"):
        with refused(client, 400, "INVALID_REQUEST_BODY"):
            box.run("true", cwd=nowhere)


@behaviour("run.env", "run.uid", basic=True)
def environment_and_identity_are_set(client, box):
    run = box.run('echo "$X"; id -u; id -g', env={"X": "1 2", "PATH": "/usr/bin:/bin"}, uid=65534, gid=65534)
    assert run.output == "1 2\n65534\n65534\n"


@behaviour("run.argv")
def arguments_are_not_touched_by_a_shell(client, box):
    argv = ["printf", "%s|", "a b", "$HOME", "*", "; exit 9", ""]
    assert box.run(argv=argv).output.rstrip("\n") == "a b|$HOME|*|; exit 9||"


@behaviour("run.timeout", basic=True)
def a_timeout_ends_the_whole_tree(client, box):
    began = time.monotonic()
    run = box.run("echo before; sleep 98761 & setsid sleep 98761 & sleep 98761", timeout=1)
    assert 0.9 < time.monotonic() - began < 15
    assert run.output == "before\n" and run.exit_code == 137
    assert box.run("ps -eo args | grep -c '[s]leep 98761'").output == "0\n"


@behaviour()
def death_by_signal_is_128_and_the_signal(client, box):
    for script, code in (("kill -9 $$", 137), ("kill -SEGV $$", 139), ("kill -TERM $$", 143)):
        assert box.run(script).exit_code == code


@behaviour()
def a_program_that_is_not_there_is_127(client, box):
    run = box.run("no-such-program-here")
    assert run.exit_code == 127 and "no-such-program-here" in "".join(run.stderr)


@behaviour()
def standard_input_is_empty(client, box):
    assert box.run("cat; read x || echo eof; printf a | cat; echo").output == "eof\na\n"


@behaviour()
def a_run_ends_with_its_process_not_with_its_pipes(client, box):
    for script in ("sleep 30 &", "(sleep 30 &) ; true", "setsid sleep 30 & disown"):
        began = time.monotonic()
        assert box.run(script).exit_code == 0
        assert time.monotonic() - began < 3


@behaviour("run.arrivals")
def lines_arrive_when_they_are_written(client, box):
    arrivals = box.run("for i in 1 2 3; do echo $i; sleep 0.3; done", "run.arrivals").arrivals
    assert len(arrivals) == 3
    assert all(0.2 < later - earlier < 0.7 for earlier, later in zip(arrivals, arrivals[1:]))


@behaviour("status", "logs", basic=True)
def background_commands_are_followed(client, box):
    began = time.monotonic()
    execution = box.start("echo one; sleep 0.3; echo two >&2; sleep 0.2; exit 4")
    assert time.monotonic() - began < 1.5
    first = box.status(execution)
    assert first["running"] and first["exit_code"] is None and not first["finished"]
    done = eventually(lambda: (found := box.status(execution))["finished"] and found)
    assert not done["running"] and done["exit_code"] == 4
    logs = box.logs(execution)
    assert logs == {"content": "one\ntwo\n", "cursor": 8}
    assert box.logs(execution, cursor=4) == {"content": "two\n", "cursor": 8}
    assert box.logs(execution, cursor=8) == {"content": "", "cursor": 8}


@behaviour("open_session", "run_in_session", "delete_session")
def sessions_keep_their_state(client, box):
    session = box.open_session(cwd="/usr")
    assert box.run_in_session(session, "export KEPT=one").exit_code == 0
    assert box.run_in_session(session, "cd /var").exit_code == 0
    assert box.run_in_session(session, "printenv KEPT").output == "one\n"
    assert box.run_in_session(session, "pwd").output == "/var\n"
    assert box.run_in_session(session, "pwd", cwd="/usr/bin").output == "/usr/bin\n"
    failed = box.run_in_session(session, "exit 5")
    assert (failed.exit_code, failed.error["value"]) == (5, "5")
    assert box.run_in_session(session, "printenv KEPT").output == "one\n"
    assert box.run_in_session(session, "sleep 60", timeout=1).exit_code == 137
    box.delete_session(session)
    with refused(client, status=404):
        box.delete_session(session)


@behaviour(basic=True)
def background_commands_are_interrupted(client, box):
    execution = box.start("sleep 98762 & sleep 98762")
    count = "ps -eo args | grep -c '^sleep 98762'"
    eventually(lambda: box.run(count).output == "2\n")
    box.interrupt(execution)
    eventually(lambda: box.run(count).output == "0\n")


@behaviour("status")
def an_interrupted_command_is_told_as_such(client, box):
    execution = box.start("sleep 98763")
    box.interrupt(execution)
    done = eventually(lambda: (found := box.status(execution))["finished"] and found)
    assert not done["running"] and done["exit_code"] in (130, 137, 143)


@behaviour("run.interrupt_at_init")
def a_command_is_interrupted_at_its_first_event(client, box):
    began = time.monotonic()
    run = box.run("sleep 60", interrupt_at_init=True)
    assert time.monotonic() - began < 10
    assert run.error is not None and run.exit_code in (130, 137, 143)


@behaviour()
def unknown_executions_cannot_be_interrupted(client, box):
    with refused(client, 404):
        box.interrupt("0" * 32)


@behaviour("status", "logs")
def unknown_executions_have_neither_status_nor_logs(client, box):
    with refused(client, 404):
        box.status("0" * 32)
    with refused(client, 400):
        box.logs("0" * 32)


@behaviour("set_env")
def variables_are_kept_for_later_commands(client, box):
    for value in ("plain", "$HOME stays", "it's \"here\"\n\ttoo", ""):
        box.set_env("LATER", value)
        assert box.run('printf %s "[$LATER]"').output == f"[{value}]"


@behaviour()
def a_child_that_is_left_alone_leaves_no_zombie(client, box):
    box.run("for i in $(seq 50); do (sleep 0.01 &) ; done; sleep 0.1")
    assert box.run("ps -eo stat | grep -c '^Z'").output == "0\n"
