"""A front before a server that keeps one thing from its clients: that a sandbox is ready."""

from __future__ import annotations

import http.client
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class NeverReady:
    """Passes everything on, except that every ping of a daemon is answered by 500."""

    def __init__(self, port: int, api_key: str) -> None:
        self._port, self._api_key = port, api_key
        #: Sandboxes that were made through this front.
        self.created: list[str] = []
        front = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                if self.path.endswith("/proxy/44772/ping"):
                    status, reply = 500, b'{"code":"NOT_READY","message":"not yet"}'
                else:
                    status, reply = front._ask(self.command, self.path, body, dict(self.headers))
                if self.command == "POST" and self.path.endswith("/sandboxes") and status == 202:
                    front.created.append(json.loads(reply)["id"])
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                if status != 204:
                    self.send_header("Content-Length", str(len(reply)))
                self.end_headers()
                self.wfile.write(reply)

            do_GET = do_POST = do_DELETE = answer

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.domain = f"127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> NeverReady:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def alive(self) -> list[str]:
        """Those of `created` that the server still has."""
        key = {"OPEN-SANDBOX-API-KEY": self._api_key}
        return [id for id in self.created if self._ask("GET", f"/v1/sandboxes/{id}", b"", key)[0] != 404]

    def _ask(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=30)
        try:
            connection.request(method, path, body or None, headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()
