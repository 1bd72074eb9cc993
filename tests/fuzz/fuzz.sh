#!/bin/sh
# Builds and runs the fuzz targets: tests/fuzz/fuzz.sh SECONDS [TARGET...]   each target for so long, with a fixed seed
#                                   tests/fuzz/fuzz.sh replay TARGET FILE    one input again, with its report
# Corpora grow under build/fuzz/corpus/TARGET from run to run; findings are kept in build/fuzz/findings. Exit 1 if any.
set -eu
cd "$(dirname "$0")/../.."
root=$PWD out=$PWD/build/fuzz

if ! echo 'int x;' | clang -fsanitize=fuzzer-no-link -x c -c -o /dev/null - 2>/dev/null; then
    if ! command -v apt-get >/dev/null; then
        echo "fuzz: needs clang with libFuzzer: packages clang and compiler-rt"
        exit 1
    fi
    apt-get update -q && apt-get install -y -q --no-install-recommends clang
fi
${MAKE:-make} BUILD=fuzz OUT=build/fuzz MPI=0 CUDA=0 fuzzers

# Targets write their inputs into the folder that they run in: in memory if possible.
scratch=$(mktemp -d -p "$([ -w /dev/shm ] && echo /dev/shm || echo /tmp)" gpt8b-fuzz-XXXXXX)
trap 'rm -rf "$scratch"' EXIT
trap 'exit 130' INT TERM
cd "$scratch"

if [ "$1" = replay ]; then
    case $3 in /*) file=$3 ;; *) file=$root/$3 ;; esac
    "$out/tests/fuzz/fuzz_$2" "$file"
    exit
fi

seconds=$1
shift
[ $# -gt 0 ] || set -- $(cd "$root/tests/fuzz" && ls fuzz_*.c | sed 's/^fuzz_//; s/\.c$//')
failed=0
for target in "$@"; do
    program=$out/tests/fuzz/fuzz_$target seeds=$out/seeds/$target corpus=$out/corpus/$target log=$out/$target.log
    rm -rf "$seeds" "$seeds.dict"
    mkdir -p "$seeds" "$corpus" "$out/findings"
    "$program" --seeds="$seeds"
    # Inputs have at most 16 KB: nothing that is read here may take 64 MB at once, or ten seconds.
    if "$program" -seed=1 -max_total_time="$seconds" -max_len=16384 -timeout=10 -rss_limit_mb=1024 \
        -malloc_limit_mb=64 -print_final_stats=1 -artifact_prefix="$out/findings/$target-" \
        $([ -f "$seeds.dict" ] && echo "-dict=$seeds.dict") "$corpus" "$seeds" >"$log" 2>&1; then
        verdict="no finding"
    else
        verdict="FINDING"
        failed=1
    fi
    edges=$(sed -n 's/.* cov: \([0-9]*\) .*/\1/p' "$log" | tail -n 1)
    runs=$(sed -n 's/^stat::number_of_executed_units: *//p' "$log")
    printf '%-12s %10s runs %6s edges %6s inputs in the corpus: %s\n' "$target" "${runs:-?}" "${edges:-?}" \
        "$(ls "$corpus" | wc -l)" "$verdict"
    if [ "$verdict" = FINDING ]; then
        tail -n 40 "$log"
        ls "$out"/findings/"$target"-* 2>/dev/null || true
    fi
done
exit "$failed"
