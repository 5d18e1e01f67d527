#!/usr/bin/env bash
# Installs what the tests use and the product does not need: tools to look at the host with, a shell for small root
# file systems, Python for the official SDK.
set -euo pipefail
. "$(dirname "$0")/lib.sh"

need_cargo
need_packages \
    busybox-static:busybox \
    iproute2:ip \
    nftables:nft \
    procps:ps \
    python3:python3 \
    python3-venv: \
    util-linux:unshare
