#!/usr/bin/env bash
# Gets a distribution's kernel without installing it, and says where it is: a directory with `vmlinuz` and
# `lib/modules`.
#
#   scripts/vm/kernel.sh SUITE [PACKAGE]
#
# SUITE is one of Debian's (bookworm, trixie, trixie-backports, …); PACKAGE is the newest kernel for virtual machines
# unless it is named. Packages come by apt, with its check of signatures, into a state of its own: the host's apt is
# not touched. All stays in ~/.cache/opensandbox/vm until you delete it.
set -euo pipefail
. "$(dirname "$0")/../lib.sh"

suite=${1:?which suite?}
cache=${XDG_CACHE_HOME:-$HOME/.cache}/opensandbox/vm
need_packages apt:apt-get dpkg:dpkg-deb kmod:depmod debian-archive-keyring:

# in_suite PROGRAM ARGUMENT...: one of apt's programs that knows nothing but the suite.
in_suite() {
    local state=$cache/apt-$suite keys=/usr/share/keyrings/debian-archive-keyring.gpg
    mkdir -p "$state"/{lists,archives}/partial "$state"/etc/{apt.conf.d,preferences.d}
    : >"$state/status"
    echo "deb [signed-by=$keys arch=amd64] http://deb.debian.org/debian $suite main" >"$state/etc/sources.list"
    cat >"$state/apt.conf" <<END
Dir::Etc "$state/etc";
Dir::State "$state";
Dir::State::status "$state/status";
Dir::Cache "$state";
APT::Sandbox::User "root";
APT::Architecture "amd64";
Acquire::Languages "none";
END
    APT_CONFIG=$state/apt.conf "$@"
}

mkdir -p "$cache"
name=$suite${2:+-$2}
target=$cache/kernel-$name
if [ ! -e "$target/vmlinuz" ]; then
    package=${2:-}
    in_suite apt-get -qq update >&2
    if [ -z "$package" ]; then
        # What the package that stands for the newest kernel depends on.
        package=$(in_suite apt-cache show --no-all-versions "linux-image-cloud-amd64/$suite" 2>/dev/null |
            sed -n 's/^Depends:.* \(linux-image-[^ ,]*\).*/\1/p')
        [ -n "$package" ] || die "'$suite' has no package linux-image-cloud-amd64: name one behind the suite"
    fi
    # Where the modules and the kernel itself are packages of their own.
    mapfile -t packages < <(in_suite apt-cache show --no-all-versions "$package" | grep '^Depends:' |
        grep -oE 'linux-(base|binary|modules)-[0-9][^ ,]*')
    packages+=("$package")
    rm -rf "$target" "$target.part"
    mkdir "$target.part"
    (cd "$target.part" && in_suite apt-get -qq download "${packages[@]}" >&2)
    for file in "$target.part"/*.deb; do
        dpkg-deb -x "$file" "$target.part"
        rm "$file"
    done
    mv "$target.part" "$target"
    [ -d "$target/lib/modules" ] || ln -s usr/lib "$target/lib"
    version=$(basename "$target"/lib/modules/*)
    depmod -b "$target" "$version"
    mv "$target"/boot/vmlinuz-* "$target/vmlinuz" 2>/dev/null ||
        mv "$target/lib/modules/$version/vmlinuz" "$target/vmlinuz"
    rm -rf "$target/boot" "$target/usr/share"
fi
printf '%s\n' "$target"
