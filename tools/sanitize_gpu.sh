#!/bin/sh
# Runs GPU test programs under compute-sanitizer, memcheck and racecheck, as many at a time as there are cores; a line for
# each, exit status 1 if there was any report, any failed test or any run that did not end. docs/testing.md says what is
# left out and why.
#     tools/sanitize_gpu.sh LIMIT_S PROGRAM...
# LIMIT_S ends a single run; 0: none. BUILD_DIR as for run_tests.sh.

# Racecheck gives up after this many hazards, which would hide those that come later.
export NV_COMPUTE_SANITIZER_MAX_RACECHECK_HAZARDS=10000000

# Whether a program runs under a tool.
takes_part()
{
    case $1:$2 in
    *:*/gpu_train | *:*/gpu_faults | *:*/gpu_nccl | *:*/gpu_ranks) return 1 ;;
    racecheck:*/gpu_gemm | racecheck:*/gpu_model | racecheck:*/gpu_model_bits | racecheck:*/gpu_bits) return 1 ;;
    esac
}

# The tests of a program that are small enough: of whole runs of the trainer, the shortest.
small_tests()
{
    case $1 in
    */gpu_bits) echo '*not_finite*' ;;
    *) echo --small ;;
    esac
}

# Reports in the logs of all processes of a run. Races inside of cuBLASLt's kernels are not counted: it synchronises in
# ways that racecheck does not follow. A tool that broke, or stopped counting, is a report.
reports()
{
    awk '
        /Race reported between/ { n += !/ at (void )?(nvjet_|cutlass|cublas)/ }
        /ERROR SUMMARY: / { for (i = 1; i < NF; i++) if ($i == "SUMMARY:") n += $(i + 1) }
        /Internal Sanitizer Error|Maximum number of hazards/ { n++ }
        END { print n + 0 }' "$1".*
}

run_one()
{
    limit=$1 tool=$2 program=$3
    folder=$(mktemp -d)
    start=$(date +%s)
    CMOCKA_MESSAGE_OUTPUT=STDOUT timeout -s INT -k 10 "$limit" compute-sanitizer --tool "$tool" --print-limit 0 \
        --log-file "$folder/log.%p" "$program" "$(small_tests "$program")" >"$folder/tests" 2>&1
    status=$?
    ok=$(grep -c '^\[       OK \]' "$folder/tests")
    bad=$(sed -n 's/^\[  FAILED  \] \([0-9]*\) test(s).*/\1/p' "$folder/tests")
    found=$(reports "$folder/log")
    ended=
    if [ "$status" -ne 0 ] && [ "${bad:-0}" -eq 0 ]; then
        ended=", ended with status $status"
    fi
    if [ "$ok" -eq 0 ] || ! grep -q 'SUMMARY' "$folder"/log.*; then
        ended="${ended:-, nothing was checked}"
    fi
    printf '%-9s %-44s %3d ok %3d failed %4d reports %4ds%s\n' "$tool" "${program#"$BUILD_DIR"/}" "$ok" "${bad:-0}" \
        "$found" "$(($(date +%s) - start))" "$ended"
    if [ "${bad:-0}" -ne 0 ] || [ "$found" -ne 0 ] || [ -n "$ended" ]; then
        tail -n 20 "$folder/tests"
        cat "$folder"/log.* | grep -v '^========= *Host Frame\|^=========  *Saved host' | head -n 60
        rm -rf "$folder"
        exit 1
    fi
    rm -rf "$folder"
}

if [ "$1" = --one ]; then
    run_one "$2" "$3" "$4"
    exit
fi
[ $# -gt 1 ] || { echo "sanitize_gpu: expected LIMIT_S PROGRAM..."; exit 1; }
limit=$1
shift
command -v compute-sanitizer >/dev/null || { echo "compute-sanitizer is not there: it comes with CUDA"; exit 1; }
for tool in memcheck racecheck; do
    for program in "$@"; do
        if takes_part "$tool" "$program"; then
            printf '%s\n%s\n' "$tool" "$program"
        fi
    done
done | xargs -P "$(nproc)" -n 2 "$0" --one "$limit" || exit 1
