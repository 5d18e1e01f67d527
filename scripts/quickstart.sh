#!/usr/bin/env bash
# From a fresh check-out to a program that uses a sandbox: builds, starts a server with a data directory of its own,
# runs examples/quickstart.py with the official Python SDK, and takes everything down again.
#
#   PORT=9000 make quickstart     another port than 8080
set -euo pipefail
. "$(dirname "$0")/lib.sh"

# The engine needs root; the rest of this does not.
if [ "$(id -u)" = 0 ]; then
    as_root=()
elif have sudo; then
    as_root=(sudo)
    say "Sandboxes need root: the server will be started with sudo."
    sudo -v || die "no root: run 'sudo make quickstart', or 'make quickstart' as root"
else
    die "sandboxes need root: run 'make quickstart' as root"
fi
[ "$(uname -s)" = Linux ] || die "the embedded engine needs Linux"

began=$(now_ms)
lap=$began
timed() {
    local now
    now=$(now_ms)
    printf '%7d ms  %s\n' $((now - lap)) "$1"
    lap=$now
}

need_cargo
say "building (a first time takes some minutes) …"
scripts/build.sh release
timed "built dist/osb ($(($(stat -c %s dist/osb) / 1048576)) MiB, one static file)"
venv examples/requirements.txt
timed "Python SDK of the official release in .venv"

listens() { (exec 3<>"/dev/tcp/127.0.0.1/$1") 2>/dev/null; }

if [ -n "${PORT:-}" ]; then
    ! listens "$PORT" || die "port $PORT is taken: choose another with PORT=…"
    port=$PORT
else
    port=8080
    while listens "$port"; do
        [ "$port" -lt 8180 ] || die "ports 8080 to 8180 are taken: choose one with PORT=…"
        port=$((port + 1))
    done
    [ "$port" = 8080 ] || say "port 8080 is taken, using $port"
fi

directory=$(mktemp -d /tmp/opensandbox-quickstart.XXXXXX)
key=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')
server=
stop() {
    local code=$?
    trap - EXIT INT TERM HUP
    if [ -n "$server" ]; then
        "${as_root[@]}" kill -TERM "$server" 2>/dev/null || true
        wait "$server" 2>/dev/null || true
    fi
    if [ -e "$directory/config.toml" ]; then
        "${as_root[@]}" dist/osb server --config "$directory/config.toml" --purge >>"$directory/server.log" 2>&1 ||
            say "leftovers in $directory could not be removed: see $directory/server.log"
    fi
    if [ "$code" != 0 ] && [ "$code" -lt 128 ] && [ -s "$directory/server.log" ]; then
        say "--- the server's last words"
        tail -n 20 "$directory/server.log"
    fi
    "${as_root[@]}" rm -rf --one-file-system "$directory"
    exit "$code"
}
trap stop EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

(umask 077 && cat >"$directory/config.toml") <<TOML
[server]
host = "127.0.0.1"
port = $port
api_key = "$key"

[runtime]
type = "embedded"

[embedded]
data_dir = "$directory/data"
TOML
lap=$(now_ms)
"${as_root[@]}" dist/osb server --config "$directory/config.toml" >"$directory/server.log" 2>&1 </dev/null &
server=$!

# The socket is open before the server is ready and holds connections until then.
deadline=$((SECONDS + 60))
until listens "$port"; do
    kill -0 "$server" 2>/dev/null || { server=; die "the server did not start"; }
    [ "$SECONDS" -lt "$deadline" ] || die "the server did not listen within a minute"
    sleep 0.02
done
timed "server up at http://127.0.0.1:$port"

say "running examples/quickstart.py"
OPEN_SANDBOX_DOMAIN=127.0.0.1:$port OPEN_SANDBOX_API_KEY=$key timeout 300 .venv/bin/python examples/quickstart.py
lap=$(now_ms)
"${as_root[@]}" kill -TERM "$server"
wait "$server" || true
server=
timed "server stopped"
printf '%7d ms  in all\n' $(($(now_ms) - began))
say "Next: dist/osb server, then dist/osb run host -- echo hello. README.md has more."
