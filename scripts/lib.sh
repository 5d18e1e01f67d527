# Shared by the scripts beside it. Source it; it changes to the top of the repository.

cd "$(dirname "${BASH_SOURCE[0]}")/.."
TOP=$PWD

RUST_VERSION=1.95
ARCH=$(uname -m)
GNU_TARGET=$ARCH-unknown-linux-gnu
MUSL_TARGET=$ARCH-unknown-linux-musl
TARGET_DIR=${CARGO_TARGET_DIR:-$TOP/target}

# An environment that replaces the flags of .cargo/config.toml would give a binary that is not static.
unset RUSTFLAGS CARGO_ENCODED_RUSTFLAGS CARGO_BUILD_RUSTFLAGS

say() { printf '%s\n' "$*"; }
die() { printf 'error: %s\n' "$*" >&2; exit 1; }
have() { command -v "$1" >/dev/null 2>&1; }

# Behind sudo the toolchain is the user's, not root's.
find_cargo() {
    have cargo && return
    local home=${HOME:-/root}
    if [ -n "${SUDO_USER:-}" ]; then home=$(getent passwd "$SUDO_USER" | cut -d: -f6); fi
    if [ -x "$home/.cargo/bin/cargo" ]; then
        export PATH="$home/.cargo/bin:$PATH" CARGO_HOME="${CARGO_HOME:-$home/.cargo}"
        [ -d "$home/.rustup" ] && export RUSTUP_HOME="${RUSTUP_HOME:-$home/.rustup}"
        return
    fi
    return 1
}

need_cargo() {
    find_cargo || die "Rust is not installed. Get $RUST_VERSION or newer from https://rustup.rs, then run this again."
    local found
    found=$(rustc --version | cut -d' ' -f2)
    [ "$(printf '%s\n' "$RUST_VERSION" "${found%%-*}" | sort -V | head -n1)" = "$RUST_VERSION" ] ||
        die "Rust $found is too old: run 'rustup update stable' to get $RUST_VERSION or newer."
    have cc || need_packages gcc:gcc libc6-dev:
}

# need_packages PACKAGE:PROGRAM...: installs those whose program is missing (an empty one: whose package is).
need_packages() {
    local missing=() entry
    for entry in "$@"; do
        if [ -n "${entry#*:}" ]; then
            have "${entry#*:}" || missing+=("${entry%%:*}")
        elif have dpkg-query && ! dpkg-query -W -f '${Status}' "${entry%%:*}" 2>/dev/null | grep -q 'ok installed'; then
            missing+=("${entry%%:*}")
        fi
    done
    [ ${#missing[@]} -eq 0 ] && return
    if [ "$(id -u)" != 0 ] || ! have apt-get; then
        die "please install: ${missing[*]} (on Debian: sudo apt-get install ${missing[*]})"
    fi
    say "installing ${missing[*]}"
    export DEBIAN_FRONTEND=noninteractive
    apt-get install -qq -y --no-install-recommends "${missing[@]}" >/dev/null 2>&1 ||
        { apt-get update -qq && apt-get install -qq -y --no-install-recommends "${missing[@]}" >/dev/null; } ||
        die "apt-get could not install ${missing[*]}"
}

# venv REQUIREMENTS [DIRECTORY]: .venv, or another, with these packages; nothing to do when it has them.
venv() {
    local requirements=$1 directory=${2:-.venv} stamp
    stamp=$directory/installed-$(cksum <"$requirements" | tr ' ' -)
    [ -e "$stamp" ] && "$directory/bin/python" -c '' 2>/dev/null && return
    need_packages python3:python3
    python3 -c 'import ensurepip, venv' 2>/dev/null || need_packages python3-venv:
    python3 -c 'import sys; sys.exit(sys.version_info < (3, 10))' || die "the Python SDK needs Python 3.10 or newer"
    "$directory/bin/python" -c '' 2>/dev/null || python3 -m venv --clear "$directory"
    "$directory/bin/python" -m pip install --quiet --disable-pip-version-check -r "$requirements"
    : >"$stamp"
}

# Milliseconds of a clock, for measuring.
now_ms() { local t=${EPOCHREALTIME/[.,]/}; printf '%s' "${t%???}"; }
