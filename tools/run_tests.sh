#!/bin/sh
# Runs cmocka programs one after the other, shows what failed, and closes with "N passed, N failed".
passed=0
failed=0
log=$(mktemp)
for t in "$@"; do
    start=$(date +%s)
    CMOCKA_MESSAGE_OUTPUT=STDOUT "$t" >"$log" 2>&1
    status=$?
    ok=$(grep -c '^\[       OK \]' "$log")
    # cmocka names failures twice; its closing line has their number.
    bad=$(sed -n 's/^\[  FAILED  \] \([0-9]*\) test(s).*/\1/p' "$log")
    bad=${bad:-0}
    if [ "$status" -ne 0 ] && [ "$bad" -eq 0 ]; then
        bad=1
    fi
    passed=$((passed + ok))
    failed=$((failed + bad))
    printf '%-60s %3d ok %3d failed %4ds\n' "${t#"$BUILD_DIR"/}" "$ok" "$bad" "$(($(date +%s) - start))"
    if [ "$status" -ne 0 ]; then
        tail -n 60 "$log"
    fi
done
rm -f "$log"
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
