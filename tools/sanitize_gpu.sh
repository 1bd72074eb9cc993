#!/bin/sh
# Runs GPU test programs under compute-sanitizer, their small cases in parts, as many at a time as there are cores; a line
# for each program and tool, and the kernels that no run launched. Exit status 1 if there was any report, any failed test,
# any run that did not end, or such a kernel. docs/testing.md says what is left out and why.
#     tools/sanitize_gpu.sh SECONDS PROGRAM...
# SECONDS ends a single run, 0: none. TOOLS="racecheck memcheck synccheck", the default; TOTAL=200
# ends all after so many seconds, what has not begun by then is named; BUILD_DIR as for run_tests.sh.

# Racecheck gives up after this many hazards, which would hide those that come later.
export NV_COMPUTE_SANITIZER_MAX_RACECHECK_HAZARDS=10000000
# Every process is one of as many as there are cores. (nproc obeys OMP_NUM_THREADS.)
cores=$(nproc --all)
export OMP_NUM_THREADS=1

# Whether a program runs under a tool.
takes_part()
{
    case $1:${2##*/} in
    *:gpu_train | *:gpu_bits | *:gpu_faults | *:gpu_nccl | *:gpu_ranks | *:gpu_two_ranks) return 1 ;;
    racecheck:gpu_gemm | racecheck:gpu_model_bits | racecheck:train_gpt8b) return 1 ;;
    racecheck:gpu_sm90_inputs | racecheck:gpu_sm90_shapes | racecheck:gpu_sm90_long | racecheck:gpu_sm90_maps) return 0 ;;
    racecheck:gpu_sm90_*) return 1 ;;
    esac
}

# Into how many parts a program's small cases go, and about how many seconds one takes: the longest begin first.
plan_of()
{
    case $1:${2##*/} in
    *:train_gpt8b) echo 1 60 ;;
    racecheck:gpu_bwd) echo 6 40 ;;
    racecheck:gpu_linear) echo 3 25 ;;
    racecheck:gpu_rmsnorm | racecheck:gpu_cross_entropy) echo 3 30 ;;
    racecheck:gpu_sm90_maps) echo 2 20 ;;
    racecheck:gpu_fwd | racecheck:gpu_sm90_*) echo 4 20 ;;
    racecheck:gpu_embedding | racecheck:gpu_gradnorm | *:gpu_model | *:gpu_model_bits | memcheck:gpu_rmsnorm) echo 1 30 ;;
    memcheck:gpu_bwd | memcheck:gpu_gemm | memcheck:gpu_linear | memcheck:gpu_sm90_edges) echo 2 25 ;;
    racecheck:*) echo 1 15 ;;
    *) echo 1 10 ;;
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

# One part of a program under a tool: a line in results, and what a failure printed.
run_one()
{
    all=$1 tool=$2 part=$3 program=$4
    folder=$all/$tool.${program##*/}.${part%/*}
    start=$(date +%s)
    left=$(($(cat "$all/end") - start))
    [ "$left" -gt 0 ] || { echo "$tool $program 0 0 0 0 not begun" >>"$all/results"; return; }
    limit=$(cat "$all/limit")
    if [ "$limit" -eq 0 ] || [ "$limit" -gt "$left" ]; then
        limit=$left
    fi
    mkdir "$folder"
    set -- "--small=$part"
    case $tool:${program##*/} in
    racecheck:gpu_model) set -- "$1" '*losses_of_samples*' ;; # the only test without products
    racecheck:gpu_sm90_maps) set -- "$1" lengths ;;
    *:train_gpt8b) # two updates, with a checkpoint and an evaluation; algorithms of products are timed without the tool
        set -- configs/tiny_cpu.toml configs/arms/nvfp4_mxfp4.toml --linear.mlp=nvfp4 --linear.attn=fp8 --model.width=256 \
            --model.head_dim=128 --run.steps=2 --eval.every=2 --eval.steps=1 --checkpoint.every=2 --log.attention_every=2 \
            --device.kind=cuda "--device.gemm_choices=$folder/choices"
        "$program" "$@" "--run.out=$folder/before" >"$folder/before.txt" 2>&1
        set -- "$@" "--run.out=$folder/run"
        ;;
    esac
    CMOCKA_MESSAGE_OUTPUT=STDOUT timeout -s INT -k 10 "$limit" compute-sanitizer --tool "$tool" --print-limit 0 \
        --racecheck-num-workers 1 --show-backtrace device --log-file "$folder/log.%p" \
        "$program" "$@" >"$folder/tests" 2>&1
    status=$?
    ok=$(grep -c '^\[       OK \]' "$folder/tests")
    if [ "${program##*/}" = train_gpt8b ] && [ "$status" -eq 0 ] && [ -d "$folder/run/checkpoints" ]; then
        ok=1
    fi
    bad=$(sed -n 's/^\[  FAILED  \] \([0-9]*\) test(s).*/\1/p' "$folder/tests")
    found=$(reports "$folder/log")
    sed -n "s/^kernel launched /$tool /p" "$folder/tests" >>"$all/launched"
    sed -n 's/^kernel [a-z]* //p' "$folder/tests" >>"$all/kernels"
    ended=
    if [ "$status" -ne 0 ] && [ "${bad:-0}" -eq 0 ]; then
        ended="part $part ended with status $status"
    fi
    if [ "$ok" -eq 0 ] || ! grep -q 'SUMMARY' "$folder"/log.*; then
        ended="${ended:-part $part: nothing was checked}"
    fi
    echo "$tool $program $ok ${bad:-0} $found $(($(date +%s) - start)) $ended" >>"$all/results"
    if [ "${bad:-0}" -ne 0 ] || [ "$found" -ne 0 ] || [ -n "$ended" ]; then
        echo "---- $tool $program, part $part"
        grep -v '^kernel ' "$folder/tests" | tail -n 20
        cat "$folder"/log.* | head -n 60
    fi
}

# A line for each program and tool: tests in all parts, reports, the seconds of the longest part and of all.
print_results()
{
    sort "$1/results" | awk '
        function flush() {
            if (key != "") {
                printf "%-9s %-28s %2d parts %3d ok %3d failed %4d reports %4d s (%d s in all)%s\n", tool, name, parts,
                       ok, bad, found, longest, total, ended
                wrong += bad + found + (ended != "")
            }
        }
        {
            if ($1 " " $2 != key) {
                flush()
                key = $1 " " $2; tool = $1; name = $2; sub(".*/", "", name)
                parts = ok = bad = found = longest = total = 0; ended = ""
            }
            parts++; ok += $3; bad += $4; found += $5; total += $6
            longest = $6 > longest ? $6 : longest
            text = ""
            for (i = 7; i <= NF; i++) text = text " " $i
            if (text != "") ended = ended "," text
        }
        END { flush(); exit wrong > 0 }'
}

# Kernels of the programs that no run of a tool launched; the programs say so themselves (tests/launches_cuda.c).
print_kernels()
{
    missed=0
    for tool in $2; do
        sort -u "$1/kernels" >"$1/a"
        sed -n "s/^$tool //p" "$1/launched" | sort -u >"$1/b"
        echo "$tool: $(wc -l <"$1/b") of $(wc -l <"$1/a") kernels, instances of templates counted one by one, were launched"
        comm -23 "$1/a" "$1/b" | { c++filt 2>/dev/null || cat; } | sed 's/^/    never: /' | tee "$1/c"
        [ ! -s "$1/c" ] || missed=1
    done
    return $missed
}

if [ "$1" = --one ]; then
    run_one "$2" "$3" "$4" "$5"
    exit
fi
[ $# -gt 1 ] || { echo "sanitize_gpu: expected SECONDS PROGRAM..."; exit 1; }
command -v compute-sanitizer >/dev/null || { echo "compute-sanitizer is not there: it comes with CUDA"; exit 1; }
all=$(mktemp -d)
echo "$1" >"$all/limit"
echo "$(($(date +%s) + ${TOTAL:-1000000}))" >"$all/end"
touch "$all/launched" "$all/kernels"
tools=${TOOLS:-racecheck memcheck synccheck}
shift
for tool in $tools; do
    for program in "$@"; do
        if takes_part "$tool" "$program"; then
            plan_of "$tool" "$program" | while read -r parts seconds; do
                i=0
                while [ "$i" -lt "$parts" ]; do
                    echo "$seconds $tool $i/$parts $program"
                    i=$((i + 1))
                done
            done
        fi
    done
done | sort -rn -k1,1 -s | cut -d ' ' -f 2- | xargs -P "$cores" -n 3 "$0" --one "$all"
print_results "$all"
status=$?
print_kernels "$all" "$tools" || status=1
rm -rf "$all"
exit $status
