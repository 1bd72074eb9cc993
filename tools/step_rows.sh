#!/bin/sh
# Times updates of the 8B model, a row of docs/results/training_gpu.md at a time, most important first:
#     tools/step_rows.sh PROGRAM [ROW...]            PROGRAM is train_gpt8b; no ROW: all of them
#     tools/step_rows.sh PROGRAM --list              the rows, as commands
# A line for each row; the whole report of a row is left in $OUT (a folder; default: one in /tmp), beside the algorithms
# that its products were given, which all rows share: rows differ in what their names say only.
# Backward recentred and the anchors zero and sampled run on variant cuda (the last column says so): what they cost is the
# difference to b1_fp8_cuda and b1_mxfp4_cuda, their arms on that variant.
# A key must not be given twice on a command line: run.steps and device.gemm_choices stand here.

fp8='--linear.attn=fp8 --linear.mlp=fp8'
any='--run.deterministic=off'
b4='--data.batch=4'
plain='--attention.variant=cuda'
arms=configs/arms
switches=configs/switches

# ROW  STEPS  ARGUMENTS...
rows()
{
    cat <<EOF
b1_bf16             9 $any
b1_fp8              9 $any $arms/nvfp4_fp8.toml $fp8
b4_bf16             6 $any $b4
b4_attn_fp8         6 $any $b4 $arms/nvfp4_fp8.toml --linear.attn=fp8
b4_attn_e4m3        6 $any $b4 $switches/e4m3_fp8.toml --linear.attn=fp8
b4_fp8              6 $any $b4 $arms/nvfp4_fp8.toml $fp8
t8192_bf16          8 $any --data.seq_len=8192
t8192_fp8           8 $any --data.seq_len=8192 $arms/nvfp4_fp8.toml $fp8
t16384_bf16         6 $any --data.seq_len=16384
t16384_fp8          6 $any --data.seq_len=16384 --device.recompute=gate_up $arms/nvfp4_fp8.toml $fp8
b1_mxfp4            9 $any $arms/nvfp4_mxfp4.toml $fp8
b4_mxfp4            6 $any $b4 $arms/nvfp4_mxfp4.toml $fp8
b1_bf16_moments32   9 $any --optim.moments=fp32 --optim.stochastic_rounding=false
b1_fp8_moments32    9 $any --optim.moments=fp32 --optim.stochastic_rounding=false $arms/nvfp4_fp8.toml $fp8
b1_bf16_no_master   9 $any --optim.master=none
b1_bf16_layout      9 --run.deterministic=layout
b1_fp8_layout       9 --run.deterministic=layout $arms/nvfp4_fp8.toml $fp8
b1_bf16_linears     9 $any $fp8
b1_e4m3_fp8         9 $any $switches/e4m3_fp8.toml $fp8
b1_fp8_saved        9 $any $arms/nvfp4_fp8_saved.toml $fp8
b1_mxfp4_saved      9 $any $arms/nvfp4_mxfp4_saved.toml $fp8
b1_mxfp4_threshold  9 $any $switches/nvfp4_mxfp4_threshold.toml $fp8
b1_mxfp4_ocp        9 $any $switches/nvfp4_mxfp4_ocp.toml $fp8
b1_mxfp4_affine     9 $any $switches/nvfp4_mxfp4_affine.toml $fp8
b1_mxfp4_code_space 9 $any $switches/nvfp4_mxfp4_code_space.toml $fp8
b1_fp8_cuda         6 $any $arms/nvfp4_fp8.toml $fp8 $plain
b1_mxfp4_cuda       6 $any $arms/nvfp4_mxfp4.toml $fp8 $plain
b1_fp8_recentred    6 $any $switches/nvfp4_fp8_recentred.toml $fp8
b1_mxfp4_recentred  6 $any $switches/nvfp4_mxfp4_recentred.toml $fp8
b1_mxfp4_zero       6 $any $switches/nvfp4_mxfp4_zero.toml $fp8
b1_mxfp4_sampled    6 $any $switches/nvfp4_mxfp4_sampled.toml $fp8
b1_e4m3_mxfp4       9 $any $switches/e4m3_mxfp4.toml $fp8
b1_e4m3_affine      9 $any $switches/e4m3_mxfp4_affine.toml $fp8
b1_bf16_moments32_no_master 9 $any --optim.moments=fp32 --optim.master=none
EOF
}

# A line of the table from a report: tokens/s, the step, its phases, MFU, memory, clock, and which kernels ran attention.
row_of()
{
    awk -v name="$1" '
        / updates of / { for (i = 1; i <= NF; i++) if ($i == "tokens/s") rate = $(i - 1)
                         route = $0
                         sub(/.*[(,] *attention /, "", route)
                         sub(/\): [0-9]* tokens\/s.*/, "", route) }
        /^(forward|backward|optim|step) / { ms[$1] = $2 }
        /^MFU/ { mfu = $2; causal = $5 }
        /in use$/ { gib = $(NF - 3) }
        /SM clock/ { for (i = 1; i <= NF; i++) if ($i == "clock") mhz = $(i + 1) }
        END { if (rate == "") exit 1
              printf "| %s | %s | %s | %s | %s | %s | %s (%s) %% | %s | %s | %s |\n", name, ms["step"], rate, ms["forward"],
                     ms["backward"], ms["optim"], mfu, causal, gib, mhz, route }'
}

[ $# -gt 0 ] || { echo "step_rows: expected PROGRAM [ROW...] or PROGRAM --list"; exit 1; }
[ -x "$1" ] || { echo "step_rows: $1: no such program; expected PROGRAM [ROW...] or PROGRAM --list"; exit 1; }
program=$1
shift
if [ "${1-}" = --list ]; then
    rows | while read -r name steps arguments; do
        echo "$name: $program configs/gpt8b_step_time.toml $arguments --run.steps=$steps"
    done
    exit
fi
for name in "$@"; do
    rows | awk -v name="$name" '$1 == name { found = 1 } END { exit !found }' ||
        { echo "step_rows: no row is called $name (--list prints them)"; exit 1; }
done
OUT=${OUT:-$(mktemp -d)}
mkdir -p "$OUT"
echo "| row | step ms | tokens/s | forward | backward | norm + AdamW | MFU (causal) | GiB | SM MHz | attention by |"
rows | {
    failed=0
    while read -r name steps arguments; do
        if [ $# -gt 0 ]; then
            case " $* " in
            *" $name "*) ;;
            *) continue ;;
            esac
        fi
        # shellcheck disable=SC2086
        timeout 300 "$program" configs/gpt8b_step_time.toml $arguments --run.steps="$steps" \
            --device.gemm_choices="$OUT/gemm.json" >"$OUT/$name.txt" 2>&1 </dev/null
        row_of "$name" <"$OUT/$name.txt" || {
            echo "| $name | failed: $(grep -a error "$OUT/$name.txt" | head -n 1) |"
            failed=1
        }
    done
    exit "$failed"
}
failed=$?
echo "reports: $OUT"
exit "$failed"
