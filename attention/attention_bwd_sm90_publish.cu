/* attention: operands and statistics of the FP8 backward on Hopper. */
#include "attention/attention_bwd_sm90_facts.cuh"
#include "attention/attention_bwd_sm90_order.h"

/* ---- operands ---------------------------------------------------------------------------------------------- */

/* 8 values to 8 codes. */
static __device__ __forceinline__ uint2 encode(const float *y, bool e5m2)
{
    return e5m2 ? make_uint2(pack_e5m2(y[0], y[1], y[2], y[3]), pack_e5m2(y[4], y[5], y[6], y[7]))
                : make_uint2(pack_e4m3(y[0], y[1], y[2], y[3]), pack_e4m3(y[4], y[5], y[6], y[7]));
}

static __device__ __forceinline__ void decode(uint2 codes, bool e5m2, float *y)
{
    const __nv_fp8_interpretation_t kind = e5m2 ? __NV_E5M2 : __NV_E4M3;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint32_t word = i < 2 ? codes.x : codes.y;
        const __half2_raw h = __nv_cvt_fp8x2_to_halfraw2((__nv_fp8x2_storage_t)(word >> (16 * (i & 1))), kind);
        const float2 f = __half22float2(__half2(h));
        y[2 * i] = f.x;
        y[2 * i + 1] = f.y;
    }
}

/* 8 BF16 values times lift, as E4M3. */
static __device__ __forceinline__ uint2 encode8(uint4 x, float lift)
{
    float y[8];
    bf16x8_unpack({x}, y);
#pragma unroll
    for (int d = 0; d < 8; d++) {
        y[d] *= lift;
    }
    return encode(y, false);
}

static __device__ __forceinline__ uint2 only_if(bool yes, uint2 x)
{
    return make_uint2(yes ? x.x : 0, yes ? x.y : 0);
}

/* Of each 16 rows of a column (attention_bwd_sm90_fp8.cuh). */
enum row_order { NATURAL, PI1, PI2 };

/* Codes of a tile in shared memory, row by row. Padding behind each 16 rows (a chunk of a column) spreads the chunks
 * that lanes read together over the banks: 4 chunks and 8 words of 64 rows, 8 chunks and 4 words of 128. */
template <int ROWS> struct code_tile {
    static constexpr int CHUNKS = ROWS / 16, CHUNK = 16 * BWD_FEATURES + 128 / CHUNKS;
    static constexpr int BYTES = CHUNKS * CHUNK;

    static __device__ __forceinline__ void put(uint8_t *codes, int row, uint2 x)
    {
        const int at = row / 16 * CHUNK + row % 16 * BWD_FEATURES + (threadIdx.x & 15) * 8;
        *reinterpret_cast<uint2 *>(codes + at) = x;
    }

    /* 16 rows of 4 features (word `word` of a row), as 4 columns. */
    template <enum row_order ORDER>
    static __device__ __forceinline__ void columns(const uint8_t *codes, int chunk, int word, uint4 (&y)[4])
    {
        const uint32_t *from = reinterpret_cast<const uint32_t *>(codes + chunk * CHUNK) + word;
        uint32_t w[4][4];
#pragma unroll
        for (int c = 0; c < 4; c++) {
            const int first = (ORDER == NATURAL ? 4 : 2) * c, second = first + (ORDER == PI2 ? 8 : 1);
            const int third = first + (ORDER == NATURAL ? 2 : ORDER == PI2 ? 1 : 8);
            const int last = first + (ORDER == NATURAL ? 3 : 9);
            const uint32_t a = from[first * (BWD_FEATURES / 4)], b = from[second * (BWD_FEATURES / 4)];
            const uint32_t d = from[third * (BWD_FEATURES / 4)], e = from[last * (BWD_FEATURES / 4)];
            const uint32_t ab = bytes_by(a, b, 0x5140), de = bytes_by(d, e, 0x5140);
            const uint32_t ab_high = bytes_by(a, b, 0x7362), de_high = bytes_by(d, e, 0x7362);
            w[0][c] = bytes_by(ab, de, 0x5410);
            w[1][c] = bytes_by(ab, de, 0x7632);
            w[2][c] = bytes_by(ab_high, de_high, 0x5410);
            w[3][c] = bytes_by(ab_high, de_high, 0x7632);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            y[i] = make_uint4(w[i][0], w[i][1], w[i][2], w[i][3]);
        }
    }
};

typedef code_tile<BWD_QUERIES> query_codes;
typedef code_tile<BWD_KEYS> key_codes;

enum { CODE_BYTES = 2 * query_codes::BYTES > key_codes::BYTES ? 2 * query_codes::BYTES : key_codes::BYTES };

/* 128 rows of x, times lift, as E4M3 in SWIZZLE_128B. ORDER: IN_ORDER or BLOCKED. */
template <enum row_tokens ORDER>
static __device__ __forceinline__ void put_rows(const uint4 (&x)[BWD_KEYS / PUBLISH_ROWS], float lift, int left,
                                                uint8_t *to)
{
#pragma unroll
    for (int i = 0; i < BWD_KEYS / PUBLISH_ROWS; i++) {
        const int row = i * PUBLISH_ROWS + threadIdx.x / 16;
        const int place = ORDER == BLOCKED ? blocked_row(row) : row;
        __stcs(reinterpret_cast<uint2 *>(to + swizzle_128(place, (threadIdx.x & 15) * 8)),
               only_if(row < left, encode8(x[i], lift)));
    }
}

/* The codes of 8 features of dO, times 2^(n - LSE2) where P is rebuilt from codes; r: their share of <O, dO>. */
static __device__ __forceinline__ uint2 encode_dout(const struct bwd8_plan &p, uint4 out, uint4 dout, float fold,
                                                    float lift, float &r)
{
    float x[8], y[8], z[8];
    bf16x8_unpack({out}, x);
    bf16x8_unpack({dout}, y);
#pragma unroll
    for (int d = 0; d < 8; d++) {
        z[d] = y[d] * fold * lift;
    }
    const uint2 codes = encode(z, p.rules.dout_e5m2);
    if (!p.rules.raw_statistic) {
        decode(codes, p.rules.dout_e5m2, y);
    }
    r = 0;
#pragma unroll
    for (int d = 0; d < 8; d++) {
        r = fmaf(x[d], y[d], r);
    }
    return codes;
}

/* Writes the first statistic of a tile's rows, which the kernel subtracts from base-2 scores, and the folds 2^-f. By 64
 * threads. */
static __device__ __forceinline__ void start_rows(const struct bwd8_plan &p, const float *lse, int row, int left,
                                                  float *stats, float *folds)
{
    const float x = row < left ? lse[row] : -INFINITY;
    const float n = p.rules.codes ? floorf(x) : x;
    folds[row] = p.rules.codes && x != -INFINITY ? exp2f(n - x) : 1.0f;
    stats[row] = x == -INFINITY ? INFINITY : n - p.shift;
}

/* Block: one tile of queries of one head. */
template <bool QUERY_ROWS>
static __device__ __forceinline__ void publish_queries(const struct bwd8_plan &p, const struct bwd8_inputs &in,
                                                       int unit, int head, int tile, uint8_t *codes)
{
    __shared__ float folds[BWD_QUERIES];
    const int batch = unit / p.b.kv_heads, first = tile * BWD_QUERIES, T = p.b.tokens, left = T - first;
    const int64_t at = ((int64_t)batch * p.b.heads + head) * p.b.tiles + tile;
    uint8_t *to = p.queries + at * BWD8_QUERIES;
    float *stats = p.b.stats + at * BWD_STATISTICS;
    uint4 q[4], out[4], dout[4];
    load_rows<4>(dout, in.dout, batch, head, first, T, true);
    load_rows<4>(out, in.out, batch, head, first, T, true);
    load_rows<4>(q, in.q, batch, head, first, T, true);
    if (threadIdx.x / BWD_QUERIES == 1) {
        start_rows(p, in.lse + ((int64_t)batch * p.b.heads + head) * T + first, threadIdx.x % BWD_QUERIES, left, stats,
                   folds);
    }
    const struct bwd_lifts l = wait_for_lifts(p, unit);
    float r[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int row = i * PUBLISH_ROWS + threadIdx.x / 16;
        const uint2 dout_codes = only_if(row < left, encode_dout(p, out[i], dout[i], folds[row], l.dout, r[i]));
        query_codes::put(codes, row, dout_codes);
        query_codes::put(codes + query_codes::BYTES, row, only_if(row < left, encode8(q[i], l.q)));
        __stcs(reinterpret_cast<uint2 *>(to + swizzle_128(row, (threadIdx.x & 15) * 8)), dout_codes);
        r[i] *= p.rules.raw_statistic ? folds[row] : 1.0f / l.dout;
    }
    const float sum = sum16(r);
    if ((threadIdx.x & 3) == 0) { /* in units of stored dS */
        const int row = row_of_sum() * PUBLISH_ROWS + threadIdx.x / 16;
        stats[BWD_QUERIES + row] = row < left ? sum * (l.ds * p.ds_factor) : 0.0f;
    }
    __syncthreads();
    const int view = threadIdx.x / 128, word = threadIdx.x / 4 % 32, chunk = threadIdx.x & 3;
    uint4 y[4];
    query_codes::columns<QUERY_ROWS ? PI2 : PI1>(codes + view * query_codes::BYTES, chunk, word, y);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        __stcs(reinterpret_cast<uint4 *>(to + (1 + view) * BWD8_ROW + swizzle_64(4 * word + i, chunk * 16)), y[i]);
    }
}

/* Block: 128 keys of one kv head. */
template <bool QUERY_ROWS>
static __device__ __forceinline__ void publish_keys(const struct bwd8_plan &p, const struct bwd8_inputs &in, int unit,
                                                    int block, uint8_t *codes)
{
    const int batch = unit / p.b.kv_heads, kv = unit % p.b.kv_heads, first = block * BWD_KEYS, T = p.b.tokens;
    const int64_t at = (int64_t)unit * p.b.blocks + block;
    const int left = T - first;
    uint8_t *to = p.keys + at * BWD8_KEYS;
    uint4 x[BWD_KEYS / PUBLISH_ROWS];
    load_rows<BWD_KEYS / PUBLISH_ROWS>(x, in.k, batch, kv, first, T, true);
    const struct bwd_lifts l = wait_for_lifts(p, unit);
#pragma unroll
    for (int i = 0; i < BWD_KEYS / PUBLISH_ROWS; i++) {
        const int row = i * PUBLISH_ROWS + threadIdx.x / 16;
        key_codes::put(codes, row, only_if(row < left, encode8(x[i], l.k)));
    }
    load_rows<BWD_KEYS / PUBLISH_ROWS>(x, in.v, batch, kv, first, T, true);
    put_rows<QUERY_ROWS ? BLOCKED : IN_ORDER>(x, l.v, left, to);
    __syncthreads();
    const int word = threadIdx.x / 8, chunk = threadIdx.x & 7;
    uint4 y[4];
    key_codes::columns<QUERY_ROWS ? NATURAL : PI2>(codes, chunk, word, y);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        __stcs(reinterpret_cast<uint4 *>(to + BWD8_KEYS / 2 + swizzle_128(4 * word + i, chunk * 16)), y[i]);
    }
}

/* ---- kernel ------------------------------------------------------------------------------------------------ */

/* Blocks are numbered as they begin, since CUDA promises no order of blockIdx: so those that a block waits for run. */
static __device__ __forceinline__ int number_of_block(const struct bwd8_plan &p)
{
    __shared__ int number;
    if (threadIdx.x == 0) {
        number = (int)atomicAdd(&p.facts->begun, 1u);
    }
    __syncthreads();
    return number;
}

/* A head is published from its end backwards: its last tokens are still in the L2 cache. */
template <bool QUERY_ROWS>
static __global__ void __launch_bounds__(PUBLISH_THREADS, 3)
    publish_kernel(const struct bwd8_plan p, const struct bwd8_inputs in, const struct publish_order o)
{
    __shared__ __align__(16) uint8_t codes[CODE_BYTES];
    const struct publish_place place = publish_place_of(&o, number_of_block(p));
    const int group = p.b.heads / p.b.kv_heads, n = o.others - 1 - place.publishes;
    if (place.measures >= 0) {
        measure(p, in, place.measures / o.each, place.measures % o.each);
    } else if (place.publishes < 0) {
        return;
    } else if (n < group * p.b.tiles) {
        publish_queries<QUERY_ROWS>(p, in, place.unit, place.unit % p.b.kv_heads * group + n % group, n / group, codes);
    } else {
        publish_keys<QUERY_ROWS>(p, in, place.unit, n - group * p.b.tiles, codes);
    }
}

void bwd8_publish(const struct cuda *on, const struct bwd8_plan &p, const struct bwd8_inputs &in)
{
    const struct publish_order o =
        publish_order_of(p.b.units, fact_blocks(p.b.tokens), p.b.heads / p.b.kv_heads * p.b.tiles + p.b.blocks);
    cudaMemsetAsync(p.facts, 0, (size_t)p.b.units * sizeof *p.facts, on->stream);
    const auto kernel = p.rules.query_rows ? publish_kernel<true> : publish_kernel<false>;
    kernel<<<publish_blocks(&o), PUBLISH_THREADS, 0, on->stream>>>(p, in, o);
    cuda_launched(on, "attention backward, operands");
}
