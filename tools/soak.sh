#!/bin/sh
# The long tests: tests/faults with SOAK set (kills, signals and full disks at many points, 64 ranks, every layout). SEED
# picks the points. Prints each program's own figures, then what passed; exit 1 if anything failed.
# Usage: make soak [SEED=1], or BUILD_DIR=build/release tools/soak.sh [PROGRAM...]
cd "$(dirname "$0")/.." || exit 1
export BUILD_DIR="${BUILD_DIR:-build/release}" SEED="${SEED:-1}" SOAK=1
[ $# -gt 0 ] || set -- "$BUILD_DIR"/tests/faults/test_*[a-z]
log=$(mktemp) && failed=0
trap 'rm -f "$log"' EXIT
for t in "$@"; do
    case $t in *.[od]) continue ;; esac
    start=$(date +%s)
    if CMOCKA_MESSAGE_OUTPUT=STDOUT "$t" >"$log" 2>&1; then state=ok; else state=FAILED failed=1; fi
    printf '%-28s %-6s %3d ok %3d skipped %5d s\n' "$(basename "$t")" $state "$(grep -c '^\[       OK \]' "$log")" \
        "$(grep -c '^\[  SKIPPED \] test_.*' "$log" | awk '{ print int($1 / 2) }')" $(($(date +%s) - start))
    if [ $state = ok ]; then grep -v '^\[' "$log" | grep -v '^ *[0-9]* SKIPPED' | sed '/^$/d; s/^/    /'; else tail -n 60 "$log"; fi
done
echo "soak, seed $SEED: $([ $failed = 0 ] && echo passed || echo FAILED)"
exit $failed
