#!/bin/sh
# The rules of the house that a script can check: includes point one way, file sizes, single owners of libraries,
# unique file names, no left-overs. Prints every offence; exit 1 if any.
cd "$(dirname "$0")/.." || exit 1
git ls-files -co --exclude-standard '*.c' '*.h' '*.cu' '*.cuh' | while read -r f; do [ -f "$f" ] && echo "$f"; done | xargs awk '
    BEGIN {
        level["core"] = 0; level["numerics"] = 1
        level["attention"] = level["optim"] = level["data"] = level["dist"] = level["checkpoint"] = 2
        level["model"] = 3; level["train"] = 4
        owner["ini.h"] = "train/config"; owner["jansson.h"] = "core/json"; owner["mpi.h"] = "dist/comm"
        owner["nccl.h"] = "dist/"; owner["zstd.h"] = "data/"; owner["cublasLt.h"] = "core/gemm"; owner["cblas.h"] = "core/gemm"
        owner["Random123/philox.h"] = "core/rng"
    }
    function bad(text) { printf "%s:%d: %s\n", FILENAME, FNR, text; failed = 1 }
    FNR == 1 {
        split(FILENAME, path, "/"); room = path[1]
        name = path[length(path)]; stem = name; sub(/\.[a-z]+$/, "", stem)
        if (room in level && name in seen && seen[name] != room) bad("a file of this name exists in " seen[name])
        if (room in level) seen[name] = room
    }
    { lines[FILENAME]++ }
    length($0) > 120 { bad("line over 120 columns") }
    /^#include "/ && (room in level) {
        split($0, part, "\""); split(part[2], to, "/"); other = to[1]
        if (!(other in level)) bad("include from no room: " part[2])
        else if (other != room && level[other] >= level[room]) bad(room " must not include " other)
        else if (room == "model" && level[other] == 2 && other != "attention") bad("model must not include " other)
    }
    /^#include </ && (room in level) {
        split($0, part, /[<>]/)
        if (part[2] in owner && index(FILENAME, owner[part[2]]) != 1) bad(part[2] " belongs to " owner[part[2]])
    }
    /^#if 0/ { bad("#if 0: git remembers") }
    /(^|[^a-zA-Z_])(strcpy|strcat|sprintf|gets)\(/ { bad("unbounded string function") }
    (room in level) && room != "train" && /[^a-z_]getenv\(/ && FILENAME !~ /^dist\/comm/ { bad("getenv outside train and dist/comm") }
    END {
        for (f in lines) {
            limit = f ~ /\.h$/ ? 300 : 800
            if (lines[f] > limit) { printf "%s: %d lines, limit %d\n", f, lines[f], limit; failed = 1 }
        }
        exit failed
    }' || { echo "tidy: failed"; exit 1; }
echo "tidy: ok"
