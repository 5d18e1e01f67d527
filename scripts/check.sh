#!/usr/bin/env bash
# Form, lints, dependencies. Changes nothing.
set -euo pipefail
. "$(dirname "$0")/lib.sh"

need_cargo
need_packages python3:python3
say "== cargo fmt"
cargo fmt --all --check
say "== cargo clippy"
cargo clippy --locked --workspace --all-targets -- -D warnings
say "== dependencies"
python3 scripts/deny.py
say "== scripts"
for script in .ci/run scripts/*.sh; do bash -n "$script"; done
python3 - scripts/*.py examples/*.py conformance/*.py <<'PYTHON'
import ast, pathlib, sys
for name in sys.argv[1:]:
    ast.parse(pathlib.Path(name).read_text(), name)
PYTHON
say "check: all good"
