#!/usr/bin/env bash
# Builds dist/execd (static, musl) and dist/osb with that daemon inside. Argument: release (default) or dev.
set -euo pipefail
. "$(dirname "$0")/lib.sh"

profile=${1:-release}
case $profile in
    release) directory=release ;;
    dev) directory=debug ;;
    *) die "no such profile: $profile (use release or dev)" ;;
esac

need_cargo
sysroot=$(rustc --print sysroot)
if [ ! -d "$sysroot/lib/rustlib/$MUSL_TARGET" ]; then
    have rustup || die "Rust's target $MUSL_TARGET is missing and there is no rustup to add it."
    rustup target add "$MUSL_TARGET"
fi

# put FROM TO: replaces TO when it differs, in one step, since it may be running. An unchanged file keeps its time,
# so that what was built with it is not built again.
put() {
    mkdir -p "$(dirname "$2")"
    cmp -s "$1" "$2" && return
    cp "$1" "$2.new"
    mv "$2.new" "$2"
}

cargo build --locked --profile "$profile" --package osb-execd --bin execd --target "$MUSL_TARGET"
put "$TARGET_DIR/$MUSL_TARGET/$directory/execd" dist/execd
OSB_EXECD=$TOP/dist/execd cargo build --locked --profile "$profile" --package osb --target "$GNU_TARGET"
put "$TARGET_DIR/$GNU_TARGET/$directory/osb" dist/osb
