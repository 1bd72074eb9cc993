/* attention: the forward of the variant "cuda" (docs/numerics.md, section 5).
 *
 * A block of 8 warps owns 128 query rows of one head, a warp 16 of them; tiles of 64 keys go through two stages of
 * shared memory. Inside a tile a warp takes 32 keys at a time, the block of MXFP4: scores, anchor, P, O += P V, all in
 * registers (S 16, O D/2 a thread), so that two blocks fit a multiprocessor and one computes while the other waits.
 * What is rare lies off the straight path: moving an anchor, masks, the V of diagonal blocks (read from global). */
#include "attention/attention_mma.cuh"
#include "attention/probability_cuda.cuh"

#include <math.h>

enum { WARPS = 8, THREADS = 32 * WARPS, ROWS = 16 * WARPS, KEYS = 64, STEP = ATTENTION_BLOCK, STAGES = 2 };

/* Values of `p` a kernel is made for: the formats, and unrounded P (O' of bwd_stat = exact). */
enum { P_UNROUNDED = PV_FP4_UE5M3 + 1 };

/* Rows of heads: element (b, h, t, d) at b batch + h head + t token + d. */
struct operand {
    const bf16 *data;
    int64_t batch, head, token;
};

struct fwd_call {
    struct operand q, k, v, diag; /* diag.data NULL: none */
    struct head_view out;
    float *lse, *lse_exact, *anchor; /* (B, H, T); the last two NULL: not wanted */
    struct attention_stats *parts;   /* one a block; NULL: not wanted */
    int heads, group, tokens, row_blocks;
    int head_dim, p_block; /* p_block: keys that share a scale */
    bool causal;
    float c, v_unit;
    struct p_rule rule;
};

/* What a thread carries for its two rows, g and g + 8 of the warp's 16. */
struct row_state {
    float anchor[2], sum[2], magnitude[2]; /* sum and what follows: the lane's part */
    float sum_exact[2], lost[2];
};

__device__ __forceinline__ const bf16 *operand_head(const operand &x, int64_t batch, int64_t head)
{
    return x.data + batch * x.batch + head * x.head;
}

/* max that keeps NaN */
__device__ __forceinline__ float max_nan(float x, float y)
{
    float m;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(m) : "f"(x), "f"(y));
    return m;
}

/* `rows` rows of a head into a tile of width W >= D; row i is token row_of(i), negative: zeros. */
template <int W, class ROW>
__device__ __forceinline__ void load_rows(uint32_t tile, int rows, const bf16 *x, int64_t stride, int head_dim,
                                          ROW row_of)
{
    constexpr int CHUNKS = W / 8;
    for (int at = (int)threadIdx.x; at < rows * CHUNKS; at += THREADS) {
        const int row = at / CHUNKS, column = at % CHUNKS * 8;
        const int token = row_of(row);
        const bool valid = token >= 0 && column < head_dim;
        copy16_async(tile_chunk<W>(tile, row, column), x + (valid ? token * stride + column : 0), valid);
    }
}

/* Base-2 scores of the warp's 16 rows against 32 keys of a tile: s[r][8 values], r = 0: row g, 1: row g + 8. */
template <int W>
__device__ __forceinline__ void block_scores(uint32_t q, int row0, uint32_t keys, int key0, float c, float (&t)[2][8])
{
    float s[4][4] = {};
#pragma unroll
    for (int k = 0; k < W; k += 16) {
        uint32_t a[4], b[4];
        fragment_a<W>(a, q, row0, k);
#pragma unroll
        for (int n = 0; n < 2; n++) {
            fragment_b<W>(b, keys, key0 + 16 * n, k);
            mma_bf16(s[2 * n], a, b);
            mma_bf16(s[2 * n + 1], a, b + 2);
        }
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            t[r][i] = __fmul_rn(c, s[i / 2][2 * r + i % 2]);
        }
    }
}

/* The online step of one row: true if its anchor moved, `factor` then rescales what was added up (exactly). */
__device__ __forceinline__ bool move_anchor(const p_rule &rule, float max, float *anchor, float *factor)
{
    *factor = 1.0f;
    const float next = ceilf(max);
    if (rule.anchor != ANCHOR_ROW || !(next > *anchor)) {
        return false;
    }
    *factor = *anchor == -INFINITY ? 0.0f : p_pow2(*anchor - next);
    *anchor = next;
    return true;
}

template <int W> __device__ __forceinline__ void rescale(float (&o)[W / 8][4], row_state &row, const float *factor)
{
#pragma unroll
    for (int r = 0; r < 2; r++) {
        row.sum[r] *= factor[r];
        row.sum_exact[r] *= factor[r];
        row.lost[r] *= factor[r];
#pragma unroll
        for (int n = 0; n < W / 8; n++) {
            o[n][2 * r] *= factor[r];
            o[n][2 * r + 1] *= factor[r];
        }
    }
}

/* Scores of one row become P. */
template <int P>
__device__ __forceinline__ void publish_row(const fwd_call &f, row_state &row, int r, int key0, const p_max &max,
                                            float *t)
{
    constexpr enum pv_format PV = P == P_UNROUNDED ? PV_BF16 : (enum pv_format)P;
    const float anchor = row.anchor[r];
    if (P == P_UNROUNDED) {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            t[i] = p_exp2(t[i], -anchor);
            row.sum[r] += t[i];
        }
        return;
    }
    float exact[8];
    const bool wanted = f.lse_exact != NULL || (PV != PV_BF16 && f.parts != NULL);
    if (wanted) {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            exact[i] = p_exp2(t[i], -anchor);
        }
    }
    row.sum[r] += p_block_publish<PV, keys_in_quad>(f.rule, anchor, anchor, key0, max, t);
    if (wanted) {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            row.sum_exact[r] += exact[i];
            row.lost[r] += t[i] == 0.0f ? exact[i] : 0.0f;
        }
    }
}

/* V of a diagonal block as the B operand, from global memory: 16 keys from `key` on, features n0 .. n0 + 7. */
__device__ __forceinline__ void fragment_diag(uint32_t *b, const fwd_call &f, const bf16 *v, int key, int n0)
{
    const int lane = threadIdx.x & 31, n = n0 + lane / 4;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int at = key + 8 * half + 2 * (lane % 4);
        const bool inside = n < f.head_dim;
        const uint32_t low = inside && at < f.tokens ? v[at * f.diag.token + n] : 0u;
        const uint32_t high = inside && at + 1 < f.tokens ? v[(at + 1) * f.diag.token + n] : 0u;
        b[half] = low | high << 16;
    }
}

/* O += P V for 16 keys; a: P. */
template <int W>
__device__ __forceinline__ void multiply_diag(const fwd_call &f, const bf16 *v, int key, const uint32_t *a,
                                              float (&o)[W / 8][4])
{
#pragma unroll
    for (int n = 0; n < W / 8; n++) {
        uint32_t b[2];
        fragment_diag(b, f, v, key, 8 * n);
        mma_bf16(o[n], a, b);
    }
}

template <int W>
__device__ __forceinline__ void multiply(uint32_t values, int key, const uint32_t *a, float (&o)[W / 8][4])
{
#pragma unroll
    for (int n = 0; n < W / 16; n++) {
        uint32_t b[4];
        fragment_b_trans<W>(b, values, 16 * n, key);
        mma_bf16(o[2 * n], a, b);
        mma_bf16(o[2 * n + 1], a, b + 2);
    }
}

/* Everything about one block of 32 keys for one warp. */
struct step {
    int key0, row0, row; /* first key; first row of the warp; row g of this thread */
    uint32_t values;     /* the tile of V */
    int tile_key;        /* first key within the tile */
    const bf16 *diag;    /* V in E4M3 of this head; NULL: none */
};

template <int W, int P>
__device__ __forceinline__ void block_step(const fwd_call &f, const step &at, row_state &row, float (&t)[2][8],
                                           float (&o)[W / 8][4])
{
    constexpr enum pv_format PV = P == P_UNROUNDED ? PV_BF16 : (enum pv_format)P;
    const int last = at.key0 + STEP - 1;
    const bool masked = last >= f.tokens || (f.causal && last > at.row0);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int end = f.causal ? min(at.row + 8 * r + 1, f.tokens) : f.tokens;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const bool visible = !masked || at.key0 + keys_in_quad::key(i) < end;
            row.magnitude[r] = max_nan(row.magnitude[r], visible ? fabsf(t[r][i]) : 0.0f);
            t[r][i] = visible ? t[r][i] : ATTENTION_MASKED;
        }
    }
    const p_max max[2] = {p_block_max<PV, keys_in_quad>(t[0]), p_block_max<PV, keys_in_quad>(t[1])};
    float factor[2];
    const bool moved0 = move_anchor(f.rule, max[0].all, &row.anchor[0], &factor[0]);
    const bool moved1 = move_anchor(f.rule, max[1].all, &row.anchor[1], &factor[1]);
    if (__any_sync(0xffffffffu, moved0 || moved1)) {
        rescale<W>(o, row, factor);
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        publish_row<P>(f, row, r, at.key0, max[r], t[r]);
    }
#pragma unroll
    for (int u = 0; u < 2; u++) { /* 16 keys each */
        float *x = &t[0][4 * u], *y = &t[1][4 * u];
        const uint32_t a[4] = {bf16_pair(x[0], x[1]), bf16_pair(y[0], y[1]), bf16_pair(x[2], x[3]),
                               bf16_pair(y[2], y[3])};
        const int key = at.key0 + 16 * u;
        const bool own = at.diag != NULL && key / f.p_block == at.row0 / f.p_block;
        for (int part = 0; part < (P == P_UNROUNDED ? 2 : 1); part++) {
            uint32_t b[4];
#pragma unroll
            for (int i = 0; i < 4; i++) { /* part 1: what the rounding of part 0 left */
                const float *z = i % 2 == 0 ? x : y;
                const float low = z[i & 2] - __uint_as_float(a[i] << 16);
                const float high = z[(i & 2) + 1] - __uint_as_float(a[i] & 0xffff0000u);
                b[i] = part == 0 ? a[i] : bf16_pair(low, high);
            }
            if (own) {
                multiply_diag<W>(f, at.diag, key, b, o);
            } else {
                multiply<W>(at.values, at.tile_key + 16 * u, b, o);
            }
        }
    }
}

/* anchor = sampled: from the scores of up to 128 keys, gathered into the first stage. */
template <int W>
__device__ void sampled_anchor(const fwd_call &f, uint32_t q, int warp_row, uint32_t keys, const bf16 *k, int row,
                               row_state &state)
{
    const int samples = min((int)ATTENTION_SAMPLES, f.tokens);
    const auto sample = [&](int s) { return (int)((int64_t)s * f.tokens / samples); };
    float max[2] = {-INFINITY, -INFINITY};
    for (int first = 0; first < samples; first += KEYS) {
        __syncthreads();
        load_rows<W>(keys, KEYS, k, f.k.token, f.head_dim,
                     [&](int i) { return first + i < samples ? sample(first + i) : -1; });
        copies_commit();
        copies_wait<0>();
        __syncthreads();
        for (int key = 0; key < KEYS; key += STEP) {
            float t[2][8];
            block_scores<W>(q, warp_row, keys, key, f.c, t);
#pragma unroll
            for (int i = 0; i < 16; i++) {
                const int s = first + key + keys_in_quad::key(i % 8);
                const int end = f.causal ? row + 8 * (i / 8) + 1 : f.tokens;
                if (s < samples && sample(s) < end) {
                    max[i / 8] = max_nan(max[i / 8], t[i / 8][i % 8]);
                }
            }
        }
    }
    __syncthreads();
    state.anchor[0] = p_anchor_of(f.rule, keys_in_quad::max(max[0]));
    state.anchor[1] = p_anchor_of(f.rule, keys_in_quad::max(max[1]));
}

/* ---- the end of a row ------------------------------------------------------------------------------------- */

/* What a block saw, from what each row saw: room[row] in shared memory, added by one thread in row order. */
struct row_part {
    float magnitude, lost;
    uint32_t rows, non_finite;
};

__device__ __forceinline__ void close_part(const fwd_call &f, const row_part *room, attention_stats *part)
{
    __syncthreads();
    if (threadIdx.x != 0) {
        return;
    }
    struct attention_stats sum = {};
    float magnitude = 0.0f;
    for (int i = 0; i < ROWS; i++) {
        magnitude = max_nan(magnitude, room[i].magnitude);
        sum.p_lost_mass += (double)room[i].lost;
        sum.p_rows += (double)room[i].rows;
        sum.non_finite += (double)room[i].non_finite;
    }
    sum.logit_max = (double)magnitude * 0.693147180559945309417;
    *part = sum;
}

/* O of the warp's 16 rows leaves through the shared memory that held its Q, 16 bytes at a time. Returns the number of
 * non-finite values among those that this lane stored of row i of the warp, in the lane pair that stored it. */
template <int W>
__device__ __forceinline__ void store_rows(const fwd_call &f, bf16 *out, char *tile, uint32_t base, int warp_row,
                                           int row0, const float (&o)[W / 8][4], row_part *room)
{
    const int lane = threadIdx.x & 31;
    __syncwarp();
#pragma unroll
    for (int n = 0; n < W / 8; n++) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const uint32_t at = tile_chunk<W>(base, warp_row + lane / 4 + 8 * r, 8 * n) - base;
            *(uint32_t *)(tile + at + 4 * (lane % 4)) = bf16_pair(o[n][2 * r], o[n][2 * r + 1]);
        }
    }
    __syncwarp();
    const int row = lane / 2; /* two lanes a row */
    uint32_t bad = 0;
    for (int column = lane % 2 * 8; column < f.head_dim; column += 16) {
        const uint32_t at = tile_chunk<W>(base, warp_row + row, column) - base;
        const bf16x8 x = bf16x8_load((const bf16 *)(tile + at));
        if (row0 + row < f.tokens) {
            bf16x8_store(out + (int64_t)(row0 + row) * f.out.token_stride + column, x);
            const uint32_t w[4] = {x.words.x, x.words.y, x.words.z, x.words.w};
            for (int j = 0; j < 4; j++) {
                bad += ((w[j] & 0x7f80u) == 0x7f80u) + ((w[j] & 0x7f800000u) == 0x7f800000u);
            }
        }
    }
    bad += __shfl_xor_sync(0xffffffffu, bad, 1);
    if (room != NULL && lane % 2 == 0) {
        room[warp_row + row].non_finite = bad;
    }
}

/* Normaliser, LSE2 and statistics of row r; returns what O is divided by. 0: no visible mass. */
template <int P>
__device__ __forceinline__ float close_row(const fwd_call &f, row_state &row, int r, int token, int64_t at,
                                           row_part *part)
{
    float sum = keys_in_quad::sum(row.sum[r]);
    const float sum_exact = keys_in_quad::sum(row.sum_exact[r]), lost = keys_in_quad::sum(row.lost[r]);
    float magnitude = row.magnitude[r], anchor = row.anchor[r];
    magnitude = max_nan(magnitude, __shfl_xor_sync(0xffffffffu, magnitude, 1));
    magnitude = max_nan(magnitude, __shfl_xor_sync(0xffffffffu, magnitude, 2));
    /* Nothing sound can come of a row with a score that is not finite: let it be seen. */
    const bool broken = !(magnitude < INFINITY) || !(fabsf(anchor) < INFINITY);
    sum = broken ? NAN : sum;
    anchor = broken ? NAN : anchor;
    if (token < f.tokens && (threadIdx.x & 3) == 0 && P != P_UNROUNDED) {
        f.lse[at + token] = sum == 0.0f ? -INFINITY : anchor + log2f(__fdiv_rn(sum, f.rule.unit));
        if (f.lse_exact != NULL) {
            f.lse_exact[at + token] = anchor + log2f(sum_exact);
        }
        if (f.anchor != NULL) {
            f.anchor[at + token] = anchor;
        }
    }
    if (part != NULL && (threadIdx.x & 3) == 0) {
        const bool counts = token < f.tokens;
        part->magnitude = counts ? magnitude : 0.0f;
        part->rows = counts ? 1 : 0;
        part->lost = !counts || P == PV_BF16 ? 0.0f : broken ? NAN : __fdiv_rn(lost, sum_exact);
    }
    return sum == 0.0f ? 0.0f : __fmul_rn(sum, f.v_unit);
}

/* ---- the kernel ------------------------------------------------------------------------------------------- */

template <int W> constexpr size_t shared_bytes(void)
{
    return sizeof(bf16) * W * (ROWS + 2 * STAGES * KEYS) + sizeof(row_part) * ROWS;
}

template <int W, int P>
static __global__ void __launch_bounds__(THREADS, 2) fwd_kernel(const __grid_constant__ fwd_call f)
{
    extern __shared__ __align__(128) char memory[];
    constexpr uint32_t Q_BYTES = 2 * W * ROWS, TILE_BYTES = 2 * W * KEYS;
    const uint32_t q_tile = shared_address(memory), stages = q_tile + Q_BYTES;
    row_part *room = f.parts != NULL ? (row_part *)(memory + Q_BYTES + 2 * STAGES * TILE_BYTES) : NULL;
    /* Long rows first; heads that share K and V side by side. */
    const int all_heads = (int)gridDim.x / f.row_blocks, which = (int)blockIdx.x % all_heads;
    const int row_block = f.row_blocks - 1 - (int)blockIdx.x / all_heads;
    const int64_t batch = which / f.heads, head = which % f.heads, kv = head / f.group;
    const bf16 *k = operand_head(f.k, batch, kv), *v = operand_head(f.v, batch, kv);
    const int warp_row = (int)(threadIdx.x / 32) * 16, lane = threadIdx.x & 31;
    const int first_row = row_block * ROWS, row0 = first_row + warp_row, row = row0 + lane / 4;
    const int keys = f.causal ? min(f.tokens, first_row + ROWS) : f.tokens;

    const auto load_tile = [&](int key0, uint32_t stage) {
        const auto token = [&](int i) { return key0 + i < keys ? key0 + i : -1; };
        load_rows<W>(stage, KEYS, k, f.k.token, f.head_dim, token);
        load_rows<W>(stage + TILE_BYTES, KEYS, v, f.v.token, f.head_dim, token);
        copies_commit();
    };
    row_state state = {{-INFINITY, -INFINITY}, {0, 0}, {0, 0}, {0, 0}, {0, 0}};
    float o[W / 8][4] = {};
    load_rows<W>(q_tile, ROWS, operand_head(f.q, batch, head), f.q.token, f.head_dim,
                 [&](int i) { return first_row + i < f.tokens ? first_row + i : -1; });
    if (f.rule.anchor == ANCHOR_SAMPLED) {
        sampled_anchor<W>(f, q_tile, warp_row, stages, k, row, state);
    } else if (f.rule.anchor == ANCHOR_ZERO) {
        state.anchor[0] = state.anchor[1] = 0.0f;
    }
    const bf16 *diag = f.diag.data != NULL ? operand_head(f.diag, batch, kv) : NULL;
    load_tile(0, stages);
    for (int tile = 0; tile < keys; tile += KEYS) {
        const uint32_t stage = stages + (uint32_t)(tile / KEYS % STAGES) * 2 * TILE_BYTES;
        copies_wait<0>();
        __syncthreads(); /* the tile is here, and nobody reads the other stage any more */
        if (tile + KEYS < keys) {
            load_tile(tile + KEYS, stages + (uint32_t)((tile / KEYS + 1) % STAGES) * 2 * TILE_BYTES);
        }
#pragma unroll 1
        for (int key = 0; key < KEYS; key += STEP) {
            if (tile + key >= keys || (f.causal && tile + key > row0)) {
                break;
            }
            float t[2][8];
            block_scores<W>(q_tile, warp_row, stage, key, f.c, t);
            block_step<W, P>(f, {tile + key, row0, row, stage + TILE_BYTES, key, diag}, state, t, o);
        }
    }
    const int64_t at = (batch * f.heads + head) * f.tokens;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        row_part *part = room != NULL ? &room[warp_row + lane / 4 + 8 * r] : NULL;
        const float divisor = close_row<P>(f, state, r, row + 8 * r, at, part);
#pragma unroll
        for (int n = 0; n < W / 8; n++) {
            o[n][2 * r] = divisor == 0.0f ? 0.0f : __fdiv_rn(o[n][2 * r], divisor);
            o[n][2 * r + 1] = divisor == 0.0f ? 0.0f : __fdiv_rn(o[n][2 * r + 1], divisor);
        }
    }
    bf16 *out = f.out.data + batch * f.out.batch_stride + head * f.out.head_stride;
    store_rows<W>(f, out, memory, q_tile, warp_row, row0, o, room);
    if (room != NULL) {
        close_part(f, room, &f.parts[blockIdx.x]);
    }
}

/* ---- launches --------------------------------------------------------------------------------------------- */

/* Scratch. q, k, v: operands where the caller keeps none. */
struct fwd_scratch {
    bf16 *q, *k, *v, *diag, *v_exact;
    struct head_facts *q_facts, *k_facts, *centred_facts, *v_facts, *sink_facts, *decoded;
    struct attention_stats *parts;
};

static int64_t row_blocks_of(const struct attention_shape *shape)
{
    return (shape->tokens + ROWS - 1) / ROWS;
}

static struct fwd_scratch scratch_carve(const struct attention_shape *shape, const struct attention_recipe *recipe,
                                        struct carve *carve)
{
    const size_t heads = (size_t)(shape->batch * shape->heads), kv_heads = (size_t)(shape->batch * shape->kv_heads);
    const size_t head = (size_t)(shape->tokens * shape->head_dim) * sizeof(bf16), fact = sizeof(struct head_facts);
    struct fwd_scratch s;
    s.q = (bf16 *)carve_take(carve, recipe->qk != QK_BF16 ? heads * head : 0);
    s.k = (bf16 *)carve_take(carve, recipe->qk != QK_BF16 || recipe->k_center ? kv_heads * head : 0);
    s.v = (bf16 *)carve_take(carve, recipe->pv != PV_BF16 ? kv_heads * head : 0);
    s.diag = (bf16 *)carve_take(carve, recipe->v_diag == V_DIAG_FP8 ? kv_heads * head : 0);
    s.v_exact = (bf16 *)carve_take(carve, recipe->bwd_stat == BWD_STAT_EXACT ? kv_heads * head : 0);
    s.q_facts = (struct head_facts *)carve_take(carve, heads * fact);
    s.k_facts = (struct head_facts *)carve_take(carve, kv_heads * fact);
    s.centred_facts = (struct head_facts *)carve_take(carve, kv_heads * fact);
    s.v_facts = (struct head_facts *)carve_take(carve, kv_heads * fact);
    s.sink_facts = (struct head_facts *)carve_take(carve, kv_heads * fact);
    s.decoded = (struct head_facts *)carve_take(carve, heads * fact);
    s.parts = (struct attention_stats *)carve_take(carve, heads * (size_t)row_blocks_of(shape) * sizeof *s.parts);
    return s;
}

size_t attention_fwd_cuda_scratch(const struct attention_shape *shape, const struct attention_recipe *recipe)
{
    struct carve carve = {NULL, 0};
    (void)scratch_carve(shape, recipe, &carve);
    return carve.used;
}

static struct head_tensor tensor_of(const struct attention_shape *shape, struct head_view view, int64_t heads)
{
    ASSERT((uintptr_t)view.data % 16 == 0 && view.batch_stride % 8 == 0 && view.token_stride % 8 == 0 &&
           view.head_stride % 8 == 0);
    return {view, shape->batch, shape->tokens, heads, shape->head_dim};
}

static struct operand view_operand(const struct head_view *view)
{
    return {view->data, view->batch_stride, view->head_stride, view->token_stride};
}

/* (B, heads, T, D) contiguous. */
static struct head_view own_view(const struct attention_shape *shape, bf16 *data, int64_t heads)
{
    const int64_t size = shape->tokens * shape->head_dim;
    return {data, heads * size, shape->head_dim, size};
}

/* The operands of the scores; K may lose its mean first. */
static void publish_scores_of(const struct attention_fwd *a, const struct fwd_scratch *s,
                              const struct attention_saved *saved, struct fwd_call *f)
{
    const struct attention_shape *shape = &a->shape;
    const struct attention_recipe *recipe = a->recipe;
    struct head_tensor q = tensor_of(shape, a->q, shape->heads), k = tensor_of(shape, a->k, shape->kv_heads);
    const struct head_facts *k_facts = s->k_facts;
    const bool measured = recipe->qk != QK_BF16;
    if (measured || a->stats != NULL) {
        attention_measure_cuda(a->cuda, &q, s->q_facts);
        attention_measure_cuda(a->cuda, &k, s->k_facts);
    }
    bf16 *own_q = saved->q != NULL ? saved->q : s->q, *own_k = saved->k != NULL ? saved->k : s->k;
    if (recipe->k_center) {
        attention_centre_cuda(a->cuda, &k, own_k);
        k.view = own_view(shape, own_k, shape->kv_heads);
        k_facts = s->centred_facts;
        if (measured) {
            attention_measure_cuda(a->cuda, &k, s->centred_facts);
        }
    }
    if (measured) {
        attention_scores_cuda(a->cuda, recipe, &q, s->q_facts, s->decoded, own_q);
        attention_scores_cuda(a->cuda, recipe, &k, k_facts, s->decoded, own_k);
        q.view = own_view(shape, own_q, shape->heads);
        k.view = own_view(shape, own_k, shape->kv_heads);
    }
    f->q = view_operand(&q.view);
    f->k = view_operand(&k.view);
}

/* V of the forward and of its diagonal blocks. */
static void publish_values_of(const struct attention_fwd *a, const struct fwd_scratch *s,
                              const struct attention_saved *saved, struct fwd_call *f)
{
    const struct attention_shape *shape = &a->shape;
    const struct attention_recipe *recipe = a->recipe;
    struct head_tensor v = tensor_of(shape, a->v, shape->kv_heads);
    if (recipe->pv != PV_BF16 || recipe->bwd_stat == BWD_STAT_EXACT || a->stats != NULL) {
        attention_measure_cuda(a->cuda, &v, s->v_facts);
    }
    f->v = view_operand(&v.view);
    f->diag = {NULL, 0, 0, 0};
    if (recipe->pv != PV_BF16) {
        if (recipe->sink_keys_fp8 > 0) {
            struct head_tensor sinks = v;
            sinks.tokens = recipe->sink_keys_fp8 < v.tokens ? recipe->sink_keys_fp8 : v.tokens;
            attention_measure_cuda(a->cuda, &sinks, s->sink_facts);
        }
        bf16 *own = saved->v != NULL ? saved->v : s->v;
        attention_values_cuda(a->cuda, recipe, &v, s->v_facts, s->sink_facts, own);
        const struct head_view view = own_view(shape, own, shape->kv_heads);
        f->v = view_operand(&view);
    }
    if (recipe->v_diag == V_DIAG_FP8) {
        attention_value_e4m3_cuda(a->cuda, &v, s->v_facts, attention_unit(recipe), s->diag);
        const struct head_view view = own_view(shape, s->diag, shape->kv_heads);
        f->diag = view_operand(&view);
    }
}

template <int W, int P> static void launch(const struct cuda *on, const struct fwd_call *f, int64_t blocks)
{
    const int bytes = (int)shared_bytes<W>();
    cudaFuncSetAttribute(fwd_kernel<W, P>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    fwd_kernel<W, P><<<(unsigned int)blocks, THREADS, (size_t)bytes, on->stream>>>(*f);
    cuda_launched(on, "attention forward");
}

template <int W> static void launch_for(const struct cuda *on, int p, const struct fwd_call *f, int64_t blocks)
{
    switch (p) {
    case PV_BF16:
        return launch<W, PV_BF16>(on, f, blocks);
    case PV_FP8:
        return launch<W, PV_FP8>(on, f, blocks);
    case PV_MXFP4:
        return launch<W, PV_MXFP4>(on, f, blocks);
    case PV_NVFP4:
        return launch<W, PV_NVFP4>(on, f, blocks);
    case PV_FP4_UE5M3:
        return launch<W, PV_FP4_UE5M3>(on, f, blocks);
    default:
        return launch<W, P_UNROUNDED>(on, f, blocks);
    }
}

static void run(const struct attention_fwd *a, int p, const struct fwd_call *f)
{
    const int64_t blocks = a->shape.batch * a->shape.heads * f->row_blocks;
    if (blocks > 0 && a->shape.head_dim <= 64) {
        launch_for<64>(a->cuda, p, f, blocks);
    } else if (blocks > 0) {
        launch_for<128>(a->cuda, p, f, blocks);
    }
}

/* O' = unrounded P times the V of the backward, for bwd_stat = exact. */
static void run_exact(const struct attention_fwd *a, const struct fwd_scratch *s, bf16 *out, struct fwd_call f)
{
    const struct attention_shape *shape = &a->shape;
    const struct head_tensor v = tensor_of(shape, a->v, shape->kv_heads);
    if (a->recipe->bwd_v == BWD_V_E4M3) {
        attention_value_e4m3_cuda(a->cuda, &v, s->v_facts, 1.0f, s->v_exact);
        const struct head_view view = own_view(shape, s->v_exact, shape->kv_heads);
        f.v = view_operand(&view);
    } else if (a->recipe->bwd_v == BWD_V_BF16) {
        f.v = view_operand(&v.view);
    }
    if (a->recipe->bwd_v != BWD_V_FORWARD) {
        f.diag.data = NULL;
        f.v_unit = 1.0f;
    }
    f.out = own_view(shape, out, shape->heads);
    f.parts = NULL;
    run(a, P_UNROUNDED, &f);
}

void attention_fwd_cuda(const struct attention_fwd *a)
{
    const struct attention_shape *shape = &a->shape;
    ASSERT(attention_variant_cuda.refuses(shape, a->recipe) == NULL);
    struct carve at = {(unsigned char *)a->scratch, 0}, kept = {(unsigned char *)a->saved, 0};
    const struct fwd_scratch s = scratch_carve(shape, a->recipe, &at);
    struct attention_saved_cuda saved = {};
    if (a->saved != NULL) {
        saved = attention_saved_cuda_carve(shape, a->recipe, &kept);
    }
    struct fwd_call f = {};
    publish_scores_of(a, &s, &saved.operands, &f);
    publish_values_of(a, &s, &saved.operands, &f);
    f.out = tensor_of(shape, a->out, shape->heads).view;
    f.lse = a->lse_log2;
    f.lse_exact = saved.operands.lse_exact;
    f.anchor = saved.anchor;
    f.parts = a->stats != NULL ? s.parts : NULL;
    f.heads = (int)shape->heads;
    f.group = (int)(shape->heads / shape->kv_heads);
    f.tokens = (int)shape->tokens;
    f.row_blocks = (int)row_blocks_of(shape);
    f.head_dim = (int)shape->head_dim;
    f.p_block = attention_p_block(a->recipe->pv);
    f.causal = shape->causal;
    f.c = (float)((double)shape->softmax_scale * M_LOG2E);
    f.rule = p_rule_of(a->recipe, false);
    f.v_unit = f.rule.unit;
    run(a, a->recipe->pv, &f);
    if (saved.operands.out_exact != NULL) {
        run_exact(a, &s, saved.operands.out_exact, f);
    }
    if (a->stats != NULL) {
        attention_stats_cuda(a->cuda, s.parts, shape->batch * shape->heads * f.row_blocks, a->stats);
        attention_stats_facts_cuda(a->cuda, s.q_facts, shape->batch * shape->heads, a->stats);
        attention_stats_facts_cuda(a->cuda, s.k_facts, shape->batch * shape->kv_heads, a->stats);
        attention_stats_facts_cuda(a->cuda, s.v_facts, shape->batch * shape->kv_heads, a->stats);
    }
}
