#!/usr/bin/env bash
# Runs a command in a small virtual machine with another kernel than this machine's, and ends with its exit code.
#
#   scripts/vm/boot.sh [-k SUITE] [-a ARGUMENTS] [-f FILE]... [-t SECONDS] COMMAND
#
#   -k  a suite of Debian, whose newest kernel is taken (default: trixie); see kernel.sh
#   -a  added to the kernel's command line, say 'cgroup_disable=memory' or 'module_blacklist=overlay'
#   -f  a file that the command finds in /vm, under its own name or, as NAME=FILE, under that one; may be repeated
#   -t  the machine is switched off after so long (default: 600)
#
# The command is text for sh, run by root in a minimal Debian; its output is the console's. The machine has 2 processors,
# 2 GiB, a disk of 4 GiB, a network card that leads nowhere, and only version 2 of cgroups. It uses KVM where there is
# some and is emulated, slowly, where there is none. Nothing it writes is kept. What was downloaded is kept, in
# ~/.cache/opensandbox/vm, until you delete it.
set -euo pipefail
. "$(dirname "$0")/../lib.sh"

suite=trixie arguments='' limit=600 files=()
while getopts k:a:f:t: option; do
    case $option in
        k) suite=$OPTARG ;;
        a) arguments=$OPTARG ;;
        f) files+=("$OPTARG") ;;
        t) limit=$OPTARG ;;
        *) exit 2 ;;
    esac
done
shift $((OPTIND - 1))
command=${1:?which command?}

cache=${XDG_CACHE_HOME:-$HOME/.cache}/opensandbox/vm
need_packages qemu-system-x86:qemu-system-x86_64 mmdebstrap:mmdebstrap e2fsprogs:mkfs.ext4 kmod:modprobe busybox-static:
mkdir -p "$cache"
work=$(mktemp -d /tmp/opensandbox-vm.XXXXXX)
trap 'rm -rf "$work"' EXIT

kernel=$(scripts/vm/kernel.sh "$suite")
version=$(basename "$kernel"/lib/modules/*)

# The root file system, with this kernel's modules.
if [ ! -e "$cache/root.tar" ]; then
    mmdebstrap --quiet --variant=minbase --include=busybox-static,curl,iproute2,kmod,nftables,procps \
        bookworm "$cache/root.tar.part" --format=tar
    mv "$cache/root.tar.part" "$cache/root.tar"
fi
disk=$cache/root-$version.ext4
if [ ! -e "$disk" ] || [ "$cache/root.tar" -nt "$disk" ]; then
    mkdir "$work/root"
    tar -C "$work/root" -xf "$cache/root.tar" --exclude './dev/*'
    mkdir -p "$work/root/usr/lib/modules"
    cp -a "$kernel/lib/modules/$version" "$work/root/usr/lib/modules/"
    mkfs.ext4 -q -F -L root -d "$work/root" "$disk.part" 4G >/dev/null
    mv "$disk.part" "$disk"
    rm -rf "$work/root"
fi

# What finds the disk.
mkdir -p "$work/initramfs"/{bin,modules,proc,dev,root}
cp /bin/busybox "$work/initramfs/bin/"
number=100
for module in virtio_pci virtio_blk ext4; do
    while read -r kind path _; do
        [ "$kind" = insmod ] || continue
        [ -e "$(echo "$work/initramfs/modules"/*-"$(basename "${path%.xz}")")" ] && continue
        to=$work/initramfs/modules/$number-$(basename "${path%.xz}")
        case $path in *.xz) xz -dc "$path" >"$to" ;; *) cp "$path" "$to" ;; esac
        number=$((number + 1))
    done < <(modprobe -d "$kernel" -S "$version" --show-depends "$module" 2>/dev/null)
done
cat >"$work/initramfs/init" <<'END'
#!/bin/busybox sh
/bin/busybox mount -t devtmpfs dev /dev
for module in /modules/*; do /bin/busybox insmod "$module"; done
until [ -b /dev/vda ] && [ -b /dev/vdb ]; do /bin/busybox sleep 0.05; done
/bin/busybox mount -t ext4 /dev/vda /root
/bin/busybox mkdir -p /root/vm
/bin/busybox mount -t ext4 -o ro /dev/vdb /root/vm
/bin/busybox mount -o move /dev /root/dev
exec /bin/busybox switch_root /root /bin/sh /vm/init
END
chmod +x "$work/initramfs/init"
(cd "$work/initramfs" && find . | busybox cpio -o -H newc) >"$work/initramfs.cpio" 2>/dev/null

# What the command needs.
mkdir "$work/vm"
for file in "${files[@]}"; do
    from=${file#*=}
    cp -L "$from" "$work/vm/$(basename "${file%%=*}")"
done
printf '%s\n' "$command" >"$work/vm/command"
cp scripts/vm/init "$work/vm/init"
size=$(($(du -sm "$work/vm" | cut -f1) * 5 / 4 + 16))
mkfs.ext4 -q -F -d "$work/vm" "$work/vm.ext4" "${size}M" >/dev/null

# A device without the processor's support behind it does not get through a boot.
accelerate=(-accel tcg,thread=multi -cpu max)
if [ -w /dev/kvm ] && grep -qwE 'vmx|svm' /proc/cpuinfo; then accelerate=(-accel kvm -cpu host); fi
# An emulated boot now and then dies of the emulator, before anything of ours runs.
for _ in 1 2 3; do
    code=0
    TMPDIR=$work timeout "$limit" nice -n 10 qemu-system-x86_64 "${accelerate[@]}" -smp 2 -m 2048 -nodefaults -no-reboot \
        -display none -serial file:"$work/console" -kernel "$kernel/vmlinuz" -initrd "$work/initramfs.cpio" \
        -append "console=ttyS0 loglevel=3 panic=-1 $arguments" \
        -drive file="$disk",format=raw,if=virtio,snapshot=on -drive file="$work/vm.ext4",format=raw,if=virtio,readonly=on \
        -nic user,restrict=on,model=virtio-net-pci </dev/null || code=$?
    ! grep -q '^vm: Linux' "$work/console" || break
    [ $code = 0 ] || break
done
tr -d '\r' <"$work/console"
[ $code != 124 ] || die "the virtual machine was switched off after $limit seconds"
[ $code = 0 ] || die "qemu ended with $code"
code=$(tr -d '\r' <"$work/console" | sed -n 's/^vm: exit \([0-9]*\)$/\1/p' | tail -n1)
[ -n "$code" ] || die "the virtual machine ended before its command"
exit "$code"
