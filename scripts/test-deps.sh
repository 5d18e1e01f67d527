#!/usr/bin/env bash
# Installs what the tests use and the product does not need: tools to look at the host with, a shell for small root
# file systems, a registry and what fills it, Python for the official SDK.
set -euo pipefail
. "$(dirname "$0")/lib.sh"

need_cargo
need_packages \
    apache2-utils:htpasswd \
    busybox-static:busybox \
    docker-registry:docker-registry \
    iproute2:ip \
    nftables:nft \
    procps:ps \
    python3:python3 \
    python3-venv: \
    skopeo:skopeo \
    util-linux:unshare
