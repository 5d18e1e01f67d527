#!/bin/sh
# Runs a command as images and charts that name this script expect. The daemon is there already: it is process 1.
#
#   bootstrap.sh COMMAND [ARG...]     runs it as it is
#   bootstrap.sh -c TEXT              runs shell text; so does BOOTSTRAP_CMD without arguments
#   bootstrap.sh                      runs the shell itself
#
# BOOTSTRAP_SHELL names the shell, EXECD_ENVS the file that commands read variables from, and
# EXECD_BOOTSTRAP_PRE_SCRIPT a file to be sourced first.

EXECD_ENVS=${EXECD_ENVS:-/opt/opensandbox/.env}
export EXECD_ENVS
if ! { mkdir -p "${EXECD_ENVS%/*}" && : >>"$EXECD_ENVS"; } 2>/dev/null; then
    echo "bootstrap: cannot create $EXECD_ENVS" >&2
fi

if [ -n "${EXECD_BOOTSTRAP_PRE_SCRIPT:-}" ]; then
    . "$EXECD_BOOTSTRAP_PRE_SCRIPT"
fi

shell=${BOOTSTRAP_SHELL:-$(command -v bash || command -v sh || echo /bin/sh)}

if [ "${1-}" = -c ]; then
    exec "$shell" "$@"
elif [ $# -gt 0 ]; then
    exec "$@"
elif [ -n "${BOOTSTRAP_CMD:-}" ]; then
    exec "$shell" -c "$BOOTSTRAP_CMD"
fi
exec "$shell"
