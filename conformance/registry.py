"""Registries on the loopback for tests: Debian's docker-registry, with or without accounts, perhaps behind a slow line.

Images are made here, of one statically linked program, and pushed with skopeo: nothing comes from the network.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import tarfile
import tempfile
import threading
import time
import warnings
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

ARCH = {"x86_64": "amd64", "aarch64": "arm64"}[platform.machine()]
BUSYBOX = "/bin/busybox"
TOOLS = ("sh", "tail", "cat", "ls", "id", "env", "pwd", "stat", "echo", "sleep", "true", "test", "wc")


def missing() -> str:
    """What this machine lacks for these tests; empty when it has all."""
    needed = {"docker-registry": shutil.which("docker-registry"), "skopeo": shutil.which("skopeo"), "busybox-static": os.path.exists(BUSYBOX)}
    return ", ".join(name for name, found in needed.items() if not found)


def bcrypt(password: str) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        import crypt

        return crypt.crypt(password, crypt.mksalt(crypt.METHOD_BLOWFISH, rounds=16))


class Layout:
    """An OCI layout with one image: a small system, and whatever the test adds."""

    def __init__(self, directory: Path, config: dict | None = None, files: dict[str, bytes] | None = None, ballast: int = 0, arch: str = ARCH) -> None:
        self.directory = directory
        (directory / "blobs" / "sha256").mkdir(parents=True)
        layers = [self._layer({**self._system(), **(files or {})})]
        if ballast:
            # Cannot be compressed, so that what travels is as large as what was asked for.
            layers.append(self._layer({"ballast": os.urandom(ballast)}))
        image = {
            "architecture": arch,
            "os": "linux",
            "config": {"Env": ["PATH=/bin:/usr/bin", "FROM_IMAGE=yes"], **(config or {})},
            "rootfs": {"type": "layers", "diff_ids": [layer["digest"] for layer in layers]},
        }
        manifest = {
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": self._json(image, "application/vnd.oci.image.config.v1+json"),
            "layers": layers,
        }
        described = self._json(manifest, "application/vnd.oci.image.manifest.v1+json")
        (directory / "oci-layout").write_text('{"imageLayoutVersion":"1.0.0"}')
        index = {"schemaVersion": 2, "manifests": [described]}
        (directory / "index.json").write_text(json.dumps(index))

    def _system(self) -> dict[str, bytes]:
        return {
            "bin/busybox": Path(BUSYBOX).read_bytes(),
            "etc/passwd": b"root:x:0:0:root:/root:/bin/sh\nworker:x:1000:1000::/home/worker:/bin/sh\n",
            "etc/group": b"root:x:0:\nworker:x:1000:\n",
            "tmp/": b"",
            "root/": b"",
        }

    def _blob(self, data: bytes) -> str:
        digest = hashlib.sha256(data).hexdigest()
        (self.directory / "blobs" / "sha256" / digest).write_bytes(data)
        return f"sha256:{digest}"

    def _json(self, value: dict, media_type: str) -> dict:
        data = json.dumps(value).encode()
        return {"mediaType": media_type, "digest": self._blob(data), "size": len(data)}

    def _layer(self, files: dict[str, bytes]) -> dict:
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as archive:
            for name, data in files.items():
                entry = tarfile.TarInfo(name.rstrip("/"))
                if name.endswith("/"):
                    entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if name == "tmp/" else 0o755
                    archive.addfile(entry)
                    continue
                entry.size, entry.mode = len(data), 0o755
                archive.addfile(entry, io.BytesIO(data))
            if "bin/busybox" in files:
                for tool in TOOLS:
                    link = tarfile.TarInfo(f"bin/{tool}")
                    link.type, link.linkname = tarfile.SYMTYPE, "busybox"
                    archive.addfile(link)
        data = buffer.getvalue()
        return {"mediaType": "application/vnd.oci.image.layer.v1.tar", "digest": self._blob(data), "size": len(data)}


class Registry:
    """A running docker-registry."""

    def __init__(self, directory: Path, account: tuple[str, str] | None = None) -> None:
        self.directory = directory
        self.account = account
        directory.mkdir(parents=True, exist_ok=True)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        auth = ""
        if account:
            (directory / "htpasswd").write_text(f"{account[0]}:{bcrypt(account[1])}\n")
            auth = f"auth: {{htpasswd: {{realm: test, path: {directory}/htpasswd}}}}\n"
        (directory / "config.yml").write_text(
            "version: 0.1\n"
            f"storage: {{filesystem: {{rootdirectory: {directory}/data}}}}\n"
            f"http: {{addr: '127.0.0.1:{self.port}'}}\n"
            "log: {accesslog: {disabled: false}}\n" + auth
        )
        self.log_path = directory / "registry.log"
        self.process = subprocess.Popen(
            ["docker-registry", "serve", str(directory / "config.yml")],
            stdin=subprocess.DEVNULL,
            stdout=self.log_path.open("ab"),
            stderr=subprocess.STDOUT,
        )
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                return
            except OSError:
                time.sleep(0.05)
        raise RuntimeError(f"the registry did not start:\n{self.log_path.read_text()[-2000:]}")

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"

    def push(self, name: str, **image: object) -> str:
        """Makes an image and pushes it; returns its reference."""
        with tempfile.TemporaryDirectory(prefix="osb-image-") as directory:
            layout = Layout(Path(directory) / "layout", **image)
            command = ["skopeo", "copy", "-q", "--insecure-policy", "--dest-tls-verify=false"]
            if self.account:
                command += ["--dest-creds", ":".join(self.account)]
            reference = f"{self.host}/{name}"
            subprocess.run([*command, f"oci:{layout.directory}", f"docker://{reference}"], check=True)
            return reference

    def blob_downloads(self, name: str) -> list[str]:
        """Digests of the blobs of a repository that were sent, once per time."""
        repository = name.split(":")[0]
        return re.findall(rf'"GET /v2/{repository}/blobs/(sha256:[0-9a-f]+)[^"]*" 20', self.log_path.read_text(errors="replace"))

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(timeout=10)


class Refusing:
    """What looks like a registry and answers every request with the status that the tag names."""

    def __enter__(self) -> Refusing:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                status = int(self.path.rsplit("/", 1)[-1])
                text = json.dumps({"errors": [{"code": "TEST", "message": "so it was asked for"}]}).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                if status == 401:
                    self.send_header("WWW-Authenticate", 'Basic realm="test"')
                if status == 429:
                    self.send_header("Retry-After", "3600")
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.host = f"127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()


class SlowLine:
    """A line to a registry that lets so many bytes through and then waits."""

    CHUNK = 16 << 10

    def __init__(self, registry: Registry) -> None:
        self.target = ("127.0.0.1", registry.port)
        self.registry = registry
        self._allowed = 0
        self._free = False
        self._changed = threading.Condition()
        self.sent = 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"

    def reference(self, reference: str) -> str:
        return reference.replace(self.registry.host, self.host, 1)

    def allow(self, more: int) -> None:
        with self._changed:
            self._allowed += more
            self._changed.notify_all()

    def release(self) -> None:
        with self._changed:
            self._free = True
            self._changed.notify_all()

    def close(self) -> None:
        self.release()
        self.listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            upstream = socket.create_connection(self.target)
            for source, sink, slow in ((client, upstream, False), (upstream, client, True)):
                threading.Thread(target=self._copy, args=(source, sink, slow), daemon=True).start()

    def _copy(self, source: socket.socket, sink: socket.socket, slow: bool) -> None:
        try:
            while data := source.recv(self.CHUNK):
                if slow:
                    with self._changed:
                        self._changed.wait_for(lambda: self._free or self._allowed >= len(data))
                        self._allowed -= len(data)
                        self.sent += len(data)
                sink.sendall(data)
        except OSError:
            pass
        for end in (source, sink):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
            end.close()
