"""What the CLI and the MCP server both pass on of the Python SDK, and the one form in which behaviours see it."""

from __future__ import annotations

import re
from typing import Any

from drivers import ClientError

CODE = re.compile(r"\[([A-Z][A-Z0-9_:]+)\] ")
REQUEST_ID = re.compile(r"request_id=(\S+)")


def told(kind: str, text: str) -> ClientError:
    """An error from the text that a client made of an SDK's exception."""
    code, request_id = CODE.search(text), REQUEST_ID.search(text)
    return ClientError(
        {
            "kind": kind,
            "code": code and code[1],
            "message": text.strip(),
            "request_id": request_id and request_id[1],
        }
    )


def info(value: dict[str, Any]) -> dict[str, Any]:
    """A sandbox."""
    return {
        "id": value["id"],
        "state": value["status"]["state"],
        "reason": value["status"].get("reason"),
        "message": value["status"].get("message"),
        "image": (value.get("image") or {}).get("image"),
        "entrypoint": value["entrypoint"],
        "metadata": value.get("metadata") or {},
        "extensions": value.get("extensions") or {},
        "created_at": value["created_at"],
        "expires_at": value.get("expires_at"),
    }


def page(items: list[dict[str, Any]], pagination: dict[str, Any]) -> dict[str, Any]:
    """One page of sandboxes."""
    return {"items": [info(item) for item in items], "pagination": pagination}


def endpoint(value: dict[str, Any]) -> dict[str, Any]:
    """How to reach a port."""
    return {"endpoint": value["endpoint"], "headers": value.get("headers") or {}}


def metrics(value: dict[str, Any]) -> dict[str, Any]:
    """What a sandbox uses."""
    return {
        "cpu_count": value["cpu_count"],
        "cpu_percent": value["cpu_used_percentage"],
        "memory_total": value["memory_total_in_mib"],
        "memory_used": value["memory_used_in_mib"],
        "timestamp": value["timestamp"],
    }
