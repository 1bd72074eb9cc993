/* attention: what the CUDA backward makes before its products: multipliers, gradient views, dO' and r of every row
 * (docs/numerics.md, sections 7 and 8). All of it reads and writes each tensor once or twice in 16-byte pieces: a row
 * is spread over 16 lanes (8 for head_dim up to 64). */
#include "attention/attention_cuda_bwd.cuh"
#include "attention/attention_cuda_operands.cuh"

enum { ROW_THREADS = 256, ROWS_OF_BLOCK = 64 };

/* Lanes of a row. */
static __host__ __device__ __forceinline__ int row_lanes(int head_dim)
{
    return head_dim > 64 ? 16 : 8;
}

template <class T> __device__ __forceinline__ T row_sum(T x, int lanes)
{
    for (int o = lanes / 2; o > 0; o >>= 1) {
        x += __shfl_xor_sync(0xffffffffu, x, o);
    }
    return x;
}

/* Infinity if anything was not finite. */
static __device__ __forceinline__ float extent_amax(const struct bwd_extent &e)
{
    return __uint_as_float(min(e.amax, FLOAT_INF));
}

static __device__ __forceinline__ float extent_norm(const struct bwd_extent &e)
{
    return (float)sqrt(__longlong_as_double((long long)e.norm2));
}

/* ---- extents ------------------------------------------------------------------------------------------------ */

/* A tensor of heads, and the offset in bwd_unit_state of what is found. */
struct extent_args {
    struct head_view x;
    int tokens, heads, kv_heads, head_dim;
    struct bwd_unit_state *units;
    int offset;
};

/* Sum of 8 squares. Those of BF16 leave the range of FP32: then in FP64, which is slower. */
static __device__ __forceinline__ double squares(const float *y, uint32_t *amax)
{
    uint32_t largest = 0;
    float sum = 0.0f;
#pragma unroll
    for (int d = 0; d < 8; d++) {
        largest = max(largest, __float_as_uint(fabsf(y[d])));
        sum = __fmaf_rn(y[d], y[d], sum);
    }
    *amax = max(*amax, largest);
    if (largest == 0 || (largest > __float_as_uint(0x1p-50f) && largest < __float_as_uint(0x1p60f))) {
        return (double)sum;
    }
    double wide = 0;
#pragma unroll
    for (int d = 0; d < 8; d++) {
        wide += (double)y[d] * (double)y[d];
    }
    return wide;
}

static __global__ void attention_bwd_extent_kernel(const struct extent_args a)
{
    const int lanes = row_lanes(a.head_dim), lane = threadIdx.x % lanes;
    const int64_t head = blockIdx.y, batch = blockIdx.z;
    const bf16 *x = bwd_head(a.x, batch, head);
    uint32_t amax = 0;
    double norm2 = 0;
    for (int i = (int)threadIdx.x / lanes; i < ROWS_OF_BLOCK; i += ROW_THREADS / lanes) {
        const int row = (int)blockIdx.x * ROWS_OF_BLOCK + i;
        double sum = 0;
        if (row < a.tokens && lane * 8 < a.head_dim) {
            float y[8];
            bf16x8_unpack(bf16x8_load(x + (int64_t)row * a.x.token_stride + lane * 8), y);
            sum = squares(y, &amax);
        }
        sum = row_sum(sum, lanes);
        norm2 = sum > norm2 ? sum : norm2; /* NaN is passed over, as the CPU does */
    }
    amax = __reduce_max_sync(0xffffffffu, amax);
    for (int o = 16; o >= lanes; o >>= 1) {
        const double other = __shfl_xor_sync(0xffffffffu, norm2, o);
        norm2 = other > norm2 ? other : norm2;
    }
    if ((threadIdx.x & 31) == 0) {
        const int64_t unit = batch * a.kv_heads + head / (a.heads / a.kv_heads);
        struct bwd_extent *e = (struct bwd_extent *)((char *)(a.units + unit) + a.offset);
        atomicMax(&e->amax, amax);
        atomicMax(&e->norm2, (unsigned long long)__double_as_longlong(norm2));
    }
}

static void extent(const struct cuda *on, const struct bwd_prepare *p, const struct head_view *x, int64_t heads,
                   int offset)
{
    const struct attention_shape *s = p->shape;
    struct extent_args a = {*x, (int)s->tokens, (int)heads, (int)s->kv_heads, (int)s->head_dim, p->units, offset};
    const dim3 grid(cuda_blocks(s->tokens, ROWS_OF_BLOCK), (unsigned int)heads, (unsigned int)s->batch);
    attention_bwd_extent_kernel<<<grid, ROW_THREADS, 0, on->stream>>>(a);
    cuda_launched(on, "attention_bwd_extent");
}

/* ---- gradient views ----------------------------------------------------------------------------------------- */

struct view_args {
    struct head_view x;
    bf16 *y; /* (B, heads, T, D); may be x */
    int tokens, heads, kv_heads, head_dim;
    bool fixed; /* multiplier 4 */
    const struct bwd_unit_state *units;
    bool keys; /* whose extent tells the multiplier */
};

/* E4M3(m x) / m */
static __global__ void attention_bwd_view_kernel(const struct view_args a)
{
    const int lanes = row_lanes(a.head_dim), lane = threadIdx.x % lanes;
    const int64_t head = blockIdx.y, batch = blockIdx.z;
    const struct bwd_unit_state *unit = a.units + batch * a.kv_heads + head / (a.heads / a.kv_heads);
    const float amax = extent_amax(a.keys ? unit->k : unit->q);
    const float m = a.fixed ? 4.0f : pow2_scale_of(amax, E4M3_MAX), inverse = 1.0f / m;
    for (int i = (int)threadIdx.x / lanes; i < ROWS_OF_BLOCK; i += ROW_THREADS / lanes) {
        const int row = (int)blockIdx.x * ROWS_OF_BLOCK + i;
        if (row >= a.tokens || lane * 8 >= a.head_dim) {
            continue;
        }
        float y[8];
        bf16x8_unpack(bf16x8_load(bwd_head(a.x, batch, head) + row * a.x.token_stride + lane * 8), y);
#pragma unroll
        for (int d = 0; d < 8; d++) {
            y[d] = e4m3_round(y[d] * m) * inverse;
        }
        bf16x8_store(a.y + (((batch * a.heads + head) * a.tokens + row) * a.head_dim + lane * 8), bf16x8_pack(y));
    }
}

static void view(const struct cuda *on, const struct bwd_prepare *p, const struct head_view *x, int64_t heads,
                 bool keys, bf16 *y)
{
    const struct attention_shape *s = p->shape;
    const struct attention_recipe *recipe = p->recipe;
    const bool fixed = recipe->qk_grad == QK_GRAD_LIFT && recipe->ds_scale == DS_SCALE_FIXED;
    struct view_args a = {*x, y, (int)s->tokens, (int)heads, (int)s->kv_heads, (int)s->head_dim, fixed, p->units, keys};
    if (!fixed) {
        const size_t offset = keys ? offsetof(struct bwd_unit_state, k) : offsetof(struct bwd_unit_state, q);
        extent(on, p, x, heads, (int)offset);
    }
    const dim3 grid(cuda_blocks(s->tokens, ROWS_OF_BLOCK), (unsigned int)heads, (unsigned int)s->batch);
    attention_bwd_view_kernel<<<grid, ROW_THREADS, 0, on->stream>>>(a);
    cuda_launched(on, "attention_bwd_view");
}

void bwd_view_query(const struct cuda *on, const struct bwd_prepare *p, const struct head_view *q, bf16 *y)
{
    view(on, p, q, p->shape->heads, false, y);
}

void bwd_view_key(const struct cuda *on, const struct bwd_prepare *p, const struct head_view *k, bf16 *y)
{
    view(on, p, k, p->shape->kv_heads, true, y);
}

/* ---- multipliers (section 8) -------------------------------------------------------------------------------- */

struct lift_args {
    struct attention_recipe recipe;
    float softmax_scale, v_unit;
    int64_t units;
    struct bwd_unit_state *state;
};

static __global__ void attention_bwd_lift_kernel(const struct lift_args a)
{
    const int64_t unit = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (unit >= a.units) {
        return;
    }
    struct bwd_unit_state *u = a.state + unit;
    u->do_lift = pow2_scale_of(extent_amax(u->dout), a.recipe.do_format == DO_E5M2 ? E5M2_MAX : E4M3_MAX);
    if (a.recipe.do_format == DO_BF16) {
        u->do_lift = 1.0f;
    }
    if (a.recipe.do_scale == DO_SCALE_FIXED) {
        u->do_lift = 4.0f;
    }
    const float bound = 2.0f * extent_norm(u->dout) * (extent_norm(u->v) / a.v_unit);
    u->lift = 16.0f * fminf(pow2_scale_of(bound, E4M3_MAX), 0x1p100f);
    if (a.recipe.backward == BWD_BF16 || !(bound > 0.0f)) {
        u->lift = 1.0f;
    }
    if (a.recipe.ds_scale == DS_SCALE_FIXED) {
        u->lift = 256.0f * a.softmax_scale; /* the published kernel folds the softmax scale into dS */
    }
}

void bwd_choose_lifts(const struct cuda *on, const struct bwd_prepare *p, const struct head_view *dout,
                      const struct head_view *v, float v_unit)
{
    const struct attention_shape *s = p->shape;
    if (p->recipe->backward != BWD_BF16 || p->recipe->do_format != DO_BF16) { /* else all multipliers are 1 */
        extent(on, p, dout, s->heads, (int)offsetof(struct bwd_unit_state, dout));
        extent(on, p, v, s->kv_heads, (int)offsetof(struct bwd_unit_state, v));
    }
    struct lift_args a = {*p->recipe, s->softmax_scale, v_unit, s->batch * s->kv_heads, p->units};
    attention_bwd_lift_kernel<<<cuda_blocks(a.units, 128), 128, 0, on->stream>>>(a);
    cuda_launched(on, "attention_bwd_lift");
}

/* ---- rows: dO', r, and the references of P ------------------------------------------------------------------ */

static __device__ __forceinline__ float decode_dout(enum do_format format, float x, float m)
{
    switch (format) {
    case DO_E4M3:
        return e4m3_round(x * m) / m;
    case DO_E5M2:
        return e5m2_round(x * m) / m;
    case DO_BF16:
        return bf16_value(bf16_code(x));
    }
    return x;
}

static __global__ void attention_bwd_rows_kernel(const struct bwd_rows_args a)
{
    const int lanes = row_lanes(a.head_dim), lane = threadIdx.x % lanes;
    const int64_t head = blockIdx.y, batch = blockIdx.z;
    const float m = a.units[batch * a.kv_heads + head / (a.heads / a.kv_heads)].do_lift;
    int count = 0, flushed = 0, bad = 0;
    for (int i = (int)threadIdx.x / lanes; i < ROWS_OF_BLOCK; i += ROW_THREADS / lanes) {
        const int row = (int)blockIdx.x * ROWS_OF_BLOCK + i;
        const int64_t at = (batch * a.heads + head) * a.tokens + row;
        const bool mine = row < a.tokens && lane * 8 < a.head_dim;
        const float lse = row < a.tokens ? a.lse[at] : 0.0f;
        const bool lost = lse == -CUDART_INF_F; /* every code was zero: so are all gradients */
        const float n = lost ? 0.0f : floorf(lse);
        const float fold = a.codes ? bwd_fold(lse) : 1.0f;
        double dot = 0;
        if (mine) {
            float x[8], y[8], o[8] = {}, part = 0.0f;
            const bf16x8 raw = bf16x8_load(bwd_head(a.dout, batch, head) + row * a.dout.token_stride + lane * 8);
            bf16x8_unpack(raw, x);
            if (a.o.data != nullptr) {
                bf16x8_unpack(bf16x8_load(bwd_head(a.o, batch, head) + row * a.o.token_stride + lane * 8), o);
            }
#pragma unroll
            for (int d = 0; d < 8; d++) {
                y[d] = decode_dout(a.do_format, x[d] * fold, m);
                part = __fmaf_rn(o[d], a.stat_raw ? x[d] : y[d], part);
                count += x[d] != 0.0f;
                flushed += x[d] != 0.0f && y[d] == 0.0f;
            }
            dot = (double)part;
            bad += bwd_non_finite(raw);
            if (a.decoded != nullptr) {
                bf16x8_store(a.decoded + at * a.head_dim + lane * 8, bf16x8_pack(y));
            }
        }
        dot = row_sum(dot, lanes);
        if (row < a.tokens && lane == 0) {
            const float own = a.lse_exact != nullptr ? a.lse_exact[at] : lse;
            a.reference[at] = lost ? CUDART_INF_F : a.codes ? n : own;
            a.stat[at] = (float)dot * (a.stat_raw ? fold : 1.0f);
            if (a.exact != nullptr) {
                a.exact[at] = lost ? CUDART_INF_F : own - (lse - n); /* in the folded scheme P carries 2^f */
            }
        }
    }
    if (a.counters == nullptr) {
        return;
    }
    bwd_count(a.counters, DO_COUNT, count);
    bwd_count(a.counters, DO_FLUSHED, flushed);
    bwd_count(a.counters, NON_FINITE, bad);
}

void bwd_rows(const struct cuda *on, const struct bwd_rows_args *a, int64_t batch)
{
    const dim3 grid(cuda_blocks(a->tokens, ROWS_OF_BLOCK), (unsigned int)a->heads, (unsigned int)batch);
    attention_bwd_rows_kernel<<<grid, ROW_THREADS, 0, on->stream>>>(*a);
    cuda_launched(on, "attention_bwd_rows");
}
