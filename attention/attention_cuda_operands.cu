/* attention: operands of the variant "cuda", bit for bit those of attention_cpu_operands.c (docs/numerics.md, sections
 * 3 and 4). Each kernel moves its tensor once in and once out; facts of a head (its amax) come from a pass before. */
#include "attention/attention_cuda_operands.cuh"

enum { THREADS = 256 };

__device__ __forceinline__ const bf16 *token_of(const head_tensor &x, int64_t head, int64_t token)
{
    return x.view.data + (head / x.heads) * x.view.batch_stride + (head % x.heads) * x.view.head_stride +
           token * x.view.token_stride;
}

/* ---- facts of heads --------------------------------------------------------------------------------------- */

/* Grid (slices of tokens, batch * heads). */
static __global__ void measure_kernel(head_tensor x, head_facts *facts)
{
    const int64_t head = blockIdx.y;
    const int chunks = (int)(x.head_dim / 8);
    uint32_t largest = 0, bad = 0;
    for (int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x; i < x.tokens * chunks;
         i += (int64_t)gridDim.x * THREADS) {
        const uint4 words = bf16x8_load(token_of(x, head, i / chunks) + i % chunks * 8).words;
        const uint32_t w[4] = {words.x & 0x7fff7fffu, words.y & 0x7fff7fffu, words.z & 0x7fff7fffu,
                               words.w & 0x7fff7fffu};
        const uint32_t pair = __vmaxu2(__vmaxu2(w[0], w[1]), __vmaxu2(w[2], w[3]));
        largest = __vmaxu2(largest, pair);
        if (max(pair & 0xffffu, pair >> 16) >= 0x7f80u) {
            for (int j = 0; j < 4; j++) {
                bad += ((w[j] & 0xffffu) >= 0x7f80u) + (w[j] >> 16 >= 0x7f80u);
            }
        }
    }
    largest = __reduce_max_sync(0xffffffffu, max(largest & 0xffffu, largest >> 16));
    bad = __reduce_add_sync(0xffffffffu, bad);
    if ((threadIdx.x & 31) == 0) {
        atomicMax(&facts[head].amax, min(largest, 0x7f80u) << 16);
        if (bad > 0) {
            atomicAdd(&facts[head].non_finite, bad);
        }
    }
}

void attention_measure_cuda(const struct cuda *on, const struct head_tensor *x, struct head_facts *facts)
{
    const int64_t heads = x->batch * x->heads;
    cuda_zero(on, facts, (size_t)heads * sizeof *facts);
    const unsigned int slices = cuda_blocks(x->tokens * (x->head_dim / 8), 8 * THREADS);
    if (heads > 0 && slices > 0) {
        measure_kernel<<<dim3(slices < 64 ? slices : 64, (unsigned int)heads), THREADS, 0, on->stream>>>(*x, facts);
        cuda_launched(on, "attention measure");
    }
}

/* ---- centred K -------------------------------------------------------------------------------------------- */

/* The mean is summed in token order, as on the CPU: a chain of additions, one thread a feature, which takes its values
 * from shared memory while all threads fetch the tiles to come. Each slice of tokens makes it anew: few slices. */
enum {
    CENTRE_THREADS = 512,
    CENTRE_TOKENS = 128,                             /* of a tile */
    CENTRE_CHUNKS = ATTENTION_CUDA_HEAD_DIM_MAX / 8, /* of a token in the tile, and of features at most */
    CENTRE_WORDS = CENTRE_TOKENS * CENTRE_CHUNKS / CENTRE_THREADS,
    CENTRE_SLICES = 4,
};

/* A thread's part of every tile: 8 features (chunk) of the tokens token, token + step, ..; of none: token is
 * CENTRE_TOKENS. */
struct centre_part {
    int chunk, token, step;
    const bf16 *next; /* of the tile to be fetched */
    int64_t jump, tile_jump, left;
};

struct centre_words {
    uint4 words[CENTRE_WORDS];
};

__device__ __forceinline__ centre_part centre_part_of(const head_tensor &k, const bf16 *x)
{
    const int chunks = (int)k.head_dim / 8;
    centre_part p;
    p.step = min(CENTRE_TOKENS, 1 << (31 - __clz(CENTRE_THREADS / chunks)));
    p.chunk = threadIdx.x % chunks;
    p.token = min((int)threadIdx.x / chunks, CENTRE_TOKENS);
    p.token = p.token < p.step ? p.token : CENTRE_TOKENS;
    p.next = x + p.token * k.view.token_stride + p.chunk * 8;
    p.jump = p.step * k.view.token_stride;
    p.tile_jump = CENTRE_TOKENS * k.view.token_stride;
    p.left = k.tokens;
    return p;
}

__device__ __forceinline__ void centre_fetch(centre_words &w, centre_part &p)
{
    const int end = (int)min((int64_t)CENTRE_TOKENS, p.left);
#pragma unroll
    for (int i = 0; i < CENTRE_WORDS; i++) {
        w.words[i] = make_uint4(0, 0, 0, 0); /* adds nothing to a sum, which is never -0 */
        if (p.token + i * p.step < end) {
            w.words[i] = bf16x8_load(p.next + i * p.jump).words;
        }
    }
    p.next += p.tile_jump;
    p.left -= CENTRE_TOKENS;
}

__device__ __forceinline__ void centre_put(const centre_words &w, const centre_part &p, uint4 *tile)
{
#pragma unroll
    for (int i = 0; i < CENTRE_WORDS; i++) {
        const int token = p.token + i * p.step;
        if (token < CENTRE_TOKENS) {
            tile[token * CENTRE_CHUNKS + p.chunk] = w.words[i];
        }
    }
}

/* `sum` and this thread's feature of a tile, in the order of tokens: values are fetched while those before are added.
 */
__device__ __forceinline__ float centre_add(float sum, const bf16 *tile)
{
    constexpr int AHEAD = 16;
    bf16 x[2][AHEAD];
#pragma unroll
    for (int i = 0; i <= CENTRE_TOKENS; i += AHEAD) {
#pragma unroll
        for (int a = 0; a < AHEAD && i < CENTRE_TOKENS; a++) {
            x[i / AHEAD % 2][a] = tile[(i + a) * ATTENTION_CUDA_HEAD_DIM_MAX];
        }
#pragma unroll
        for (int a = 0; a < AHEAD && i > 0; a++) {
            sum = __fadd_rn(sum, bf16_value(x[1 - i / AHEAD % 2][a]));
        }
    }
    return sum;
}

/* Grid (slices of tokens, batch * heads). */
static __global__ void __launch_bounds__(CENTRE_THREADS) centre_kernel(head_tensor k, bf16 *y)
{
    __shared__ uint4 tile[CENTRE_TOKENS * CENTRE_CHUNKS];
    __shared__ float means[ATTENTION_CUDA_HEAD_DIM_MAX];
    const int64_t head = blockIdx.y;
    const bf16 *x = token_of(k, head, 0);
    const bool sums = threadIdx.x < k.head_dim;
    centre_part p = centre_part_of(k, x);
    centre_words next[2];
    float mean = 0.0f;
    centre_fetch(next[0], p);
    centre_fetch(next[1], p);
    for (int64_t first = 0; first < k.tokens; first += 2 * CENTRE_TOKENS) {
#pragma unroll
        for (int turn = 0; turn < 2; turn++) {
            centre_put(next[turn], p, tile);
            __syncthreads();
            centre_fetch(next[turn], p);
            if (sums) {
                mean = centre_add(mean, reinterpret_cast<const bf16 *>(tile) + threadIdx.x);
            }
            __syncthreads();
        }
    }
    if (sums) {
        means[threadIdx.x] = __fdiv_rn(mean, (float)k.tokens);
    }
    __syncthreads();
    if (p.token >= p.step) {
        return;
    }
    const int64_t slice = (k.tokens + gridDim.x - 1) / gridDim.x, from = blockIdx.x * slice;
    const int64_t end = min(from + slice, k.tokens);
#pragma unroll 4
    for (int64_t t = from + p.token; t < end; t += p.step) {
        float z[8];
        bf16x8_unpack(bf16x8_load(x + t * k.view.token_stride + p.chunk * 8), z);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            z[j] = __fsub_rn(z[j], means[p.chunk * 8 + j]);
        }
        bf16x8_store(y + (head * k.tokens + t) * k.head_dim + p.chunk * 8, bf16x8_pack(z));
    }
}

void attention_centre_cuda(const struct cuda *on, const struct head_tensor *k, bf16 *y)
{
    const int64_t heads = k->batch * k->heads;
    const unsigned int slices = cuda_blocks(k->tokens, 2 * CENTRE_TOKENS);
    if (heads > 0) {
        const dim3 grid(min(slices, (unsigned int)CENTRE_SLICES), (unsigned int)heads);
        centre_kernel<<<grid, CENTRE_THREADS, 0, on->stream>>>(*k, y);
        cuda_launched(on, "attention centre");
    }
}

__device__ __forceinline__ void load16(const bf16 *x, float *y)
{
    bf16x8_unpack(bf16x8_load(x), y);
    bf16x8_unpack(bf16x8_load(x + 8), y + 8);
}

__device__ __forceinline__ void store16(const float *x, bf16 *y)
{
    bf16x8_store(y, bf16x8_pack(x));
    bf16x8_store(y + 8, bf16x8_pack(x + 8));
}

__device__ __forceinline__ void store16_nan(bf16 *y)
{
    const uint4 nan = make_uint4(0x7fff7fffu, 0x7fff7fffu, 0x7fff7fffu, 0x7fff7fffu);
    bf16x8_store(y, {nan});
    bf16x8_store(y + 8, {nan});
}

/* A thread a block of 16 features. */
template <bool MSE>
static __global__ void __launch_bounds__(THREADS) scores_kernel(head_tensor x, const head_facts *facts, bf16 *y)
{
    const int64_t blocks = x.head_dim / QK_BLOCK, i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (i >= x.batch * x.heads * x.tokens * blocks) {
        return;
    }
    const int64_t row = i / blocks, head = row / x.tokens, d = i % blocks * QK_BLOCK;
    const float amax = __uint_as_float(facts[head].amax);
    bf16 *to = y + row * x.head_dim + d;
    if (!(amax < FLOAT_INFINITY)) {
        store16_nan(to);
        return;
    }
    const float g = pow2_scale_of(amax, E2M1_MAX * UE4M3_MAX);
    float block[QK_BLOCK], m[QK_BLOCK];
    load16(token_of(x, head, row % x.tokens) + d, block);
    const float block_amax = magnitudes<QK_BLOCK>(block, g, m);
    uint8_t code = nvfp4_amax_code(block_amax);
    if (MSE && block_amax > 0.0f) {
        code = nvfp4_mse_code(
            block_amax, [&m](float scale) { return squared_gain<QK_BLOCK>(m, scale); },
            [&m](float scale) { return squared_error(m, scale); });
    }
    nvfp4_apply<QK_BLOCK>(block, g, code);
    store16(block, to);
}

/* A thread two blocks 64 features apart, which share the better of some scales (D = 128). */
static __global__ void __launch_bounds__(THREADS) scores_folded_kernel(head_tensor x, const head_facts *facts, bf16 *y)
{
    const int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (i >= x.batch * x.heads * x.tokens * 4) {
        return;
    }
    const int64_t row = i / 4, head = row / x.tokens, d = i % 4 * QK_BLOCK;
    const float amax = __uint_as_float(facts[head].amax);
    bf16 *to = y + row * 128 + d;
    if (!(amax < FLOAT_INFINITY)) {
        store16_nan(to);
        store16_nan(to + 64);
        return;
    }
    const float g = pow2_scale_of(amax, E2M1_MAX * UE4M3_MAX);
    const bf16 *from = token_of(x, head, row % x.tokens) + d;
    float pair[2 * QK_BLOCK], m[2 * QK_BLOCK];
    load16(from, pair);
    load16(from + 64, pair + QK_BLOCK);
    const float pair_amax = magnitudes<2 * QK_BLOCK>(pair, g, m);
    const uint8_t code =
        nvfp4_folded_code(pair_amax, [&m](float scale) { return squared_gain<2 * QK_BLOCK>(m, scale); });
    nvfp4_apply<2 * QK_BLOCK>(pair, g, code);
    store16(pair, to);
    store16(pair + QK_BLOCK, to + 64);
}

/* E4M3(m x) / m in place, m from the head's amax: nvfp4_e4m3. */
static __global__ void lower_kernel(bf16 *y, int64_t n, int64_t head_size, const head_facts *facts)
{
    const int64_t i = ((int64_t)blockIdx.x * THREADS + threadIdx.x) * 8;
    if (i >= n) {
        return;
    }
    const float m = pow2_scale_of(__uint_as_float(facts[i / head_size].amax), E4M3_MAX), inverse = __fdiv_rn(1.0f, m);
    float x[8];
    bf16x8_unpack(bf16x8_load(y + i), x);
#pragma unroll
    for (int j = 0; j < 8; j++) {
        x[j] = __fmul_rn(e4m3_round(__fmul_rn(x[j], m)), inverse);
    }
    bf16x8_store(y + i, bf16x8_pack(x));
}

void attention_scores_cuda(const struct cuda *on, const struct attention_recipe *recipe, const struct head_tensor *x,
                           const struct head_facts *facts, struct head_facts *decoded, bf16 *y)
{
    const int64_t heads = x->batch * x->heads, rows = heads * x->tokens, size = x->tokens * x->head_dim;
    if (rows == 0) {
        return;
    }
    const unsigned int blocks = cuda_blocks(rows * (x->head_dim / QK_BLOCK), THREADS);
    if (recipe->qk_scale == QK_SCALE_FOLDED) {
        scores_folded_kernel<<<cuda_blocks(rows * 4, THREADS), THREADS, 0, on->stream>>>(*x, facts, y);
    } else if (recipe->qk_scale == QK_SCALE_MSE) {
        scores_kernel<true><<<blocks, THREADS, 0, on->stream>>>(*x, facts, y);
    } else {
        scores_kernel<false><<<blocks, THREADS, 0, on->stream>>>(*x, facts, y);
    }
    cuda_launched(on, "attention scores");
    if (recipe->qk == QK_NVFP4_E4M3) {
        struct head_tensor own = *x;
        own.view = {y, x->heads * size, x->head_dim, size};
        attention_measure_cuda(on, &own, decoded);
        lower_kernel<<<cuda_blocks(heads * size, 8 * THREADS), THREADS, 0, on->stream>>>(y, heads * size, size,
                                                                                         decoded);
        cuda_launched(on, "attention scores in E4M3");
    }
}

/* ---- V ---------------------------------------------------------------------------------------------------- */

/* A thread 8 features of one token. */
static __global__ void value_e4m3_kernel(head_tensor x, const head_facts *facts, float unit, bf16 *y, bool hide)
{
    const int64_t i = ((int64_t)blockIdx.x * THREADS + threadIdx.x) * 8, size = x.tokens * x.head_dim;
    if (i >= x.batch * x.heads * size) {
        return;
    }
    const int64_t head = i / size, at = i % size;
    const float amax = __uint_as_float(facts[head].amax);
    const float m = value_lift(amax), inverse = __fdiv_rn(1.0f, m);
    float v[8];
    bf16x8_unpack(bf16x8_load(token_of(x, head, at / x.head_dim) + at % x.head_dim), v);
#pragma unroll
    for (int j = 0; j < 8; j++) {
        v[j] = value_e4m3(v[j], m, inverse, unit);
        v[j] = hide && !(amax < FLOAT_INFINITY) ? __uint_as_float(FLOAT_NAN) : v[j];
    }
    bf16x8_store(y + i, bf16x8_pack(v));
}

static void value_e4m3(const struct cuda *on, const struct head_tensor *x, const struct head_facts *facts, float unit,
                       bf16 *y, bool hide)
{
    const int64_t n = x->batch * x->heads * x->tokens * x->head_dim;
    if (n > 0) {
        value_e4m3_kernel<<<cuda_blocks(n, 8 * THREADS), THREADS, 0, on->stream>>>(*x, facts, unit, y, hide);
        cuda_launched(on, "attention values in E4M3");
    }
}

void attention_value_e4m3_cuda(const struct cuda *on, const struct head_tensor *x, const struct head_facts *facts,
                               float unit, bf16 *y)
{
    value_e4m3(on, x, facts, unit, y, false);
}

template <int N> __device__ __forceinline__ void ue5m3_column(float *x, float amax, float g)
{
    const float code = ue5m3_to_float(ue5m3_from_float(__fdiv_rn(__fmul_rn(g, amax), E2M1_MAX)));
    const float s = __fdiv_rn(code, g);
#pragma unroll
    for (int i = 0; i < N; i++) {
        x[i] = s > 0.0f ? __fmul_rn(e2m1_round(__fdiv_rn(x[i], s)), s) : 0.0f;
    }
}

/* Blocks of keys: a thread one feature of one block (32 keys of MXFP4, 16 of the others). Grid (blocks of keys,
 * batch * heads), a thread a feature. Sink keys are E4M3. */
template <enum pv_format PV>
static __global__ void values_kernel(head_tensor x, const head_facts *facts, const head_facts *sinks, int64_t sink_keys,
                                     bool nearest, float unit, bf16 *y)
{
    constexpr int N = PV == PV_MXFP4 ? 32 : 16;
    const int64_t head = blockIdx.y, first = (int64_t)blockIdx.x * N, d = threadIdx.x;
    const int n = (int)min((int64_t)N, x.tokens - first);
    const float amax = __uint_as_float(facts[head].amax);
    const bf16 *from = token_of(x, head, first) + d;
    float v[N], block_amax = 0.0f;
#pragma unroll
    for (int i = 0; i < N; i++) {
        v[i] = i < n ? bf16_value(from[i * x.view.token_stride]) : 0.0f;
        block_amax = fmaxf(block_amax, fabsf(v[i]));
    }
    if (first < sink_keys) {
        const float m = value_lift(__uint_as_float(sinks[head].amax)), inverse = __fdiv_rn(1.0f, m);
#pragma unroll
        for (int i = 0; i < N; i++) {
            v[i] = value_e4m3(v[i], m, inverse, unit);
        }
    } else {
        if (PV == PV_MXFP4) {
            mxfp4_column<N>(v, block_amax, nearest);
        } else if (PV == PV_NVFP4) {
            const float g = pow2_scale_of(amax, E2M1_MAX * UE4M3_MAX);
            nvfp4_apply<N>(v, g, nvfp4_amax_code(__fmul_rn(block_amax, g)));
        } else {
            ue5m3_column<N>(v, block_amax, pow2_scale_of(amax, UE5M3_MAX * E2M1_MAX));
        }
        /* Six times the FP32 neighbour of alpha q / 6 rounds to alpha q, which is exact in BF16. */
#pragma unroll
        for (int i = 0; i < N; i++) {
            v[i] = __fmul_rn(v[i], unit);
        }
    }
    bf16 *to = y + (head * x.tokens + first) * x.head_dim + d;
#pragma unroll
    for (int i = 0; i < N; i++) {
        if (i < n) {
            to[i * x.head_dim] = amax < FLOAT_INFINITY ? bf16_code(v[i]) : (bf16)0x7fff;
        }
    }
}

void attention_values_cuda(const struct cuda *on, const struct attention_recipe *recipe, const struct head_tensor *x,
                           const struct head_facts *facts, const struct head_facts *sinks, bf16 *y)
{
    const float unit = attention_unit(recipe);
    const int64_t heads = x->batch * x->heads, sink_keys = recipe->sink_keys_fp8;
    const bool nearest = recipe->mx_rule == MX_NEAREST;
    if (recipe->pv == PV_FP8) {
        value_e4m3(on, x, facts, unit, y, true);
        return;
    }
    if (heads == 0) {
        return;
    }
    const dim3 grid(cuda_blocks(x->tokens, attention_p_block(recipe->pv)), (unsigned int)heads);
    const unsigned int threads = (unsigned int)x->head_dim;
    if (recipe->pv == PV_MXFP4) {
        values_kernel<PV_MXFP4><<<grid, threads, 0, on->stream>>>(*x, facts, sinks, sink_keys, nearest, unit, y);
    } else if (recipe->pv == PV_NVFP4) {
        values_kernel<PV_NVFP4><<<grid, threads, 0, on->stream>>>(*x, facts, sinks, sink_keys, nearest, unit, y);
    } else {
        values_kernel<PV_FP4_UE5M3><<<grid, threads, 0, on->stream>>>(*x, facts, sinks, sink_keys, nearest, unit, y);
    }
    cuda_launched(on, "attention values");
}
