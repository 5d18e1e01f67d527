#!/usr/bin/env bash
# Installs the official clients that conformance/ drives: newest Python SDK, CLI and MCP server into .venv, older SDKs
# into .venv/clients/NAME, the JavaScript SDK beside its agent. Nothing to do when they are there.
set -euo pipefail
. "$(dirname "$0")/lib.sh"

NODE_VERSION=20

need_packages nodejs:node npm:npm
major=$(node --version | sed 's/^v\([0-9]*\).*/\1/')
[ "$major" -ge "$NODE_VERSION" ] ||
    die "the JavaScript SDK needs Node.js $NODE_VERSION or newer, this is $(node --version): install a newer one"

venv conformance/requirements.txt
for requirements in conformance/agents/python-*.txt; do
    venv "$requirements" ".venv/clients/$(basename "$requirements" .txt)"
done

agent=conformance/agents/js
stamp=$agent/node_modules/installed-$(cksum <$agent/package-lock.json | tr ' ' -)
if [ ! -e "$stamp" ]; then
    npm ci --prefix $agent --silent --no-audit --no-fund
    : >"$stamp"
fi
