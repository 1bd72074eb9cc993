/* bench: what a Hopper wgmma with FP8 operands does to a sum, bit for bit (docs/numerics.md, section 17).
 *
 *   build/release/bench/sums_sm90 [FILE]
 *
 * Feeds operands and accumulators of many kinds, k step by k step, and compares the bits of every accumulator with
 * models (bench/sums_rules.cuh): prints those that explain most of a sample, then counts over all sums for the best
 * ones. Before that, hand-made sums, which tests/attention/test_wgmma_sum.c repeats. FILE: raw sums of the first shape,
 * struct sum one after the other, from which that test's drawn ones are taken. */
#include "bench/clocks_sm90.cuh"
#include "bench/sums_rules.cuh"

enum { ROWS = 64, K = 128, STEPS = K / STEP };

/* ---- the card ---------------------------------------------------------------------------------------------- */

/* A (64, 128), B (N, 128), C (64, N) to D (4, 64, N): the accumulators after each k step. */
template <class PRODUCT, int N, bool REGISTERS>
static __global__ void sum_kernel(const uint8_t *a, const uint8_t *b, const float *c, float *d)
{
    __shared__ __align__(1024) uint8_t tiles[(ROWS + N) * K];
    const int thread = (int)threadIdx.x, row = thread / 32 * 16 + thread % 32 / 4, column = thread % 4 * 2;
    a += (int64_t)blockIdx.x * ROWS * K;
    b += (int64_t)blockIdx.x * N * K;
    c += (int64_t)blockIdx.x * ROWS * N;
    d += (int64_t)blockIdx.x * ROWS * N * STEPS;
    for (int i = thread; i < (ROWS + N) * K; i += 128) {
        const int r = i / K;
        tiles[r < ROWS ? swizzle_128(r, i % K) : ROWS * K + swizzle_128(r - ROWS, i % K)] =
            r < ROWS ? a[i] : b[i - ROWS * K];
    }
    fence_async_proxy();
    __syncthreads();
    float sums[N / 2];
    for (int i = 0; i < N / 2; i++) {
        sums[i] = c[(row + i / 2 % 2 * 8) * N + i / 4 * 8 + column + i % 2];
    }
    const uint64_t a_tile = operand_k_major(shared_address(tiles)),
                   b_tile = operand_k_major(shared_address(tiles + ROWS * K));
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
        uint32_t own[4];
        for (int i = 0; i < 4; i++) {
            memcpy(&own[i], a + (row + i % 2 * 8) * K + step * STEP + i / 2 * 16 + 2 * column, 4);
        }
        wgmma_pin(sums);
        wgmma_pin(own);
        wgmma_fence();
        if constexpr (REGISTERS) {
            PRODUCT::rs(sums, own, operand_advance(b_tile, step * STEP), 1);
        } else {
            PRODUCT::ss(sums, operand_advance(a_tile, step * STEP), operand_advance(b_tile, step * STEP), 1);
        }
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_pin(sums);
        for (int i = 0; i < N / 2; i++) {
            d[(step * ROWS + row + i / 2 % 2 * 8) * N + i / 4 * 8 + column + i % 2] = sums[i];
        }
    }
}

/* ---- operands ---------------------------------------------------------------------------------------------- */

static uint64_t random_state = 1;

static uint32_t random_below(uint32_t n)
{
    uint64_t x = random_state += 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return (uint32_t)(((x ^ (x >> 31)) >> 32) * n >> 32);
}

static bool finite_code(struct format f, uint8_t code)
{
    return f.mantissa == 3 ? (code & 0x7f) != 0x7f : (code & 0x7f) < 0x7c;
}

/* Code of a magnitude near 2^exponent with a random mantissa and sign. */
static uint8_t code_near(struct format f, int exponent)
{
    const int field = exponent + f.bias;
    return (uint8_t)(random_below(2) << 7 | (uint32_t)(field > 0 ? field : 0) << f.mantissa |
                     random_below(1u << f.mantissa));
}

enum kind { ANY, BELL, FEW, PAIRS, SMALL, POSITIVE, ONES, KINDS };
static const char *const kind_names[] = {"any code", "bell", "few", "pairs", "subnormal", "positive", "ones"};

/* K codes of a row. PAIRS: of two in four, one is the other, negated in A (rows of B repeat) at distance 1, 8, 16. */
static void draw_row(uint8_t *x, struct format f, enum kind kind, bool is_a)
{
    const int distances[] = {1, 2, 4, 8, 16}, distance = distances[random_below(5)];
    for (int k = 0; k < K; k++) {
        switch (kind) {
        case BELL:
            x[k] = code_near(f, 1 - __builtin_ctz(1u << 12 | random_below(1u << 12)));
            break;
        case FEW:
            x[k] = random_below(12) > 0 && is_a ? 0 : (uint8_t)random_below(256);
            break;
        case SMALL:
            x[k] = (uint8_t)(random_below(2) << 7 | random_below(2u << f.mantissa));
            break;
        case POSITIVE:
            x[k] = (uint8_t)random_below(f.mantissa == 3 ? 0x7f : 0x7c);
            break;
        case ONES:
            x[k] = (uint8_t)(f.bias << f.mantissa);
            break;
        default:
            x[k] = (uint8_t)random_below(256);
        }
        if (!finite_code(f, x[k])) {
            x[k] = 0;
        }
        if (kind == PAIRS && k / distance % 2 == 1 && (!is_a || random_below(8) > 0)) {
            x[k] = (uint8_t)(x[k - distance] ^ (is_a ? 0x80 : 0));
        }
    }
}

static float draw_start(void)
{
    const uint32_t bits = random_below(1u << 24) & (random_below(2) ? 0xffffffu : 0xfffc00u);
    return random_below(3) == 0 ? 0.0f
                                : ldexpf((random_below(2) ? 1.0f : -1.0f) * (float)bits, (int)random_below(50) - 54);
}

struct shape {
    const char *name;
    struct format a, b;
    int columns;
    void (*launch)(int blocks, const uint8_t *a, const uint8_t *b, const float *c, float *d);
};

template <class PRODUCT, int N, bool REGISTERS>
static void launch(int blocks, const uint8_t *a, const uint8_t *b, const float *c, float *d)
{
    sum_kernel<PRODUCT, N, REGISTERS><<<blocks, 128>>>(a, b, c, d);
}

static const struct shape shapes[] = {
    {"m64n64k32 e4m3 e4m3, A in shared memory", E4M3, E4M3, 64, launch<wgmma_e4m3<64>, 64, false>},
    {"m64n128k32 e4m3 e4m3, A in shared memory", E4M3, E4M3, 128, launch<wgmma_e4m3<128>, 128, false>},
    {"m64n136k32 e4m3 e4m3, A in registers", E4M3, E4M3, 136, launch<wgmma_e4m3<136>, 136, true>},
    {"m64n136k32 e5m2 e4m3, A in registers", E5M2, E4M3, 136, launch<wgmma_e5m2_e4m3<136>, 136, true>},
    {"m64n64k32 e4m3 e5m2, A in shared memory", E4M3, E5M2, 64, launch<wgmma_e4m3_e5m2<64>, 64, false>},
};

/* Blocks of operands, and what the card made of them. */
struct batch {
    const struct shape *shape;
    int blocks;
    std::vector<uint8_t> a, b;
    std::vector<float> c, d;
};

static void *to_device(const void *host, size_t bytes)
{
    void *device;
    must("memory", cudaMalloc(&device, bytes));
    must("upload", cudaMemcpy(device, host, bytes, cudaMemcpyHostToDevice));
    return device;
}

static void batch_open(struct batch &x, const struct shape &shape, int blocks)
{
    x.shape = &shape;
    x.blocks = blocks;
    x.a.assign((size_t)blocks * ROWS * K, 0);
    x.b.assign((size_t)(blocks * shape.columns) * K, 0);
    x.c.assign((size_t)(blocks * shape.columns) * ROWS, 0.0f);
    x.d.assign(x.c.size() * STEPS, NAN);
}

static void batch_draw(struct batch &x)
{
    for (size_t row = 0; row < x.a.size() / K; row++) {
        draw_row(&x.a[row * K], x.shape->a, (enum kind)(row % KINDS), true);
    }
    for (size_t row = 0; row < x.b.size() / K; row++) {
        draw_row(&x.b[row * K], x.shape->b, (enum kind)(row % KINDS), false);
    }
    for (float &c : x.c) {
        c = draw_start();
    }
}

static void batch_run(struct batch &x)
{
    void *a = to_device(x.a.data(), x.a.size()), *b = to_device(x.b.data(), x.b.size()),
         *c = to_device(x.c.data(), x.c.size() * sizeof(float)), *d = to_device(x.d.data(), x.d.size() * sizeof(float));
    x.shape->launch(x.blocks, (const uint8_t *)a, (const uint8_t *)b, (const float *)c, (float *)d);
    must("kernel", cudaMemcpy(x.d.data(), d, x.d.size() * sizeof(float), cudaMemcpyDeviceToHost));
    for (void *p : {a, b, c, d}) {
        must("free", cudaFree(p));
    }
}

/* The i-th of all sums: block, step, row, column, the last fastest. */
static struct sum batch_sum(const struct batch &x, size_t i)
{
    struct sum s;
    const size_t n = (size_t)x.shape->columns, column = i % n, row = i / n % ROWS, step = i / n / ROWS % STEPS,
                 block = i / n / ROWS / STEPS;
    memcpy(s.a, &x.a[(block * ROWS + row) * K + step * STEP], STEP);
    memcpy(s.b, &x.b[(block * n + column) * K + step * STEP], STEP);
    s.c = step == 0 ? x.c[(block * ROWS + row) * n + column] : x.d[i - ROWS * n];
    s.d = x.d[i];
    return s;
}

/* ---- comparison -------------------------------------------------------------------------------------------- */

static bool explains(const struct rule &r, const struct shape &shape, const struct sum &s)
{
    const float d = sum_by(r, shape.a, shape.b, s);
    return memcmp(&d, &s.d, sizeof d) == 0;
}

struct scored {
    struct rule rule;
    size_t wrong;
};

static int by_wrong(const void *x, const void *y)
{
    const struct scored *a = (const struct scored *)x, *b = (const struct scored *)y;
    return (a->wrong > b->wrong) - (a->wrong < b->wrong);
}

static void print_sum(const struct sum &s, float found)
{
    printf("  c %a, d %a, model %a;", (double)s.c, (double)s.d, (double)found);
    for (int k = 0; k < STEP; k++) {
        if ((s.a[k] & 0x7f) != 0 && (s.b[k] & 0x7f) != 0) {
            printf(" %d:%02x*%02x", k, s.a[k], s.b[k]);
        }
    }
    printf("\n");
}

/* All sums of a batch by one rule; where it fails, by kinds of A and B. */
static void count_all(const struct batch &x, const struct rule &r)
{
    const size_t n = x.d.size(), columns = (size_t)x.shape->columns;
    size_t wrong = 0, by_kind[KINDS][KINDS] = {};
    for (size_t i = 0; i < n; i++) {
        const struct sum s = batch_sum(x, i);
        if (!explains(r, *x.shape, s)) {
            if (wrong++ < 3) {
                print_sum(s, sum_by(r, x.shape->a, x.shape->b, s));
            }
            const size_t row = i / columns % ROWS + i / columns / ROWS / STEPS * ROWS,
                         column = i % columns + i / columns / ROWS / STEPS * columns;
            by_kind[row % KINDS][column % KINDS]++;
        }
    }
    printf("  ");
    print_rule(r);
    printf(": %zu of %zu sums wrong\n", wrong, n);
    for (int a = 0; a < KINDS && wrong > 0; a++) {
        for (int b = 0; b < KINDS; b++) {
            if (by_kind[a][b] > 0) {
                printf("    %s x %s: %zu\n", kind_names[a], kind_names[b], by_kind[a][b]);
            }
        }
    }
}

static void compare(const struct batch &x, size_t sample)
{
    std::vector<struct scored> rules;
    for (const struct rule &rule : all_rules()) {
        rules.push_back({rule, 0});
    }
    const size_t n = x.d.size();
    for (size_t i = 0; i < sample; i++) {
        const struct sum s = batch_sum(x, i * 7919 % n);
        for (struct scored &r : rules) {
            r.wrong += !explains(r.rule, *x.shape, s);
        }
    }
    qsort(rules.data(), rules.size(), sizeof rules[0], by_wrong);
    printf("%s: %zu rules, first by %zu sums\n", x.shape->name, rules.size(), sample);
    for (int i = 0; i < 6; i++) {
        printf("  %6zu wrong: ", rules[i].wrong);
        print_rule(rules[i].rule);
        printf("\n");
    }
    for (size_t i = 0; i < rules.size() && (i < 1 || (rules[i].wrong == 0 && i < 8)); i++) {
        count_all(x, rules[i].rule);
    }
}

/* ---- hand-made sums ---------------------------------------------------------------------------------------- */

/* E4M3: 38 is 1, 08 2^-6, 04 2^-7, 02 2^-8, 3e 1.75, 7e 448, 34 .75, 01 2^-9; 80 the sign. */
static const struct made {
    const char *what;
    float c;
    struct {
        uint8_t k, a, b;
    } terms[6];
} made[] = {
    {"1 and 2^-13", 0, {{0, 0x38, 0x38}, {1, 0x08, 0x04}}},
    {"1 and 2^-14", 0, {{0, 0x38, 0x38}, {1, 0x08, 0x02}}},
    {"1 and 2^-14 twice", 0, {{0, 0x38, 0x38}, {1, 0x08, 0x02}, {2, 0x08, 0x02}}},
    {"1 and -2^-14", 0, {{0, 0x38, 0x38}, {1, 0x88, 0x02}}},
    {"-1 and -2^-14", 0, {{0, 0xb8, 0x38}, {1, 0x88, 0x02}}},
    {"2^-18", 0, {{5, 0x01, 0x01}}},
    {"49/16 and 2^-13", 0, {{0, 0x3e, 0x3e}, {1, 0x08, 0x04}}},
    {"49/16, -49/16 and 2^-13", 0, {{0, 0x3e, 0x3e}, {1, 0x08, 0x04}, {2, 0xbe, 0x3e}}},
    {"1, -1 and 2^-14, far", 0, {{0, 0x38, 0x38}, {15, 0x08, 0x02}, {31, 0xb8, 0x38}}},
    {"1, -1 and 2^-14, near", 0, {{0, 0x38, 0x38}, {1, 0xb8, 0x38}, {31, 0x08, 0x02}}},
    {"1, -1 and 2^-14 after 8", 0, {{0, 0x38, 0x38}, {1, 0xb8, 0x38}, {8, 0x08, 0x02}}},
    {"c = 1 + 2^-13 alone", 0x1.0008p0f, {}},
    {"c = 1 + 2^-20 alone", 0x1.00001p0f, {}},
    {"c = 2^-30 alone", 0x1p-30f, {}},
    {"c = 2^-30 and 0 x 448", 0x1p-30f, {{3, 0x00, 0x7e}}},
    {"c = 2^-13 and 0 x 448", 0x1p-13f, {{3, 0x00, 0x7e}}},
    {"c = 1 and 2^-13", 1, {{0, 0x08, 0x04}}},
    {"c = 1 and 2^-14", 1, {{0, 0x08, 0x02}}},
    {"c = 1 + 2^-14 and -1", 0x1.0004p0f, {{0, 0xb8, 0x38}}},
    {"c = -1 - 2^-14 and 1", -0x1.0004p0f, {{0, 0x38, 0x38}}},
    {"c = 1 + 2^-13 and -1", 0x1.0008p0f, {{0, 0xb8, 0x38}}},
    {"c = 2^-20 and 1, -1", 0x1p-20f, {{0, 0xb8, 0x38}, {9, 0x38, 0x38}}},
    {"1.5 and 1.5 and 2^-13", 0, {{0, 0x3c, 0x38}, {1, 0x3c, 0x38}, {2, 0x08, 0x04}}},
    {"-1.5 and -1.5 and -2^-13", 0, {{0, 0xbc, 0x38}, {1, 0xbc, 0x38}, {2, 0x88, 0x04}}},
    {"1.5 and 1.5 and 2^-13 twice", 0, {{0, 0x3c, 0x38}, {1, 0x3c, 0x38}, {2, 0x08, 0x04}, {3, 0x08, 0x04}}},
    {"1 and -1", 0, {{0, 0x38, 0x38}, {1, 0xb8, 0x38}}},
    {"c = -0 alone", -0.0f, {}},
    {"c = -0 and -0", -0.0f, {{0, 0x80, 0x38}}},
    {"448 x 448 and 2^-18", 0, {{0, 0x7e, 0x7e}, {1, 0x01, 0x01}}},
};

static void print_made(void)
{
    const int count = (int)(sizeof made / sizeof made[0]);
    struct batch x;
    batch_open(x, shapes[0], count);
    for (int i = 0; i < count; i++) {
        x.c[(size_t)i * ROWS * 64] = made[i].c;
        for (const auto &t : made[i].terms) {
            x.a[(size_t)i * ROWS * K + t.k] |= t.a;
            x.b[(size_t)i * 64 * K + t.k] |= t.b;
        }
    }
    batch_run(x);
    for (int i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, &x.d[(size_t)i * ROWS * 64 * STEPS], 4);
        printf("    {\"%s\", %af, {", made[i].what, (double)made[i].c);
        for (const auto &t : made[i].terms) {
            if (t.a != 0 || t.b != 0) {
                printf("{%d, 0x%02x, 0x%02x}, ", t.k, t.a, t.b);
            }
        }
        printf("}, 0x%08x}, /* %a */\n", bits, (double)x.d[(size_t)i * ROWS * 64 * STEPS]);
    }
}

int main(int argc, char **argv)
{
    print_made();
    for (const struct shape &shape : shapes) {
        struct batch x;
        batch_open(x, shape, 4096 / shape.columns);
        batch_draw(x);
        batch_run(x);
        if (argc > 1 && &shape == shapes) {
            FILE *file = fopen(argv[1], "wb");
            for (size_t i = 0; file != NULL && i < 24000; i++) {
                const struct sum s = batch_sum(x, i * 7919 % x.d.size());
                fwrite(&s, sizeof s, 1, file);
            }
            if (file == NULL || fclose(file) != 0) {
                fprintf(stderr, "bench: %s is not written\n", argv[1]);
                return 1;
            }
        }
        compare(x, 4096);
        fflush(stdout);
    }
    return 0;
}
