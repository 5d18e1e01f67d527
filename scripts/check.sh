#!/usr/bin/env bash
# Form, lints, dependencies. Changes nothing.
set -euo pipefail
. "$(dirname "$0")/lib.sh"

DENY_VERSION=0.20.2

need_cargo
need_packages python3:python3
say "== cargo fmt"
cargo fmt --all --check
cargo fmt --manifest-path crates/execd/fuzz/Cargo.toml --check
say "== cargo clippy"
cargo clippy --locked --workspace --all-targets -- -D warnings
say "== dependencies"
if ! cargo deny --version 2>/dev/null | grep -q "^cargo-deny $DENY_VERSION\$"; then
    say "installing cargo-deny $DENY_VERSION (some minutes, once)"
    # Away from here: this repository's build settings are not its.
    (cd / && env -u CARGO_TARGET_DIR cargo install --quiet --locked --version "=$DENY_VERSION" cargo-deny)
fi
cargo deny --locked check --hide-inclusion-graph bans licenses sources
say "== pages"
python3 scripts/config_docs.py --check
python3 scripts/check_errors.py
python3 scripts/check_links.py
python3 scripts/check_cases.py
say "== scripts"
for script in .ci/run scripts/*.sh; do bash -n "$script"; done
python3 - examples/*.py conformance/*.py conformance/*/*.py scripts/*.py <<'PYTHON'
import ast, pathlib, sys
for name in sys.argv[1:]:
    ast.parse(pathlib.Path(name).read_text(), name)
PYTHON
say "check: all good"
