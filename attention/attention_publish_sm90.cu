/* attention: operands of the Hopper forward: largest magnitudes, then every view in one pass over Q, K and V.
 *
 * A block has 128 tokens of one head. Neighbouring blocks have neighbouring heads, so that rows of a fused projection
 * are read whole. A warp has 16 tokens; a thread loads 8 features of 8 of them before it does anything else.
 *
 * Q and K. NVFP4 blocks are 16 features: two lanes trade halves of two rows, so that each has a block, and trade back
 * to store 16 bytes beside 16 bytes.
 *
 * qk = nvfp4_e4m3 rounds the decoded values once more, with a multiplier from the largest of them. With qk_scale = amax
 * that one is the decoded amax itself, hence known before: the largest decoded value of a block, 6 s or 4 s with s its
 * scale, never decreases with its amax. With the other rules a second pass follows (attention_publish_rows_sm90.cu). */
#include "attention/attention_publish_sm90.cuh"

enum {
    THREADS = 256,
    TOKENS = 128,                       /* of a block */
    ROWS = TOKENS / (THREADS / 32) / 2, /* of a thread: half a warp has a row */
    WORDS = TOKENS / 4,                 /* of a feature in the column view: four tokens each */
};

struct value_operand_sm90 {
    head_view from;
    bf16 *to;
    uint8_t *column;
    float *inverse;
    float unit;
    bool fp8, nearest;
};

struct publish_plan {
    const float *amax;       /* (B, H + 2 Hkv) */
    score_operand scores[2]; /* Q, K */
    value_operand_sm90 v;
    int64_t tokens, padded;
    int values; /* heads of V among those published: Hkv or none */
};

/* What one block works on. */
struct publish_tile {
    int head, batch, token; /* head within its tensor; first token of the warp */
    float amax;
    bool first; /* of its head */
};

__device__ __forceinline__ const bf16 *row_of(const head_view &x, const publish_tile &t, int64_t token)
{
    return x.data + t.batch * x.batch_stride + t.head * x.head_stride + token * x.token_stride;
}

/* ---- Q and K ----------------------------------------------------------------------------------------------- */

/* Even lanes have 8 features of two rows, odd lanes the next 8: then even lanes have 16 features of the first row, odd
 * lanes of the second. */
__device__ __forceinline__ void trade(const uint4 &first, const uint4 &second, bool odd, uint32_t (&x)[8])
{
    const uint32_t a[4] = {first.x, first.y, first.z, first.w}, b[4] = {second.x, second.y, second.z, second.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint32_t got = __shfl_xor_sync(0xffffffffu, odd ? a[i] : b[i], 1);
        x[i] = odd ? got : a[i];
        x[4 + i] = odd ? b[i] : got;
    }
}

__device__ __forceinline__ void trade_back(const uint32_t (&x)[8], bool odd, uint4 &first, uint4 &second)
{
    uint32_t a[4], b[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint32_t got = __shfl_xor_sync(0xffffffffu, odd ? x[i] : x[4 + i], 1);
        a[i] = odd ? got : x[i];
        b[i] = odd ? x[4 + i] : got;
    }
    first = make_uint4(a[0], a[1], a[2], a[3]);
    second = make_uint4(b[0], b[1], b[2], b[3]);
}

/* Rows of a warp: thread and turn i have row 2 i + half, so two turns make a trade. */
template <enum qk_scale RULE, bool E4M3>
__device__ __forceinline__ void publish_scores(const score_operand &o, const publish_tile &t, int64_t tokens)
{
    const int lane = threadIdx.x % 32, half = lane / 16, d = lane % 16 * 8;
    const bool odd = lane % 2 == 1;
    const int64_t unit = t.batch * o.heads + t.head;
    uint4 raw[ROWS];
    const bf16 *from = row_of(o.from, t, t.token + half) + d;
    const int rows = (int)(tokens - t.token) - half; /* row 2 i exists if below */
#pragma unroll
    for (int i = 0; i < ROWS; i++, from += 2 * o.from.token_stride) {
        raw[i] = load_words(from, 2 * i < rows);
    }
    const score_head h = score_head_of<E4M3>(t.amax);
    if (E4M3 && t.first && threadIdx.x == 0) {
        o.inverse[unit] = h.back;
    }
    uint32_t largest = 0;
    const int64_t row = unit * tokens + t.token + half;
    bf16 *to = o.to + row * FEATURES + d;
    uint8_t *codes_to = o.rows + (row + (odd ? 2 : 0)) * FEATURES + d / 16 * 16;
#pragma unroll
    for (int i = 0; i < ROWS; i += 2) {
        uint32_t x[8];
        trade(raw[i], raw[i + 1], odd, x);
        const uint4 codes = publish_block<RULE, E4M3>(x, h);
        if (E4M3) {
            if (2 * i + (odd ? 2 : 0) < rows) {
                store_words(codes_to + 2 * i * FEATURES, codes);
            }
        } else if (o.decoded != NULL) {
            largest = __vmaxu2(largest, largest_pair<8>(x));
        }
        if (E4M3 && o.to == NULL) {
            continue;
        }
        uint4 a, b;
        trade_back(x, odd, a, b);
        if (2 * i < rows) {
            store_words(to + 2 * i * FEATURES, a);
        }
        if (2 * i + 2 < rows) {
            store_words(to + (2 * i + 2) * FEATURES, b);
        }
    }
    if (!E4M3 && o.decoded != NULL) {
        largest = __reduce_max_sync(0xffffffffu, larger_bits(largest));
        if (lane == 0) {
            atomicMax(&o.decoded[unit].amax, largest);
        }
    }
}

/* ---- V ----------------------------------------------------------------------------------------------------- */

struct value_shared {
    uint32_t words[FEATURES][WORDS + 1];
    uint4 largest[THREADS / 32][FEATURES / 8];
};

/* Row i of a thread within its warp's 16: words of the column view are rows 2 c, 2 c + 1, 8 + 2 c, 9 + 2 c; a thread
 * has c = half and c = half + 2. */
__device__ __forceinline__ int value_row(int i, int half)
{
    return 2 * half + i % 2 + i / 2 % 2 * 8 + i / 4 * 4;
}

/* Spreads the words that lanes write at a time over the banks. */
__device__ __forceinline__ int value_word(int d, int word)
{
    return word ^ (d / 32 * 2);
}

/* Largest magnitudes of 32 tokens, two warps, for the thread's 8 features, as pairs of BF16. With a __syncthreads. */
__device__ __forceinline__ uint4 value_largest(const uint4 (&raw)[ROWS], value_shared &s)
{
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    uint32_t largest[4];
#pragma unroll
    for (int w = 0; w < 4; w++) {
        uint32_t column[ROWS];
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            const uint32_t words[4] = {raw[i].x, raw[i].y, raw[i].z, raw[i].w};
            column[i] = words[w];
        }
        largest[w] = largest_pair<ROWS>(column);
        largest[w] = __vmaxu2(largest[w], __shfl_xor_sync(0xffffffffu, largest[w], 16));
    }
    if (lane < 16) {
        s.largest[warp][lane] = make_uint4(largest[0], largest[1], largest[2], largest[3]);
    }
    __syncthreads();
    const uint4 other = s.largest[warp ^ 1][lane % 16];
    return make_uint4(__vmaxu2(largest[0], other.x), __vmaxu2(largest[1], other.y), __vmaxu2(largest[2], other.z),
                      __vmaxu2(largest[3], other.w));
}

/* Quantises a pair of features of the thread's rows; codes: words of four rows, two for each feature. */
struct value_pair {
    uint32_t rows[ROWS];
    uint32_t codes[2][ROWS / 4];
};

__device__ __forceinline__ void value_fp8(value_pair &p, float m, float back)
{
#pragma unroll
    for (int k = 0; k < ROWS / 4; k++) {
        uint32_t *x = p.rows + 4 * k;
        p.codes[0][k] = pack_e4m3(low_value(x[0]) * m, low_value(x[1]) * m, low_value(x[2]) * m, low_value(x[3]) * m);
        p.codes[1][k] =
            pack_e4m3(high_value(x[0]) * m, high_value(x[1]) * m, high_value(x[2]) * m, high_value(x[3]) * m);
        const uint2 low = decoded_bf16(p.codes[0][k], back), high = decoded_bf16(p.codes[1][k], back);
        x[0] = __byte_perm(low.x, high.x, 0x5410);
        x[1] = __byte_perm(low.x, high.x, 0x7632);
        x[2] = __byte_perm(low.y, high.y, 0x5410);
        x[3] = __byte_perm(low.y, high.y, 0x7632);
    }
}

/* largest: of the block of 32, both features. */
__device__ __forceinline__ void value_mxfp4(value_pair &p, uint32_t largest, bool nearest, float unit, float m)
{
    float low[ROWS], high[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        low[i] = low_value(p.rows[i]);
        high[i] = high_value(p.rows[i]);
    }
    mxfp4_column<ROWS>(low, low_value(largest), nearest);
    mxfp4_column<ROWS>(high, high_value(largest), nearest);
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        /* Six times the FP32 neighbour of alpha q / 6 rounds to alpha q, which is exact in BF16. */
        p.rows[i] = pack_bf16(__fmul_rn(low[i], unit), __fmul_rn(high[i], unit));
    }
#pragma unroll
    for (int k = 0; k < ROWS / 4; k++) {
        const uint32_t *x = p.rows + 4 * k;
        p.codes[0][k] = pack_e4m3(low_value(x[0]) * m, low_value(x[1]) * m, low_value(x[2]) * m, low_value(x[3]) * m);
        p.codes[1][k] =
            pack_e4m3(high_value(x[0]) * m, high_value(x[1]) * m, high_value(x[2]) * m, high_value(x[3]) * m);
    }
}

/* All 128 tokens of the block, those behind T as zeros; for MXFP4 the words transposed (attention_sm90.h). */
__device__ __forceinline__ void store_column(const value_operand_sm90 &o, int64_t unit, int64_t padded,
                                             const value_shared &s)
{
    uint8_t *to = o.column + unit * FEATURES * padded + (int64_t)blockIdx.y * TOKENS;
#pragma unroll
    for (int i = threadIdx.x; i < FEATURES * TOKENS / 16; i += THREADS) {
        /* Neighbouring features, or features 8 apart: so that a warp's reads fall into 32 banks. */
        const int d = o.fp8 ? i / 8 : i / 256 * 32 + i / 8 % 4 * 8 + i / 32 % 8;
        const int quad = i % 8, first = o.fp8 ? quad * 4 : quad, step = o.fp8 ? 1 : 8;
        const uint32_t *x = s.words[d];
        store_words(to + d * padded + quad * 16,
                    make_uint4(x[value_word(d, first)], x[value_word(d, first + step)],
                               x[value_word(d, first + 2 * step)], x[value_word(d, first + 3 * step)]));
    }
}

__device__ __forceinline__ void publish_values(const value_operand_sm90 &o, const publish_tile &t, int64_t tokens,
                                               int64_t padded, int64_t heads, value_shared &s)
{
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, half = lane / 16, d = lane % 16 * 8;
    const int64_t unit = t.batch * heads + t.head;
    const bool broken = !(t.amax < FLOAT_INFINITY);
    uint4 raw[ROWS];
    const bf16 *from = row_of(o.from, t, t.token) + d;
    const int rows = (int)(tokens - t.token);
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        const int row = value_row(i, half);
        raw[i] = load_words(from + row * o.from.token_stride, row < rows);
        if (broken && row < rows) {
            raw[i] = make_uint4(BF16_NAN, BF16_NAN, BF16_NAN, BF16_NAN);
        }
    }
    const int k = multiplier_exponent(o.fp8 ? MULTIPLIER_FP8 : o.nearest ? MULTIPLIER_NEAREST : MULTIPLIER_OCP, t.amax);
    const float m = power_of_two(k), back = power_of_two(-k);
    if (t.first && threadIdx.x == 0) {
        o.inverse[unit] = back / o.unit;
    }
    const uint4 blocks = o.fp8 ? make_uint4(0, 0, 0, 0) : value_largest(raw, s);
    const uint32_t largest[4] = {blocks.x, blocks.y, blocks.z, blocks.w};
#pragma unroll
    for (int w = 0; w < 4; w++) {
        value_pair p;
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            p.rows[i] = w == 0 ? raw[i].x : w == 1 ? raw[i].y : w == 2 ? raw[i].z : raw[i].w;
        }
        if (o.fp8 || broken) {
            value_fp8(p, m, back);
        } else {
            value_mxfp4(p, largest[w], o.nearest, o.unit, m);
        }
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            (w == 0 ? raw[i].x : w == 1 ? raw[i].y : w == 2 ? raw[i].z : raw[i].w) = p.rows[i];
        }
#pragma unroll
        for (int c = 0; c < ROWS / 4; c++) {
            const int word = warp * 4 + half + 2 * c;
            s.words[d + 2 * w][value_word(d, word)] = p.codes[0][c];
            s.words[d + 2 * w + 1][value_word(d, word)] = p.codes[1][c];
        }
    }
    bf16 *to = o.to + (unit * tokens + t.token) * FEATURES + d;
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        const int row = value_row(i, half);
        if (row < rows) {
            store_words(to + row * FEATURES, raw[i]);
        }
    }
    __syncthreads();
    store_column(o, unit, padded, s);
}

/* ---- kernels ----------------------------------------------------------------------------------------------- */

/* Grid (heads of V, Q and K that are published, blocks of 128 tokens, batch): those of V take longest and come first.
 * kind: 0 Q, 1 K, 2 V. slot: where the head's magnitude is. */
__device__ __forceinline__ publish_tile tile_of(const publish_plan &p, int &slot, int &kind)
{
    const int heads = (int)p.scores[0].heads, kv_heads = (int)p.scores[1].heads, x = (int)blockIdx.x - p.values;
    publish_tile t = {};
    kind = x < 0 ? 2 : x < heads ? 0 : 1;
    t.head = kind == 2 ? (int)blockIdx.x : kind == 0 ? x : x - heads;
    t.batch = (int)blockIdx.z;
    t.token = (int)blockIdx.y * TOKENS + (int)threadIdx.x / 32 * (2 * ROWS);
    t.first = blockIdx.y == 0;
    slot = t.batch * (heads + 2 * kv_heads) + (kind == 2 ? heads + kv_heads + t.head : x);
    return t;
}

template <enum qk_scale RULE, bool E4M3>
static __global__ void __launch_bounds__(THREADS, RULE == QK_SCALE_AMAX ? 3 : 2) publish_kernel(const publish_plan p)
{
    __shared__ value_shared shared;
    int slot, kind;
    publish_tile t = tile_of(p, slot, kind);
    t.amax = p.amax[slot];
    if (kind < 2) {
        publish_scores<RULE, E4M3>(p.scores[kind], t, p.tokens);
    } else {
        publish_values(p.v, t, p.tokens, p.padded, p.scores[1].heads, shared);
    }
}

static __global__ void __launch_bounds__(THREADS) measure_kernel(const publish_plan p, uint32_t *amax)
{
    const int lane = threadIdx.x % 32;
    int slot, kind;
    const publish_tile t = tile_of(p, slot, kind);
    const head_view &view = kind == 2 ? p.v.from : p.scores[kind].from;
    const bf16 *from = row_of(view, t, t.token + lane / 16) + lane % 16 * 8;
    const int rows = (int)(p.tokens - t.token) - lane / 16;
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < ROWS; i++, from += 2 * view.token_stride) {
        const uint4 x = load_words(from, 2 * i < rows);
        const uint32_t words[4] = {x.x, x.y, x.z, x.w};
        largest = __vmaxu2(largest, largest_pair<4>(words));
    }
    largest = __reduce_max_sync(0xffffffffu, larger_bits(largest));
    if (lane == 0) {
        atomicMax(amax + slot, largest);
    }
}

/* ---- host -------------------------------------------------------------------------------------------------- */

static publish_plan plan_of(const struct attention_publish_sm90 *a)
{
    const struct attention_shape *s = &a->shape;
    const struct attention_recipe *recipe = a->recipe;
    publish_plan p = {};
    p.amax = a->amax;
    p.scores[0] = score_operand_q(a);
    p.scores[1] = score_operand_k(a);
    p.v = {a->v,
           a->own_v,
           a->v_column,
           a->v_inverse,
           attention_unit(recipe),
           recipe->pv == PV_FP8,
           recipe->mx_rule == MX_NEAREST};
    p.tokens = s->tokens;
    p.padded = attention_padded_sm90(s->tokens);
    p.values = recipe->pv == PV_BF16 ? 0 : (int)s->kv_heads;
    return p;
}

static dim3 grid_of(const struct attention_publish_sm90 *a)
{
    const struct attention_shape *s = &a->shape;
    const int64_t scores = a->recipe->qk == QK_BF16 ? 0 : s->heads + s->kv_heads;
    const int64_t values = a->recipe->pv == PV_BF16 ? 0 : s->kv_heads;
    return dim3((unsigned int)(scores + values), cuda_blocks(s->tokens, TOKENS), (unsigned int)s->batch);
}

static bool empty(const dim3 &grid)
{
    return grid.x == 0 || grid.y == 0 || grid.z == 0;
}

void attention_measure_heads_sm90(const struct cuda *on, const struct attention_publish_sm90 *a, float *amax)
{
    const dim3 grid = grid_of(a);
    if (empty(grid)) {
        return;
    }
    cuda_zero(on, amax, (size_t)(a->shape.batch * (a->shape.heads + 2 * a->shape.kv_heads)) * sizeof *amax);
    measure_kernel<<<grid, THREADS, 0, on->stream>>>(plan_of(a), reinterpret_cast<uint32_t *>(amax));
    cuda_launched(on, "attention measure heads");
}

void attention_publish_heads_sm90(const struct cuda *on, const struct attention_publish_sm90 *a)
{
    const dim3 grid = grid_of(a);
    const enum qk_scale rule = a->recipe->qk_scale;
    const bool e4m3 = a->recipe->qk == QK_NVFP4_E4M3;
    publish_plan p = plan_of(a);
    if (empty(grid)) {
        return;
    }
    if (e4m3 && rule != QK_SCALE_AMAX) {
        const int64_t q_heads = a->shape.batch * a->shape.heads, kv_heads = a->shape.batch * a->shape.kv_heads;
        p.scores[0].decoded = a->decoded;
        p.scores[1].decoded = a->decoded + q_heads;
        cuda_zero(on, a->decoded, (size_t)(q_heads + kv_heads) * sizeof *a->decoded);
    }
    if (rule == QK_SCALE_FOLDED) {
        publish_kernel<QK_SCALE_FOLDED, false><<<grid, THREADS, 0, on->stream>>>(p);
    } else if (rule == QK_SCALE_MSE) {
        publish_kernel<QK_SCALE_MSE, false><<<grid, THREADS, 0, on->stream>>>(p);
    } else if (e4m3) {
        publish_kernel<QK_SCALE_AMAX, true><<<grid, THREADS, 0, on->stream>>>(p);
    } else {
        publish_kernel<QK_SCALE_AMAX, false><<<grid, THREADS, 0, on->stream>>>(p);
    }
    cuda_launched(on, "attention publish");
    if (p.scores[0].decoded != NULL) {
        publish_lower_rows(on, &a->shape, p.scores[0]);
        publish_lower_rows(on, &a->shape, p.scores[1]);
    }
}
