/* core: matrix products on the CPU.
 *
 * C is cut into tiles, one task each. A task walks K in blocks; for each it copies its part of op(A) and op(B) as FP32
 * into panels (A: GROUP_M rows, B: GROUP_N columns, k outermost), so that the innermost loop reads both in the order
 * of memory whatever types, strides and transposes were, and adds the block's products to the sums of the tile.
 * Tiles decide who computes an element, never how: the order of its sum is k, in blocks. */
#include "core/gemm.h"

#include "core/gemm_vec.h"

#include <stdalign.h>
#ifdef _OPENMP
#include <omp.h>
#endif

/* The sums of GROUP_M x GROUP_N elements stay in vector registers: 16 of 32, or 12 of 16. */
enum { GROUP_M = VEC_REGISTERS == 32 ? 8 : 6, GROUP_VECS = 2, GROUP_N = GROUP_VECS * VEC_LANES };

/* 768 KiB of scratch: lives in L2, and on the stack also of threads that have only 2 MiB. */
enum { TILE_M = GROUP_M * (256 / GROUP_M), TILE_N = 256, TILE_MIN = 64 };

/* Products of fewer multiply-adds are done before a second thread has woken up. */
enum { SERIAL_BELOW = 1 << 19 };

struct tile {
    int64_t i0, j0; /* the first row and column of C */
    int rows, columns;
};

struct scratch {
    alignas(64) float a[TILE_M * GEMM_K_BLOCK];
    alignas(64) float b[TILE_N * GEMM_K_BLOCK];
    alignas(64) float sums[TILE_M * TILE_N]; /* row stride TILE_N */
};

/* One operand as packing sees it: element (x, k) at x * stride_x + k * stride_k, where one of the strides is 1. */
struct operand {
    const void *data;
    enum dtype type;
    int64_t stride_x, stride_k;
};

static float load(const void *data, enum dtype type, int64_t at)
{
    return type == DTYPE_BF16 ? bf16_to_float(((const bf16 *)data)[at]) : ((const float *)data)[at];
}

/* panel[k][x] = operand(x0 + x, k0 + k) for x < count; up to `group` zeros, whose products nobody reads.
 * The loop over neighbours in memory is the inner one. */
static inline void pack_group(const struct operand *o, enum dtype type, int64_t x0, int count, int group, int64_t k0,
                              int depth, float *panel)
{
    int64_t at = x0 * o->stride_x + k0 * o->stride_k;
    if (count < group) {
        for (int i = 0; i < depth * group; i++) {
            panel[i] = 0;
        }
    }
    if (o->stride_x == 1) {
        for (int k = 0; k < depth; k++, at += o->stride_k) {
            for (int x = 0; x < count; x++) {
                panel[k * group + x] = load(o->data, type, at + x);
            }
        }
    } else {
        for (int x = 0; x < count; x++, at += o->stride_x) {
            for (int k = 0; k < depth; k++) {
                panel[k * group + x] = load(o->data, type, at + k);
            }
        }
    }
}

/* All panels of a tile's share of one operand, one after the other. */
static inline void pack(const struct operand *o, int64_t x0, int count, int group, int64_t k0, int depth, float *panels)
{
    for (int x = 0; x < count; x += group, panels += group * depth) {
        int part = count - x < group ? count - x : group;
        /* The type and, mostly, the count as constants: the loops then copy vectors. */
        if (o->type == DTYPE_F32 && part == group) {
            pack_group(o, DTYPE_F32, x0 + x, group, group, k0, depth, panels);
        } else if (part == group) {
            pack_group(o, DTYPE_BF16, x0 + x, group, group, k0, depth, panels);
        } else {
            pack_group(o, o->type, x0 + x, part, group, k0, depth, panels);
        }
    }
}

/* sums (GROUP_M, GROUP_N) = or += the products of one panel of A with one of B.
 * Debug and sanitizer builds would run this loop, most of the time of every test, some 100 times slower; all that it
 * touches is scratch of compute_tile. */
__attribute__((optimize("O3"), no_sanitize("address", "undefined"))) static void
multiply_groups(const float *restrict a, const float *restrict b, int depth, bool first, float *restrict sums)
{
    vec part[GROUP_M][GROUP_VECS];
    for (int i = 0; i < GROUP_M; i++) {
        for (int v = 0; v < GROUP_VECS; v++) {
            part[i][v] = vec_zero();
        }
    }
    for (int k = 0; k < depth; k++, a += GROUP_M, b += GROUP_N) {
        for (int i = 0; i < GROUP_M; i++) {
            for (int v = 0; v < GROUP_VECS; v++) {
                part[i][v] = vec_fma(a[i], vec_load(b + v * VEC_LANES), part[i][v]);
            }
        }
    }
    for (int i = 0; i < GROUP_M; i++) {
        for (int v = 0; v < GROUP_VECS; v++) {
            float *at = sums + i * TILE_N + v * VEC_LANES;
            vec_store(at, first ? part[i][v] : vec_add(vec_load(at), part[i][v]));
        }
    }
}

/* One row of sums becomes a row of C. */
static void finish_row(const struct gemm *g, const float *restrict sums, int columns, int64_t at)
{
    float *c = (float *)g->c + at;
    bf16 *c_bf16 = (bf16 *)g->c + at;
    for (int j = 0; j < columns; j++) {
        float x = g->alpha * sums[j];
        if (g->beta != 0) {
            x = __builtin_fmaf(g->beta, load(g->c, g->c_type, at + j), x);
        }
        if (g->c_type == DTYPE_BF16) {
            c_bf16[j] = bf16_from_float(x);
        } else {
            c[j] = x;
        }
    }
}

/* Rows of A repeat fastest: the panel of B, 32 KiB, stays near while those of A stream past. */
static void compute_tile(const struct gemm *g, const struct tile *t)
{
    struct scratch scratch;
    const struct operand a = {g->a, g->a_type, g->trans_a ? 1 : g->lda, g->trans_a ? g->lda : 1};
    const struct operand b = {g->b, g->b_type, g->trans_b ? g->ldb : 1, g->trans_b ? 1 : g->ldb};
    /* k = 0 still makes one pass, of depth 0: it sets the sums to zero. */
    for (int64_t k0 = 0; k0 == 0 || k0 < g->k; k0 += GEMM_K_BLOCK) {
        int depth = (int)(g->k - k0 < GEMM_K_BLOCK ? g->k - k0 : GEMM_K_BLOCK);
        pack(&a, t->i0, t->rows, GROUP_M, k0, depth, scratch.a);
        pack(&b, t->j0, t->columns, GROUP_N, k0, depth, scratch.b);
        for (int j = 0; j < t->columns; j += GROUP_N) {
            for (int i = 0; i < t->rows; i += GROUP_M) {
                multiply_groups(scratch.a + i * depth, scratch.b + j * depth, depth, k0 == 0,
                                scratch.sums + i * TILE_N + j);
            }
        }
    }
    for (int i = 0; i < t->rows; i++) {
        finish_row(g, scratch.sums + i * TILE_N, t->columns, (t->i0 + i) * g->ldc + t->j0);
    }
}

static int64_t ceil_div(int64_t a, int64_t b)
{
    return (a + b - 1) / b;
}

static int round_up(int a, int b)
{
    return (int)ceil_div(a, b) * b;
}

/* Tile number `index` of a grid of tiles of rows x columns. */
static struct tile tile_at(const struct gemm *g, int rows, int columns, int64_t index)
{
    int64_t across = ceil_div(g->n, columns);
    struct tile t = {.i0 = index / across * rows, .j0 = index % across * columns};
    t.rows = (int)(g->m - t.i0 < rows ? g->m - t.i0 : rows);
    t.columns = (int)(g->n - t.j0 < columns ? g->n - t.j0 : columns);
    return t;
}

void gemm_cpu(const struct gemm *g)
{
    ASSERT(g->m >= 0 && g->n >= 0 && g->k >= 0);
    ASSERT(g->lda >= (g->trans_a ? g->m : g->k) && g->ldb >= (g->trans_b ? g->k : g->n) && g->ldc >= g->n);
    int threads = 1;
#ifdef _OPENMP
    bool small = (double)g->m * (double)g->n * (double)(g->k + 1) < SERIAL_BELOW;
    threads = small || omp_in_parallel() ? 1 : omp_get_max_threads();
#endif
    /* Smaller tiles pack more often, so only as small as it takes to give every thread work. */
    int rows = TILE_M;
    int columns = TILE_N;
    while (ceil_div(g->m, rows) * ceil_div(g->n, columns) < threads && (rows > TILE_MIN || columns > TILE_MIN)) {
        if (rows > columns) {
            rows = round_up(rows / 2, GROUP_M);
        } else {
            columns = round_up(columns / 2, GROUP_N);
        }
    }
    int64_t tiles = ceil_div(g->m, rows) * ceil_div(g->n, columns);
    if (threads == 1) {
        /* No OpenMP at all: even a team of one costs more than a small product. */
        for (int64_t index = 0; index < tiles; index++) {
            struct tile t = tile_at(g, rows, columns, index);
            compute_tile(g, &t);
        }
        return;
    }
#pragma omp parallel for schedule(dynamic)
    for (int64_t index = 0; index < tiles; index++) {
        struct tile t = tile_at(g, rows, columns, index);
        compute_tile(g, &t);
    }
}
