#!/usr/bin/env bash
# Makes what the peers of `bench/run create_exec` need: a Debian root file system, runc, and Docker's engine holding the
# same files as the image `bench-rootfs`. Prints the variables to set. Stop the engine with `kill $(cat DIR/dockerd.pid)`.
set -euo pipefail
dir=${1:-/var/tmp/osb-bench-peers}
mkdir -p "$dir"
export DEBIAN_FRONTEND=noninteractive
command -v mmdebstrap >/dev/null || apt-get install -y -qq mmdebstrap >/dev/null
command -v runc >/dev/null && command -v dockerd >/dev/null || apt-get install -y -qq docker.io runc >/dev/null
[ -d "$dir/rootfs/usr" ] || mmdebstrap --quiet --variant=minbase bookworm "$dir/rootfs"
if ! docker info >/dev/null 2>&1; then
  dockerd --exec-opt native.cgroupdriver=cgroupfs --oom-score-adjust 0 --data-root "$dir/docker" \
    --pidfile "$dir/dockerd.pid" >"$dir/dockerd.log" 2>&1 </dev/null &
  for _ in $(seq 100); do docker info >/dev/null 2>&1 && break; sleep 0.2; done
fi
docker image inspect bench-rootfs >/dev/null 2>&1 || tar -C "$dir/rootfs" -c . | docker import - bench-rootfs >/dev/null
echo "export BENCH_ROOTFS=$dir/rootfs"
