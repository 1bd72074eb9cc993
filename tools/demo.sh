#!/bin/sh
# The demo after a build: English text -> shards -> matched arms on two ranks -> verdicts and a report.
# TEXT="file ..." uses your own text. The data is kept in demo_data/, the study in runs/demo/.
set -eu
data=demo_data
out=runs/demo
if [ ! -s "$data/prepared" ] || [ "$(cat "$data/prepared")" != "${TEXT:-packaged text}" ]; then
    rm -rf "$data"
    mkdir -p "$data"
    tools/demo_text.sh "$data/text.txt"
    ./prepare_data --tokenizer bytes --split-paragraphs=2000 --val-fraction 0.05 --out "$data" "$data/text.txt"
    echo "${TEXT:-packaged text}" >"$data/prepared"
fi
rm -rf "$out"
mpi=""
if command -v mpirun >/dev/null 2>&1; then
    mpi="mpirun -n 2 --oversubscribe --bind-to none -x OMP_NUM_THREADS=1"
    [ "$(id -u)" = 0 ] && mpi="$mpi --allow-run-as-root"
fi
$mpi ./train_gpt8b configs/demo.toml
./report "$out"
