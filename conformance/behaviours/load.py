"""Many things at once, from one client."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from behaviours import behaviour

MANY = 20


def _at_once(call) -> list:
    with ThreadPoolExecutor(MANY) as pool:
        return list(pool.map(call, range(MANY)))


@behaviour()
def twenty_sandboxes_live_at_once(client):
    def one(n: int) -> str:
        box = client.create(metadata={"n": str(n)})
        try:
            return box.run(f"echo {n}").output
        finally:
            box.kill()

    assert _at_once(one) == [f"{n}\n" for n in range(MANY)]


@behaviour(basic=True)
def twenty_commands_run_at_once(client, box):
    runs = _at_once(lambda n: box.run(f"echo {n}; sleep 0.2; exit {n}"))
    assert [run.exit_code for run in runs] == list(range(MANY))
    assert [run.output for run in runs] == [f"{n}\n" for n in range(MANY)]


@behaviour()
def twenty_files_are_written_at_once(client, box):
    texts = [f"{n} " * 10_000 for n in range(MANY)]
    _at_once(lambda n: box.write(f"/tmp/at-once/{n}", texts[n]))
    assert _at_once(lambda n: box.read(f"/tmp/at-once/{n}")) == texts


@behaviour()
def twenty_writers_of_one_file_leave_one_whole_file(client, box):
    texts = [chr(ord("a") + n) * 50_000 for n in range(MANY)]
    _at_once(lambda n: box.write("/tmp/raced", texts[n]))
    assert box.read("/tmp/raced") in texts
