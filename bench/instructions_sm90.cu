/* bench: rates of the instructions that attention on Hopper is built of (docs/results/attention_sm90.md).
 *
 *   build/release/bench/instructions_sm90
 *
 * Clocks of one multiprocessor by its own counter, eight warps at work, all multiprocessors busy; for wgmma also the
 * share of the dense rate (4096 BF16 or 8192 FP8 operations a clock). Copies and additions: bench/transfers_sm90. */
#include "bench/clocks_sm90.cuh"

enum { SHARED = 200 * 1024 };

/* ---- wgmma: each of two warpgroups multiplies 64 x N by 128 bytes of K, ROUNDS times ---- */

enum operands { BF16_SS, BF16_RS, E4M3_SS, E4M3_RS, E5M2_RS };

template <int N, operands KIND>
__global__ void __launch_bounds__(THREADS, 1) product_kernel(float *out, long long *clocks)
{
    extern __shared__ unsigned char raw[];
    uint32_t base = (shared_address(raw) + 1023) / 1024 * 1024;
    for (int i = threadIdx.x; i < 128 * 1024 / 4; i += THREADS) {
        reinterpret_cast<uint32_t *>(raw)[i] = 0x38380000u + (uint32_t)(i * 2654435761u >> 20);
    }
    fence_async_proxy();
    __syncthreads();
    float d[N / 2] = {};
    uint32_t p[16];
    for (int i = 0; i < 16; i++) {
        p[i] = 0x38383838u + threadIdx.x + i;
    }
    uint64_t a = operand_k_major(base + threadIdx.x / 128 * 16384), b = operand_k_major(base + 65536);
    long long start = clock64();
    for (int round = 0; round < ROUNDS; round++) {
        wgmma_pin(d);
        wgmma_pin(p);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; k++) {
            uint64_t a_k = operand_advance(a, 32 * k), b_k = operand_advance(b, 32 * k);
            if constexpr (KIND == BF16_SS) {
                wgmma_bf16<N>::template ss<0, 0>(d, a_k, b_k, 1);
            } else if constexpr (KIND == BF16_RS) {
                wgmma_bf16<N>::template rs<0>(d, p + 4 * k, b_k, 1);
            } else if constexpr (KIND == E4M3_SS) {
                wgmma_e4m3<N>::ss(d, a_k, b_k, 1);
            } else if constexpr (KIND == E4M3_RS) {
                wgmma_e4m3<N>::rs(d, p + 4 * k, b_k, 1);
            } else {
                wgmma_e5m2_e4m3<N>::rs(d, p + 4 * k, b_k, 1);
            }
        }
        wgmma_commit();
        wgmma_wait<0>();
    }
    long long stop = clock64();
    float sum = 0;
    for (int i = 0; i < N / 2; i++) {
        sum += d[i];
    }
    out[blockIdx.x * THREADS + threadIdx.x] = sum;
    if (threadIdx.x == 0) {
        clocks[blockIdx.x] = stop - start;
    }
}

template <int N, operands KIND> static void product(const bench &b, const char *name)
{
    bool wide = KIND == BF16_SS || KIND == BF16_RS;
    double clocks = clocks_of(b, product_kernel<N, KIND>, SHARED),
           ideal = 2.0 * 64 * N * 2 * (wide ? 64 / 4096.0 : 128 / 8192.0);
    printf("| m64n%-3d %-30s | %7.1f | %5.2f of the dense rate |\n", N, name, clocks, ideal / clocks);
}

static void products(const bench &b)
{
    product<64, BF16_SS>(b, "bf16, A and B in shared memory");
    product<96, BF16_SS>(b, "bf16, A and B in shared memory");
    product<128, BF16_SS>(b, "bf16, A and B in shared memory");
    product<64, BF16_RS>(b, "bf16, A in registers");
    product<128, BF16_RS>(b, "bf16, A in registers");
    product<32, E4M3_SS>(b, "e4m3, A and B in shared memory");
    product<64, E4M3_SS>(b, "e4m3, A and B in shared memory");
    product<128, E4M3_SS>(b, "e4m3, A and B in shared memory");
    product<32, E4M3_RS>(b, "e4m3, A in registers");
    product<64, E4M3_RS>(b, "e4m3, A in registers");
    product<128, E4M3_RS>(b, "e4m3, A in registers");
    product<128, E5M2_RS>(b, "e5m2 x e4m3, A in registers");
}

/* ---- other instructions. Each warp runs 16 chains, each step reads its own result and a neighbour's, in a loop that
 * carries all of them: the compiler can move nothing out of the clocked part. %0: the chain, %1: the neighbour, %2: a
 * constant; all words of 32 bits ---- */

#define INSTRUCTION(ID, NAME, TEXT)                                                                                    \
    struct ID {                                                                                                        \
        static const char *name()                                                                                      \
        {                                                                                                              \
            return NAME;                                                                                               \
        }                                                                                                              \
        static __device__ __forceinline__ void step(uint32_t &x, uint32_t neighbour, uint32_t c)                       \
        {                                                                                                              \
            asm volatile(TEXT : "+r"(x) : "r"(neighbour), "r"(c));                                                     \
        }                                                                                                              \
    }
/* Two of them to a word of four bytes, the second merges; and back from two bytes. */
#define TO_BYTES(CVT, TWO)                                                                                             \
    "{\n\t.reg .b16 l, h;\n\t" CVT " l, %0" TWO ";\n\t" CVT " h, %1" TWO ";\n\tmov.b32 %0, {l, h};\n\t}"
#define FROM_BYTES(CVT) "{\n\t.reg .b16 h;\n\tcvt.u16.u32 h, %0;\n\t" CVT " %0, h;\n\t}"

INSTRUCTION(ex2, "ex2.approx.ftz.f32", "ex2.approx.ftz.f32 %0, %0;");
INSTRUCTION(ex2_half, "ex2.approx.f16x2 (two values)", "ex2.approx.f16x2 %0, %0;");
INSTRUCTION(fma_f, "fma.rn.f32", "fma.rn.f32 %0, %0, %2, %1;");
INSTRUCTION(add_f, "add.f32", "add.f32 %0, %0, %1;");
INSTRUCTION(mul_f, "mul.f32", "mul.f32 %0, %0, %1;");
INSTRUCTION(max_f, "max.f32", "max.f32 %0, %0, %1;");
INSTRUCTION(round_f, "cvt.rni.f32.f32", "cvt.rni.f32.f32 %0, %0;");
INSTRUCTION(to_bf16, "cvt.rn.bf16x2.f32", "cvt.rn.bf16x2.f32 %0, %0, %1;");
INSTRUCTION(to_f16, "cvt.rn.f16x2.f32", "cvt.rn.f16x2.f32 %0, %0, %1;");
INSTRUCTION(to_f16_down, "cvt.rz.f16x2.f32", "cvt.rz.f16x2.f32 %0, %0, %1;");
INSTRUCTION(to_e4m3, "cvt.rn.satfinite.e4m3x2.f32, twice", TO_BYTES("cvt.rn.satfinite.e4m3x2.f32", ", %2"));
INSTRUCTION(to_e5m2, "cvt.rn.satfinite.e5m2x2.f32, twice", TO_BYTES("cvt.rn.satfinite.e5m2x2.f32", ", %2"));
INSTRUCTION(half_to_e4m3, "cvt.rn.satfinite.e4m3x2.f16x2, twice", TO_BYTES("cvt.rn.satfinite.e4m3x2.f16x2", ""));
INSTRUCTION(from_e4m3, "cvt.rn.f16x2.e4m3x2", FROM_BYTES("cvt.rn.f16x2.e4m3x2"));
INSTRUCTION(half_mul, "mul.rn.f16x2", "mul.rn.f16x2 %0, %0, %1;");
INSTRUCTION(half_fma, "fma.rn.f16x2", "fma.rn.f16x2 %0, %0, %2, %1;");
INSTRUCTION(half_max, "max.f16x2", "max.f16x2 %0, %0, %1;");
INSTRUCTION(bf16_mul, "mul.rn.bf16x2", "mul.rn.bf16x2 %0, %0, %1;");
INSTRUCTION(max_s, "max.s32", "max.s32 %0, %0, %1;");
INSTRUCTION(max_u16, "max.u16x2", "max.u16x2 %0, %0, %1;");
INSTRUCTION(add_i, "add.s32", "add.s32 %0, %0, %1;");
INSTRUCTION(mad_low, "mad.lo.u32", "mad.lo.u32 %0, %0, %2, %1;");
INSTRUCTION(mad_high, "mad.hi.u32", "mad.hi.u32 %0, %0, %2, %1;");
INSTRUCTION(logic, "lop3.b32", "lop3.b32 %0, %0, %1, %2, 0xca;");
INSTRUCTION(shift, "shf.l.wrap.b32", "shf.l.wrap.b32 %0, %0, %1, 7;");
INSTRUCTION(bytes, "prmt.b32", "prmt.b32 %0, %0, %1, 0x5410;");
INSTRUCTION(bytes_by_word, "prmt.b32, selector in a register", "prmt.b32 %0, %2, %1, %0;");
INSTRUCTION(select_f, "setp.gt.f32 and selp",
            "{\n\t.reg .pred p;\n\tsetp.gt.f32 p, %0, %2;\n\tselp.b32 %0, %1, %0, p;\n\t}");
/* Pairs: the sum of two that share a pipe, else the slower one. */
INSTRUCTION(logic_cvt, "lop3.b32 and cvt.rn.bf16x2.f32",
            "lop3.b32 %0, %0, %1, %2, 0xca;\n\tcvt.rn.bf16x2.f32 %0, %0, %1;");
INSTRUCTION(logic_mad, "lop3.b32 and mad.lo.u32", "lop3.b32 %0, %0, %1, %2, 0xca;\n\tmad.lo.u32 %0, %0, %2, %1;");
INSTRUCTION(logic_fma, "lop3.b32 and fma.rn.f32", "lop3.b32 %0, %0, %1, %2, 0xca;\n\tfma.rn.f32 %0, %0, %2, %1;");
INSTRUCTION(fma_mad, "fma.rn.f32 and mad.lo.u32", "fma.rn.f32 %0, %0, %2, %1;\n\tmad.lo.u32 %0, %0, %2, %1;");
INSTRUCTION(half_max_cvt, "max.f16x2 and cvt.rn.bf16x2.f32", "max.f16x2 %0, %0, %1;\n\tcvt.rn.bf16x2.f32 %0, %0, %1;");
INSTRUCTION(half_mul_logic, "mul.rn.f16x2 and lop3.b32", "mul.rn.f16x2 %0, %0, %1;\n\tlop3.b32 %0, %0, %1, %2, 0xca;");
INSTRUCTION(ex2_cvt, "ex2.approx.ftz.f32 and cvt.rn.bf16x2.f32",
            "ex2.approx.ftz.f32 %0, %0;\n\tcvt.rn.bf16x2.f32 %0, %0, %1;");
INSTRUCTION(shuffle, "shfl.bfly", "shfl.sync.bfly.b32 %0, %0, 1, 31, 0xffffffff;");

enum { STEPS = 64 };

template <class I>
__global__ void __launch_bounds__(THREADS, 1) instruction_kernel(float *out, long long *clocks, uint32_t c)
{
    uint32_t x[16];
    for (int i = 0; i < 16; i++) {
        x[i] = __float_as_uint((float)threadIdx.x * 0.01f + (float)i) ^ c;
    }
    __syncthreads();
    long long start = clock64();
#pragma unroll 1
    for (int round = 0; round < ROUNDS; round++) {
#pragma unroll
        for (int i = 0; i < STEPS; i++) {
            I::step(x[i % 16], x[(i + 5) % 16], c);
        }
    }
    long long stop = clock64();
    uint32_t sum = 0;
    for (int i = 0; i < 16; i++) {
        sum += x[i];
    }
    out[blockIdx.x * THREADS + threadIdx.x] = __uint_as_float(sum);
    if (threadIdx.x == 0) {
        clocks[blockIdx.x] = stop - start;
    }
}

template <class I> static void instruction(const bench &b)
{
    /* Two warps a scheduler. */
    printf("| %-38s | %7.2f | clocks a warp instruction and scheduler |\n", I::name(),
           clocks_of(b, instruction_kernel<I>, 0, 0x3f010204u) / (STEPS * WARPS / 4));
}

template <class... I> static void instructions(const bench &b)
{
    (instruction<I>(b), ...);
}

int main()
{
    const struct bench b = bench_open();
    printf("| instruction | clocks | |\n|---|---|---|\n");
    products(b);
    instructions<ex2, ex2_half, fma_f, add_f, mul_f, max_f, round_f>(b);
    instructions<to_bf16, to_f16, to_f16_down, to_e4m3, to_e5m2, half_to_e4m3, from_e4m3>(b);
    instructions<half_mul, half_fma, half_max, bf16_mul>(b);
    instructions<max_s, max_u16, add_i, mad_low, mad_high, logic, shift, bytes, bytes_by_word, select_f, shuffle>(b);
    instructions<logic_cvt, logic_mad, logic_fma, fma_mad, half_max_cvt, half_mul_logic, ex2_cvt>(b);
    return 0;
}
