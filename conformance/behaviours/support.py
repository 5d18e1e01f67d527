"""What several behaviours use."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import contextmanager
from datetime import datetime, timezone
from typing import Any

from drivers import ClientError


class Caught:
    """The error that a block was left with."""

    error: ClientError


@contextmanager
def refused(client: Any, status: int | None = None, code: str | None = None, kind: str = "SandboxApiException"):
    """The block must fail as a client tells of an error with this status and code."""
    caught = Caught()
    try:
        yield caught
    except ClientError as error:
        caught.error = error
    else:
        raise AssertionError("the call was expected to fail")
    error = caught.error
    if client.spec.kind == "cli":
        assert error.kind == "exit 1", error
    elif client.spec.kind == "mcp":
        assert error.kind == "isError", error
    else:
        assert kind in (error.kind, *error.bases), error
        assert status is None or error.status == status, error
    # Clients know the codes of some answers only; the rest they hand on as it came, and old ones lose it.
    lost = client.spec.lacks("error.code") and error.code == "UNEXPECTED_RESPONSE"
    assert code is None or lost or error.code == code or f'"code":"{code}"' in error.body + error.message, error
    assert error.message, error


def moment(text: str) -> datetime:
    return datetime.fromisoformat(text.replace("Z", "+00:00"))


def seconds_from_now(text: str) -> float:
    """How far a time in an answer lies ahead."""
    return (moment(text) - datetime.now(timezone.utc)).total_seconds()


def eventually(check: Callable[[], Any], seconds: float = 10) -> Any:
    """What `check` gives once it gives something true."""
    deadline = time.monotonic() + seconds
    while not (found := check()):
        assert time.monotonic() < deadline, f"not so after {seconds} s"
        time.sleep(0.05)
    return found
