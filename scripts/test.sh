#!/usr/bin/env bash
# All tests: the Rust ones, then the official clients against servers that the tests start themselves.
# TEST_PROFILE: release (default, what users run) or dev (builds faster).
set -euo pipefail
. "$(dirname "$0")/lib.sh"

[ "$(id -u)" = 0 ] || die "the tests make sandboxes, which needs root: run 'sudo make test'"
scripts/test-deps.sh
scripts/build.sh "${TEST_PROFILE:-release}"
find_cargo
scripts/clients.sh

export OSB_EXECD=$TOP/dist/execd OSB_BIN=$TOP/dist/osb
say "== cargo test"
cargo test --locked --workspace --no-fail-fast
say "== conformance: official clients"
.venv/bin/python -m pytest -c conformance/pytest.ini --rootdir conformance conformance
