#!/usr/bin/env bash
# `make test-kernels`: the embedded engine in virtual machines with other kernels and hosts than this one; see boot.sh.
# Needs root, and some minutes for each machine where there is no KVM. Words behind it choose the tests that have one of
# them in their names; LIST=1 names them.
set -euo pipefail
. "$(dirname "$0")/../lib.sh"

work=$(mktemp -d /tmp/opensandbox-vm-tests.XXXXXX)
trap 'rm -rf "$work"' EXIT
passed=0 failed=() chosen=("$@")

# try NAME SUITE ARGUMENTS COMMAND
try() {
    local name=$1 word began=$SECONDS wanted=
    for word in "${chosen[@]}"; do case $name in *"$word"*) wanted=1 ;; esac; done
    [ -n "$wanted" ] || [ ${#chosen[@]} = 0 ] || return 0
    if [ -n "${LIST:-}" ]; then say "$name"; return; fi
    build
    if scripts/vm/boot.sh -k "$2" -a "$3" -t "${LIMIT:-1800}" -f osb="$osb" -f engine="$work/engine" -f net="$work/net" \
        -f scripts/vm/server -f scripts/vm/lacking "$4" >"$work/log" 2>&1; then
        passed=$((passed + 1))
        say "ok      $name ($((SECONDS - began)) s)"
        [ -z "${VERBOSE:-}" ] || cat "$work/log"
    else
        failed+=("$name")
        say "FAILED  $name"
        cat "$work/log"
    fi
}

build() {
    [ -z "${osb:-}" ] || return 0
    need_cargo
    osb=${OSB_BIN:-}
    if [ -z "$osb" ]; then
        scripts/build.sh dev
        osb=$TOP/dist/osb
    fi
    local test program
    for test in engine net; do
        program=$(cargo test --locked --package osb-engine --test $test --no-run 2>&1 | sed -n 's/.*(\(.*\))$/\1/p' | tail -n1)
        cp "$program" "$work/$test"
    done
}

# Whole: all tests of the engine and its network, then a server with its sandboxes.
for suite in bookworm trixie trixie-backports; do
    try "engine-$suite" $suite '' '/vm/net && /vm/engine'
    try "server-$suite" $suite '' 'sh /vm/server'
done

v1='for p in $(cat /sys/fs/cgroup/init.scope/cgroup.procs); do echo $p >/sys/fs/cgroup/cgroup.procs; done 2>/dev/null
rmdir /sys/fs/cgroup/init.scope; umount /sys/fs/cgroup
mount -t tmpfs cgroup /sys/fs/cgroup
for c in memory cpu,cpuacct pids; do mkdir /sys/fs/cgroup/$c; mount -t cgroup -o $c cgroup /sys/fs/cgroup/$c; done
'
# As in a container with a control group namespace of its own.
inside='mkdir /sys/fs/cgroup/outer; echo "+memory +pids $MORE" >/sys/fs/cgroup/cgroup.subtree_control
echo $$ >/sys/fs/cgroup/outer/cgroup.procs
exec unshare -Cm sh -c "umount /sys/fs/cgroup; mount -t cgroup2 cgroup2 /sys/fs/cgroup; sh /vm/lacking $WORDS"'

# Lacking: what the check and the start are to say, or that it works all the same.
try lacking-memory trixie cgroup_disable=memory 'sh /vm/lacking cgroup_disable=memory'
try lacking-pids trixie cgroup_disable=pids 'sh /vm/lacking cgroup_disable=pids'
try lacking-cpu-in-a-container trixie '' "MORE= WORDS=cgroup.subtree_control; $inside"
try lacking-a-leaf-in-a-container trixie '' "MORE=+cpu WORDS=topmost; $inside"
try lacking-writable-cgroups trixie '' 'mount -o remount,ro /sys/fs/cgroup; sh /vm/lacking remount,rw'
try lacking-cgroups trixie '' 'echo 1 >/sys/fs/cgroup/cgroup.procs; umount /sys/fs/cgroup; sh /vm/lacking "mount -t cgroup2"'
# Newer kernels of Debian have no memory controller of version 1.
try lacking-cgroups-2 bookworm '' "$v1 sh /vm/lacking cgroups works"
try lacking-nftables trixie module_blacklist=nf_tables 'sh /vm/lacking "modprobe nf_tables"'
try lacking-nft-masq trixie module_blacklist=nft_masq 'sh /vm/lacking "its module"'
try lacking-overlay trixie module_blacklist=overlay 'sh /vm/lacking "modprobe overlay"'
try lacking-user-namespaces trixie '' 'sysctl -q user.max_user_namespaces=0; sh /vm/lacking max_user_namespaces works'
try lacking-ipv6 trixie ipv6.disable=1 'sh /vm/lacking "out of memory" works'
try lacking-a-new-kernel bullseye '' 'sh /vm/lacking "too old"'

[ -z "${LIST:-}" ] || exit 0
say "$passed passed, ${#failed[@]} failed"
[ ${#failed[@]} = 0 ] || die "failed: ${failed[*]}"
[ $passed != 0 ] || die "no test has such a name: LIST=1 names them"
