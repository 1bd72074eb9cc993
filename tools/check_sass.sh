#!/bin/sh
# The machine code of the Hopper kernels: check_sass.sh OBJECT ... (every *_sm90.cu.o of a build). Fails if a kernel uses
# local memory (registers that did not fit), or lacks the instructions it is written for: products of BF16 (HGMMA) or FP8
# (QGMMA) by warpgroups, and registers handed from the loading warps to the computing ones (USETMAXREG).
# Needs cuobjdump and nvdisasm (CUDA toolkit): from PATH, or beside $NVCC. Exit 2 without them.
set -u
PATH="$PATH:$(dirname "$(command -v "${NVCC:-nvcc}" || echo /usr/local/cuda/bin/nvcc)")"
command -v cuobjdump >/dev/null && command -v nvdisasm >/dev/null ||
    { echo "check_sass: no cuobjdump and nvdisasm in PATH: machine code not checked"; exit 2; }
[ $# -gt 0 ] || { echo "check_sass: expected the *_sm90.cu.o of a build"; exit 1; }
for object in "$@"; do
    cuobjdump -sass "$object" 2>/dev/null || echo "check_sass failed: $object"
done | awk '
    BEGIN {
        # Kernels that multiply, and what all their instances contain; of two kinds one at least has both products.
        wants["fwd_bf16_kernel"] = "HGMMA USETMAXREG"; wants["fwd_codes_kernel"] = "QGMMA USETMAXREG"
        wants["bwd_bf16_kernel"] = "HGMMA USETMAXREG"; wants["bwd_fp8_kernel"] = "QGMMA USETMAXREG"
        wants["bwd_mxfp4_kernel"] = "QGMMA USETMAXREG"; wants["bwd_fp8_dq_kernel"] = "QGMMA USETMAXREG"
        both["fwd_codes_kernel"] = both["bwd_fp8_kernel"] = both["bwd_mxfp4_kernel"] = 1
    }
    function bad(text) { print "check_sass: " text; failed = 1 }
    function close_kernel(    w, n, i, k) {
        if (name == "") return
        kernels++
        if (count["LDL"] + count["STL"] > 0)
            bad(name ": local memory: " count["LDL"] + 0 " loads, " count["STL"] + 0 " stores")
        for (k in wants) {
            if (index(name, k) == 0) continue
            seen[k]++
            mixed[k] += count["HGMMA"] > 0 && count["QGMMA"] > 0
            n = split(wants[k], w, " ")
            for (i = 1; i <= n; i++) if (count[w[i]] == 0) bad(name ": no " w[i])
        }
        delete count
    }
    /^check_sass failed/ { bad("cuobjdump cannot read " $3) }
    /Function : / { close_kernel(); name = $3 }
    match($0, /^ +\/\*[0-9a-f]+\*\/ +(@!?U?P[0-9T]+ )?[A-Z0-9]+/) {
        text = substr($0, RSTART, RLENGTH); sub(/.* /, "", text); count[text]++
    }
    END {
        close_kernel()
        for (k in wants) if (seen[k] == 0) bad("no kernel is called " k)
        for (k in both) if (seen[k] > 0 && mixed[k] == 0) bad(k ": no instance has products of BF16 and of FP8")
        if (!failed) printf "check_sass: %d kernels, products by warpgroups, no local memory\n", kernels
        exit failed
    }'
