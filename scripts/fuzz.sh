#!/usr/bin/env bash
# Runs the daemon's fuzz targets one after the other: all, or those named. MINUTES for each (10).
set -euo pipefail
. "$(dirname "$0")/lib.sh"

FUZZ_VERSION=0.13.2

need_cargo
cargo +nightly --version >/dev/null 2>&1 || die "fuzzing needs a nightly toolchain: run 'rustup toolchain install nightly'"
if ! cargo fuzz --version 2>/dev/null | grep -q "^cargo-fuzz "; then
    say "installing cargo-fuzz $FUZZ_VERSION (some minutes, once)"
    # Away from here: this repository's build settings are not its.
    (cd / && env -u CARGO_TARGET_DIR cargo install --quiet --locked --version "=$FUZZ_VERSION" cargo-fuzz)
fi
cd crates/execd
targets=("$@")
[ $# -gt 0 ] || mapfile -t targets < <(cargo fuzz list)
for target in "${targets[@]}"; do
    say "== $target, ${MINUTES:-10} minutes"
    mkdir -p "fuzz/corpus/$target"
    seeds=()
    [ ! -d "fuzz/seeds/$target" ] || seeds=("fuzz/seeds/$target")
    cargo +nightly fuzz run "$target" "fuzz/corpus/$target" "${seeds[@]}" -- \
        -max_total_time=$((${MINUTES:-10} * 60)) -timeout=600 -rss_limit_mb=2048 -print_final_stats=1
done
