/* attention: rows of represented Q and K on Hopper to E4M3 codes with one power of two a head, and back: for where the
 * largest represented value of a head must be known first, or the represented values exist already. */
#include "attention/attention_publish_sm90.cuh"

enum { LOWER_THREADS = 256 };

/* Grid (slices, heads): 16 values a thread and turn. */
static __global__ void lower_rows_kernel(bf16 *x, int64_t per_head, const head_facts *decoded, uint8_t *rows,
                                         float *inverse)
{
    const int64_t head = blockIdx.y;
    const int k = multiplier_exponent(MULTIPLIER_ROWS, __uint_as_float(decoded[head].amax));
    const float m = power_of_two(k), back = power_of_two(-k);
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        inverse[head] = back;
    }
    for (int64_t i = ((int64_t)blockIdx.x * LOWER_THREADS + threadIdx.x) * 16; i < per_head;
         i += (int64_t)gridDim.x * LOWER_THREADS * 16) {
        bf16 *at = x + head * per_head + i;
        const uint4 a = bf16x8_load(at).words, b = bf16x8_load(at + 8).words;
        uint32_t y[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
        store_words(rows + head * per_head + i, lower16(y, m, back));
        store_words(at, make_uint4(y[0], y[1], y[2], y[3]));
        store_words(at + 8, make_uint4(y[4], y[5], y[6], y[7]));
    }
}

/* Likewise, the way back. */
static __global__ void raise_rows_kernel(const uint8_t *rows, int64_t per_head, const float *inverse, bf16 *x)
{
    const int64_t head = blockIdx.y;
    const float back = inverse[head];
    for (int64_t i = ((int64_t)blockIdx.x * LOWER_THREADS + threadIdx.x) * 16; i < per_head;
         i += (int64_t)gridDim.x * LOWER_THREADS * 16) {
        const uint4 codes = *reinterpret_cast<const uint4 *>(rows + head * per_head + i);
        const uint2 a = decoded_bf16(codes.x, back), b = decoded_bf16(codes.y, back);
        const uint2 c = decoded_bf16(codes.z, back), d = decoded_bf16(codes.w, back);
        bf16 *at = x + head * per_head + i;
        store_words(at, make_uint4(a.x, a.y, b.x, b.y));
        store_words(at + 8, make_uint4(c.x, c.y, d.x, d.y));
    }
}

/* ---- host -------------------------------------------------------------------------------------------------- */

static unsigned int slices_of(int64_t per_head)
{
    const unsigned int slices = cuda_blocks(per_head, 16 * LOWER_THREADS);
    return slices < 64 ? slices : 64;
}

void publish_lower_rows(const struct cuda *on, const struct attention_shape *shape, const score_operand &o)
{
    const int64_t heads = shape->batch * o.heads, per_head = shape->tokens * FEATURES;
    const dim3 grid(slices_of(per_head), (unsigned int)heads);
    lower_rows_kernel<<<grid, LOWER_THREADS, 0, on->stream>>>(o.to, per_head, o.decoded, o.rows, o.inverse);
    cuda_launched(on, "attention lower rows");
}

void attention_decode_heads_sm90(const struct cuda *on, const struct attention_publish_sm90 *a)
{
    for (const score_operand &o : {score_operand_q(a), score_operand_k(a)}) {
        const int64_t per_head = a->shape.tokens * FEATURES;
        const dim3 grid(slices_of(per_head), (unsigned int)(a->shape.batch * o.heads));
        raise_rows_kernel<<<grid, LOWER_THREADS, 0, on->stream>>>(o.rows, per_head, o.inverse, o.to);
        cuda_launched(on, "attention raise rows");
    }
}

void attention_code_heads_sm90(const struct cuda *on, const struct attention_publish_sm90 *a)
{
    const int64_t head = a->shape.tokens * FEATURES;
    for (score_operand o : {score_operand_q(a), score_operand_k(a)}) {
        const head_tensor x = {
            {o.to, o.heads * head, FEATURES, head}, a->shape.batch, a->shape.tokens, o.heads, FEATURES};
        o.decoded = a->decoded;
        attention_measure_cuda(on, &x, o.decoded);
        publish_lower_rows(on, &a->shape, o);
    }
}
