#!/bin/sh
# Runs GPU test programs under compute-sanitizer, memcheck and racecheck, as many at a time as there are cores; a line for
# each, exit status 1 if there was any report, any failed test or any run that did not end. docs/testing.md says what is
# left out and why.
#     tools/sanitize_gpu.sh LIMIT_S PROGRAM...
# LIMIT_S ends a single run; 0: none. BUILD_DIR as for run_tests.sh.

# The tests of a program that are small enough: of whole runs of the trainer, the shortest.
small_tests()
{
    case $1 in
    */gpu_bits) echo '*not_finite*' ;;
    *) echo --small ;;
    esac
}

# Numbers that stand before a word in the summaries of all processes of a run.
sum_of()
{
    cat "$1".* | sed -n "s/^=========.* SUMMARY:.*[ (]\([0-9][0-9]*\) $2.*/\1/p" | awk '{n += $1} END {print n + 0}'
}

run_one()
{
    limit=$1 tool=$2 program=$3
    folder=$(mktemp -d)
    start=$(date +%s)
    # Racecheck knows our kernels only by name: those of cuBLASLt synchronise in ways that it does not follow.
    only=
    if [ "$tool" = racecheck ]; then
        only='--kernel-name kernel_substring=_kernel'
    fi
    # shellcheck disable=SC2086
    CMOCKA_MESSAGE_OUTPUT=STDOUT timeout -s INT -k 10 "$limit" compute-sanitizer --tool "$tool" $only --print-limit 20 \
        --log-file "$folder/log.%p" "$program" "$(small_tests "$program")" >"$folder/tests" 2>&1
    status=$?
    ok=$(grep -c '^\[       OK \]' "$folder/tests")
    bad=$(sed -n 's/^\[  FAILED  \] \([0-9]*\) test(s).*/\1/p' "$folder/tests")
    found=$(sum_of "$folder/log" 'errors*')
    if [ "$tool" = racecheck ]; then
        found=$((found + $(sum_of "$folder/log" 'warnings*')))
    fi
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
limit=$1
shift
command -v compute-sanitizer >/dev/null || { echo "compute-sanitizer is not there: it comes with CUDA"; exit 1; }
for tool in memcheck racecheck; do
    for program in "$@"; do
        case $program in
        */gpu_train | */gpu_faults | */gpu_nccl | */gpu_ranks) ;; # docs/testing.md
        *) printf '%s\n%s\n' "$tool" "$program" ;;
        esac
    done
done | xargs -P "$(nproc)" -n 2 "$0" --one "$limit"
