/* model: NVFP4 operands of projections on the GPU, as represented values in BF16 (exact). The arithmetic is that of
 * numerics/formats.h, whose functions also compile for the GPU: bits equal the CPU's. */
extern "C" {
#include "model/linear_format.h"
#include "numerics/hadamard.h"
}

#include "model/linear_cuda.cuh"

enum { THREADS = 256 };

/* ---- one block of 16 ---- */

/* Of the block with this amax; a scale of 0 makes all of it +0. */
struct block_scale {
    float g, scale, inverse, step;
};

__device__ __forceinline__ block_scale block_scale_of(float amax, float g)
{
    float scale = ue4m3_to_float(ue4m3_from_float(amax * g / E2M1_MAX));
    return {g, scale, 1.0f / scale, scale / g};
}

/* x g / scale, correctly rounded without a division for each element: the residual is exact and a scale has four bits,
 * so that a quotient is never nearer than 1/30 of a unit to where rounding changes. The sum would make -0 a +0. */
__device__ __forceinline__ float in_units(float x, block_scale s)
{
    float dividend = x * s.g, quotient = dividend * s.inverse;
    return copysignf(fmaf(fmaf(-quotient, s.scale, dividend), s.inverse, quotient), dividend);
}

__device__ __forceinline__ float round_nearest(float x, block_scale s)
{
    return s.scale > 0.0f ? e2m1_round(in_units(x, s)) * s.step : 0.0f;
}

__device__ __forceinline__ float round_random(float x, block_scale s, uint32_t bits)
{
    return s.scale > 0.0f ? e2m1_round_sr(in_units(x, s), bits) * s.step : 0.0f;
}

/* ---- random words ---- */

/* How a kernel rounds: not `random` means to nearest. */
struct rounding {
    bool random;
    uint64_t seed, stream;
    const struct cuda_step *step;
};

static struct rounding rounding_of(const struct linear_random *random, const struct cuda *on)
{
    return random ? rounding{true, random->seed, random->stream, on->step} : rounding{};
}

/* The stream of this call's sample. */
__device__ __forceinline__ uint64_t sample_stream(const rounding &r)
{
    if (!r.random) {
        return 0;
    }
    uint4 words = philox(r.seed, r.stream, r.step->sample);
    return (uint64_t)words.y << 32 | words.x;
}

/* Words of the four elements from `element` on, a multiple of 4; zeros if there is nothing to draw. */
__device__ __forceinline__ uint4 element_words(const rounding &r, uint64_t stream, uint64_t element)
{
    return r.random ? philox(r.seed, stream, (uint64_t)r.step->update << 32 | element >> 2) : make_uint4(0, 0, 0, 0);
}

__device__ __forceinline__ float round_one(const rounding &r, float x, block_scale s, uint32_t bits)
{
    return r.random ? round_random(x, s, bits) : round_nearest(x, s);
}

__device__ __forceinline__ void round_four(const rounding &r, const block_scale *s, uint4 words, float *x)
{
    x[0] = round_one(r, x[0], s[0], words.x);
    x[1] = round_one(r, x[1], s[1], words.y);
    x[2] = round_one(r, x[2], s[2], words.z);
    x[3] = round_one(r, x[3], s[3], words.w);
}

__device__ __forceinline__ float largest_of(bf16x8 x)
{
    return __uint_as_float(magnitude_of(magnitude_max8(0, x)));
}

__device__ __forceinline__ bf16x8 all_nan(void)
{
    return {make_uint4(0x7fff7fffu, 0x7fff7fffu, 0x7fff7fffu, 0x7fff7fffu)};
}

/* ---- rows: two neighbouring lanes share a block ---- */

static __global__ void __launch_bounds__(THREADS) rows_kernel(struct linear_values a, rounding r, int64_t vectors)
{
    const float amax = *a.amax, g = power_scale(amax, E2M1_MAX * UE4M3_MAX);
    const uint64_t stream = sample_stream(r);
    for (int64_t base = (int64_t)blockIdx.x * THREADS; base < vectors; base += (int64_t)gridDim.x * THREADS) {
        const int64_t at = base + threadIdx.x;
        const bool mine = at < vectors;
        bf16x8 x = mine ? bf16x8_load(a.x + 8 * at) : bf16x8{make_uint4(0, 0, 0, 0)};
        float v[8], block = largest_of(x);
        block = fmaxf(block, __shfl_xor_sync(0xffffffffu, block, 1));
        block_scale s = block_scale_of(block, g);
        const block_scale same[4] = {s, s, s, s};
        bf16x8_unpack(x, v);
        round_four(r, same, element_words(r, stream, (uint64_t)at * 8), v);
        round_four(r, same, element_words(r, stream, (uint64_t)at * 8 + 4), v + 4);
        if (mine) {
            bf16x8_store(a.y + 8 * at, is_broken(amax) ? all_nan() : bf16x8_pack(v));
        }
    }
}

static void check_values(const struct linear_values *a)
{
    ASSERT(a->cols % LINEAR_BLOCK == 0 && ((uintptr_t)a->x | (uintptr_t)a->y) % 16 == 0);
}

/* Blocks for `pieces` of work, no more than fill the GPU a few times over. */
static unsigned int blocks_for(int64_t pieces, int64_t per_block, const struct cuda *on)
{
    const unsigned int blocks = cuda_blocks(pieces, per_block), most = 16 * (unsigned int)on->multiprocessors;
    return blocks < most ? blocks : most;
}

void linear_round_rows_cuda(const struct linear_values *a, const struct cuda *on)
{
    check_values(a);
    const int64_t vectors = a->rows * a->cols / 8;
    rows_kernel<<<blocks_for(vectors, THREADS, on), THREADS, 0, on->stream>>>(*a, rounding_of(a->random, on), vectors);
    cuda_launched(on, "linear NVFP4 rows");
}

/* ---- tiles of 16 x 16 ---- */

/* A warp owns four neighbouring tiles, so that its accesses are whole lines: eight lanes a row, four rows at a time. A
 * tile is in two neighbouring lanes of each eight. */
enum { STRIP_COLS = 4 * LINEAR_BLOCK, STRIP_ROWS = 4, STRIP_STEPS = LINEAR_BLOCK / STRIP_ROWS };

static __global__ void __launch_bounds__(THREADS) tiles_kernel(struct linear_values a, int64_t strips)
{
    const float amax = *a.amax, g = power_scale(amax, E2M1_MAX * UE4M3_MAX);
    const int lane = threadIdx.x & 31;
    const int64_t across = (a.cols + STRIP_COLS - 1) / STRIP_COLS;
    const int64_t strip = (int64_t)blockIdx.x * (THREADS / 32) + (threadIdx.x >> 5);
    const int64_t row = strip / across * LINEAR_BLOCK + (lane >> 3), col = strip % across * STRIP_COLS + (lane & 7) * 8;
    const bool mine = strip < strips && col < a.cols;
    bf16x8 x[STRIP_STEPS];
    float tile = 0.0f;
#pragma unroll
    for (int i = 0; i < STRIP_STEPS; i++) {
        x[i] = mine ? bf16x8_load(a.x + (row + i * STRIP_ROWS) * a.cols + col) : bf16x8{make_uint4(0, 0, 0, 0)};
        tile = fmaxf(tile, largest_of(x[i]));
    }
    tile = fmaxf(tile, __shfl_xor_sync(0xffffffffu, tile, 1));
    tile = fmaxf(tile, __shfl_xor_sync(0xffffffffu, tile, 8));
    tile = fmaxf(tile, __shfl_xor_sync(0xffffffffu, tile, 16));
    const block_scale s = block_scale_of(tile, g);
#pragma unroll
    for (int i = 0; i < STRIP_STEPS; i++) {
        float v[8];
        bf16x8_unpack(x[i], v);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            v[j] = round_nearest(v[j], s);
        }
        if (mine) {
            bf16x8_store(a.y + (row + i * STRIP_ROWS) * a.cols + col, is_broken(amax) ? all_nan() : bf16x8_pack(v));
        }
    }
}

void linear_round_tiles_cuda(const struct linear_values *a, const struct cuda *on)
{
    check_values(a);
    ASSERT(a->rows % LINEAR_BLOCK == 0 && !a->random);
    const int64_t strips = a->rows / LINEAR_BLOCK * ((a->cols + STRIP_COLS - 1) / STRIP_COLS);
    tiles_kernel<<<cuda_blocks(strips, THREADS / 32), THREADS, 0, on->stream>>>(*a, strips);
    cuda_launched(on, "linear NVFP4 tiles");
}

/* ---- 16 tokens after a Hadamard transform of them ---- */

/* A thread owns 16 tokens of 4 columns: the random words of a token's four elements come in one draw. Amax and rounding
 * both transform: to read BF16 twice is less than to keep FP32. */
enum { GROUP_COLS = 4 };

struct group {
    float x[HADAMARD_TOKENS][GROUP_COLS];
};

/* Tokens behind the last one are zeros. */
__device__ __forceinline__ void group_load(const bf16 *x, int64_t tokens, int64_t stride, group &t)
{
#pragma unroll
    for (int r = 0; r < HADAMARD_TOKENS; r++) {
        uint2 words = r < tokens ? *reinterpret_cast<const uint2 *>(x + r * stride) : make_uint2(0, 0);
        t.x[r][0] = __uint_as_float(words.x << 16);
        t.x[r][1] = __uint_as_float(words.x & 0xffff0000u);
        t.x[r][2] = __uint_as_float(words.y << 16);
        t.x[r][3] = __uint_as_float(words.y & 0xffff0000u);
    }
}

/* The butterflies of numerics/hadamard.c, in its order. A short group stays as it is. */
__device__ __forceinline__ void group_transform(int64_t tokens, group &t)
{
    if (tokens < HADAMARD_TOKENS) {
        return;
    }
#pragma unroll
    for (int c = 0; c < GROUP_COLS; c++) {
#pragma unroll
        for (int r = 0; r < HADAMARD_TOKENS; r++) {
            t.x[r][c] *= HADAMARD_SIGNS >> r & 1u ? -0.25f : 0.25f;
        }
#pragma unroll
        for (int half = 1; half < HADAMARD_TOKENS; half *= 2) {
#pragma unroll
            for (int r = 0; r < HADAMARD_TOKENS; r++) {
                if ((r & half) == 0) {
                    float a = t.x[r][c], b = t.x[r + half][c];
                    t.x[r][c] = a + b;
                    t.x[r + half][c] = a - b;
                }
            }
        }
    }
}

/* Magnitude bits of a column, a NaN above all. */
__device__ __forceinline__ uint32_t column_amax(const group &t, int c)
{
    uint32_t max = 0;
#pragma unroll
    for (int r = 0; r < HADAMARD_TOKENS; r++) {
        max = umax(max, __float_as_uint(t.x[r][c]) & ~FLOAT_SIGN);
    }
    return max;
}

/* Group `at` of a matrix whose rows hold `across` groups. */
struct place {
    int64_t row, col, tokens;
};

__device__ __forceinline__ place place_of(int64_t at, int64_t across, int64_t rows)
{
    int64_t row = at / across * HADAMARD_TOKENS;
    return {row, at % across * GROUP_COLS, rows - row};
}

static __global__ void __launch_bounds__(THREADS)
    amax_hadamard_kernel(const bf16 *x, int64_t rows, int64_t cols, int64_t groups, float *amax)
{
    uint32_t max = 0;
    for (int64_t at = (int64_t)blockIdx.x * THREADS + threadIdx.x; at < groups; at += (int64_t)gridDim.x * THREADS) {
        group t;
        place p = place_of(at, cols / GROUP_COLS, rows);
        group_load(x + p.row * cols + p.col, p.tokens, cols, t);
        group_transform(p.tokens, t);
#pragma unroll
        for (int c = 0; c < GROUP_COLS; c++) {
            max = umax(max, column_amax(t, c));
        }
    }
    amax_publish(max, amax);
}

static __global__ void __launch_bounds__(THREADS) hadamard_kernel(struct linear_values a, rounding r, int64_t groups)
{
    const float amax = *a.amax, g = power_scale(amax, E2M1_MAX * UE4M3_MAX);
    const uint64_t stream = sample_stream(r);
    for (int64_t at = (int64_t)blockIdx.x * THREADS + threadIdx.x; at < groups; at += (int64_t)gridDim.x * THREADS) {
        group t;
        block_scale s[GROUP_COLS];
        place p = place_of(at, a.cols / GROUP_COLS, a.rows);
        const int64_t first = p.row * a.cols + p.col;
        group_load(a.x + first, p.tokens, a.cols, t);
        group_transform(p.tokens, t);
#pragma unroll
        for (int c = 0; c < GROUP_COLS; c++) {
            s[c] = block_scale_of(__uint_as_float(column_amax(t, c)), g);
        }
#pragma unroll
        for (int i = 0; i < HADAMARD_TOKENS; i++) {
            const int64_t element = first + i * a.cols;
            if (i < p.tokens) {
                round_four(r, s, element_words(r, stream, (uint64_t)element), t.x[i]);
                uint2 words = make_uint2(__byte_perm(bf16_code(t.x[i][0]), bf16_code(t.x[i][1]), 0x5410),
                                         __byte_perm(bf16_code(t.x[i][2]), bf16_code(t.x[i][3]), 0x5410));
                *reinterpret_cast<uint2 *>(a.y + element) =
                    is_broken(amax) ? make_uint2(0x7fff7fffu, 0x7fff7fffu) : words;
            }
        }
    }
}

static int64_t groups_of(int64_t rows, int64_t cols)
{
    return (rows + HADAMARD_TOKENS - 1) / HADAMARD_TOKENS * (cols / GROUP_COLS);
}

void linear_amax_hadamard_cuda(const bf16 *x, int64_t rows, int64_t cols, float *amax, const struct cuda *on)
{
    const int64_t groups = groups_of(rows, cols);
    ASSERT(cols % LINEAR_BLOCK == 0 && (uintptr_t)x % 16 == 0);
    cuda_zero(on, amax, sizeof *amax);
    amax_hadamard_kernel<<<blocks_for(groups, THREADS, on), THREADS, 0, on->stream>>>(x, rows, cols, groups, amax);
    cuda_launched(on, "linear amax after the Hadamard transform");
}

void linear_round_hadamard_cuda(const struct linear_values *a, const struct cuda *on)
{
    const int64_t groups = groups_of(a->rows, a->cols);
    check_values(a);
    hadamard_kernel<<<blocks_for(groups, THREADS, on), THREADS, 0, on->stream>>>(*a, rounding_of(a->random, on),
                                                                                 groups);
    cuda_launched(on, "linear NVFP4 after the Hadamard transform");
}
