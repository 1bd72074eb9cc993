/* bench: attention on the GPU in TF/s: 4 B H T^2 D operations forward (half if causal), 2.5 times that backward.
 * Usage: attention_cuda [runs]. One line a shape and recipe; medians of CUDA events; random inputs. */
#include "attention/attention_sm90.h"
#include "core/cuda.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { RUNS_MAX = 100 };

static void must(enum status status)
{
    if (status != OK) {
        fprintf(stderr, "attention_cuda: %s\n", status_last_message());
        exit(1);
    }
}

/* n values of about a normal distribution, in BF16: the sum of four uniform ones, scaled. */
static bf16 *draw(struct cuda *cuda, int64_t n, uint64_t seed)
{
    bf16 *host = malloc((size_t)n * sizeof(bf16));
    void *device;
    for (int64_t i = 0; i < n; i++) {
        uint64_t x = (seed + (uint64_t)i) * 0x9E3779B97F4A7C15u;
        x = (x ^ (x >> 29)) * 0xBF58476D1CE4E5B9u;
        x ^= x >> 32;
        float sum = 0;
        for (int k = 0; k < 4; k++) {
            sum += (float)(x >> (16 * k) & 0xffff) * 0x1p-16f - 0.5f;
        }
        host[i] = bf16_from_float(sum * 1.7320508f);
    }
    must(cuda_alloc(&device, (size_t)n * sizeof(bf16), "bench input"));
    cuda_upload(cuda, device, host, (size_t)n * sizeof(bf16));
    must(cuda_sync(cuda, "upload"));
    free(host);
    return device;
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a;
    double y = *(const double *)b;
    return (x > y) - (x < y);
}

static struct head_view view_of(bf16 *data, const struct attention_shape *s, int64_t heads)
{
    return (struct head_view){data, s->tokens * heads * s->head_dim, heads * s->head_dim, s->head_dim};
}

static double forward_ms(struct cuda *cuda, const struct attention_fwd *call, int runs)
{
    struct cuda_event *from[RUNS_MAX];
    struct cuda_event *to[RUNS_MAX];
    double ms[RUNS_MAX];
    for (int i = 0; i < runs + 2; i++) {
        if (i >= 2) {
            must(cuda_event_open(&from[i - 2]));
            must(cuda_event_open(&to[i - 2]));
            cuda_event_record(cuda, from[i - 2]);
        }
        attention_fwd_sm90(call);
        if (i >= 2) {
            cuda_event_record(cuda, to[i - 2]);
        }
    }
    must(cuda_sync(cuda, "bench"));
    for (int i = 0; i < runs; i++) {
        ms[i] = cuda_event_ms(from[i], to[i]);
        cuda_event_close(from[i]);
        cuda_event_close(to[i]);
    }
    qsort(ms, (size_t)runs, sizeof *ms, by_value);
    return ms[runs / 2];
}

static void bench_shape(struct cuda *cuda, int64_t batch, int64_t tokens, bool causal, int runs)
{
    struct attention_shape s = {batch, tokens, 32, 8, 128, causal, 0.08838834764f};
    struct attention_recipe recipe = attention_recipe_bf16();
    int64_t queries = batch * tokens * s.heads * s.head_dim;
    int64_t keys = batch * tokens * s.kv_heads * s.head_dim;
    void *lse;
    void *scratch;
    struct attention_fwd call = {.cuda = cuda, .shape = s, .recipe = &recipe};
    call.q = view_of(draw(cuda, queries, 1), &s, s.heads);
    call.k = view_of(draw(cuda, keys, 2), &s, s.kv_heads);
    call.v = view_of(draw(cuda, keys, 3), &s, s.kv_heads);
    call.out = view_of(draw(cuda, queries, 4), &s, s.heads);
    must(cuda_alloc(&lse, (size_t)(batch * s.heads * tokens) * sizeof(float), "lse"));
    must(cuda_alloc(&scratch, attention_fwd_scratch_bytes_sm90(&s, &recipe), "scratch"));
    call.lse_log2 = lse;
    call.scratch = scratch;
    double ms = forward_ms(cuda, &call, runs);
    double operations = 4.0 * (double)batch * 32 * (double)tokens * (double)tokens * 128 * (causal ? 0.5 : 1.0);
    printf("fwd bf16 B%d T%d %s: %.3f ms, %.0f TF/s\n", (int)batch, (int)tokens, causal ? "causal" : "full", ms,
           operations / ms * 1e-9);
    cuda_free(call.q.data);
    cuda_free(call.k.data);
    cuda_free(call.v.data);
    cuda_free(call.out.data);
    cuda_free(lse);
    cuda_free(scratch);
}

int main(int argc, char **argv)
{
    static const int64_t shapes[][2] = {{4, 4096}, {2, 8192}, {1, 16384}, {1, 32768}};
    int runs = argc > 1 ? atoi(argv[1]) : 20;
    struct cuda *cuda;
    runs = runs < 1 ? 1 : runs > RUNS_MAX ? RUNS_MAX : runs;
    must(cuda_open(&cuda, 0));
    for (int causal = 1; causal >= 0; causal--) {
        for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
            bench_shape(cuda, shapes[i][0], shapes[i][1], causal == 1, runs);
        }
    }
    cuda_close(cuda);
    return 0;
}
