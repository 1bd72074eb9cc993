/* model: FP8 operands of projections on the GPU: the largest magnitude, and codes as they lie and transposed.
 *
 * All of it is bound by memory. The amax runs over x forwards, the encoder backwards: what the first touched last is
 * still in the L2 cache. */
extern "C" {
#include "model/linear_format.h"
}

#include "model/linear_cuda.cuh"

enum { THREADS = 256, WARPS = THREADS / 32 };

/* ---- amax ---- */

/* 16-byte vectors that a thread has in flight. */
enum { VECTORS = 4, AMAX_PIECE = VECTORS * THREADS };

static __global__ void __launch_bounds__(THREADS) amax_kernel(const bf16 *x, int64_t vectors, float *amax)
{
    uint32_t max = 0;
    for (int64_t base = (int64_t)blockIdx.x * AMAX_PIECE; base < vectors; base += (int64_t)gridDim.x * AMAX_PIECE) {
        bf16x8 v[VECTORS];
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
            int64_t at = base + i * THREADS + threadIdx.x;
            v[i] = at < vectors ? bf16x8_load(x + 8 * at) : bf16x8{make_uint4(0, 0, 0, 0)};
        }
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
            max = magnitude_max8(max, v[i]);
        }
    }
    amax_publish(magnitude_of(max), amax);
}

void linear_amax_cuda(const bf16 *x, int64_t n, float *amax, const struct cuda *on)
{
    ASSERT(n % 8 == 0 && (uintptr_t)x % 16 == 0);
    const unsigned int pieces = cuda_blocks(n / 8, AMAX_PIECE), most = 8 * (unsigned int)on->multiprocessors;
    const unsigned int blocks = pieces < most ? pieces : most;
    cuda_zero(on, amax, sizeof *amax);
    amax_kernel<<<blocks, THREADS, 0, on->stream>>>(x, n / 8, amax);
    cuda_launched(on, "linear amax");
}

/* ---- codes ---- */

/* Four codes, the first in the low byte. The instruction saturates and rounds to nearest even, subnormals too, as
 * numerics/formats.h (PTX ISA, cvt). */
template <bool E5M2> __device__ __forceinline__ uint32_t four_codes(float a, float b, float c, float d)
{
    uint32_t codes;
    if (E5M2) {
        asm("{\n\t.reg .b16 low, high;\n\t"
            "cvt.rn.satfinite.e5m2x2.f32 low, %2, %1;\n\t"
            "cvt.rn.satfinite.e5m2x2.f32 high, %4, %3;\n\t"
            "mov.b32 %0, {low, high};\n\t}"
            : "=r"(codes)
            : "f"(a), "f"(b), "f"(c), "f"(d));
    } else {
        asm("{\n\t.reg .b16 low, high;\n\t"
            "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n\t"
            "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n\t"
            "mov.b32 %0, {low, high};\n\t}"
            : "=r"(codes)
            : "f"(a), "f"(b), "f"(c), "f"(d));
    }
    return codes;
}

/* Bytes of a 4 x 4 block: word i of `columns` holds byte i of each row. */
__device__ __forceinline__ void turn_bytes(uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3, uint32_t *columns)
{
    uint32_t low01 = __byte_perm(r0, r1, 0x5140), high01 = __byte_perm(r0, r1, 0x7362);
    uint32_t low23 = __byte_perm(r2, r3, 0x5140), high23 = __byte_perm(r2, r3, 0x7362);
    columns[0] = __byte_perm(low01, low23, 0x5410);
    columns[1] = __byte_perm(low01, low23, 0x7632);
    columns[2] = __byte_perm(high01, high23, 0x5410);
    columns[3] = __byte_perm(high01, high23, 0x7632);
}

/* A thread owns 16 rows x 8 columns: 16-byte loads along rows, 16-byte stores along columns, and the transpose stays in
 * registers. A warp covers 64 rows x 64 columns (whole lines of x, half lines of the codes), a block 128 x 256. */
enum { THREAD_ROWS = 16, THREAD_COLS = 8, BLOCK_ROWS = 128, BLOCK_COLS = 256 };

/* Codes of column group g (four columns) transposed and stored: 16 rows are one 16-byte word of each column. */
__device__ __forceinline__ void store_turned(const uint32_t (*codes)[2], int g, int64_t stride, uint8_t *turned)
{
    uint32_t columns[4][4];
#pragma unroll
    for (int r = 0; r < 4; r++) {
        turn_bytes(codes[4 * r][g], codes[4 * r + 1][g], codes[4 * r + 2][g], codes[4 * r + 3][g], columns[r]);
    }
#pragma unroll
    for (int c = 0; c < 4; c++) {
        uint4 words = make_uint4(columns[0][c], columns[1][c], columns[2][c], columns[3][c]);
        *reinterpret_cast<uint4 *>(turned + (4 * g + c) * stride) = words;
    }
}

/* Which rows and columns a block has. Last blocks come first, for what amax left in the L2 cache. Neighbouring blocks
 * run along columns, but along rows if there are transposed codes only, whose contiguous dimension that is (on an
 * H200 4.1 instead of 3.9 TB/s; 3 % to 8 % slower where codes as they lie are written). */
struct block_place {
    unsigned int down, across;
};

__device__ __forceinline__ block_place block_place_of(const struct linear_codes &a)
{
    const unsigned int block = gridDim.x - 1 - blockIdx.x;
    const unsigned int high = (unsigned int)((a.rows + BLOCK_ROWS - 1) / BLOCK_ROWS);
    const unsigned int wide = (unsigned int)((a.cols + BLOCK_COLS - 1) / BLOCK_COLS);
    return a.turned && !a.codes ? block_place{block % high, block / high} : block_place{block / wide, block % wide};
}

/* stride: of the transposed codes. Two blocks an SM: the registers that this leaves keep all 16 loads in flight; four
 * blocks with 64 registers each are up to 8 % slower. */
template <bool E5M2>
static __global__ void __launch_bounds__(THREADS, 2) encode_kernel(struct linear_codes a, int64_t stride)
{
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const block_place place = block_place_of(a);
    const int64_t row = (int64_t)place.down * BLOCK_ROWS + (warp & 1) * 64 + (lane >> 3) * THREAD_ROWS;
    const int64_t col = (int64_t)place.across * BLOCK_COLS + (warp >> 1) * 64 + (lane & 7) * THREAD_COLS;
    const float amax = *a.amax, m = power_scale(amax, E5M2 ? E5M2_MAX : E4M3_MAX);
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        *a.scale = is_broken(amax) ? float_from_bits(FLOAT_NAN) : 1.0f / m;
    }
    if (row >= a.rows || col >= a.cols) {
        return;
    }
    bf16x8 x[THREAD_ROWS];
    uint32_t codes[THREAD_ROWS][2];
    const bf16 *from = a.x + row * a.cols + col;
#pragma unroll
    for (int r = 0; r < THREAD_ROWS; r++) {
        x[r] = row + r < a.rows ? bf16x8_load(from + r * a.cols) : bf16x8{make_uint4(0, 0, 0, 0)};
    }
#pragma unroll
    for (int r = 0; r < THREAD_ROWS; r++) {
        float v[8];
        bf16x8_unpack(x[r], v);
        codes[r][0] = four_codes<E5M2>(m * v[0], m * v[1], m * v[2], m * v[3]);
        codes[r][1] = four_codes<E5M2>(m * v[4], m * v[5], m * v[6], m * v[7]);
    }
    if (a.codes) {
        uint8_t *to = a.codes + row * a.cols + col;
#pragma unroll
        for (int r = 0; r < THREAD_ROWS; r++) {
            if (row + r < a.rows) {
                *reinterpret_cast<uint2 *>(to + r * a.cols) = make_uint2(codes[r][0], codes[r][1]);
            }
        }
    }
    if (a.turned) {
        store_turned(codes, 0, stride, a.turned + col * stride + row);
        store_turned(codes, 1, stride, a.turned + col * stride + row);
    }
}

static unsigned int encode_blocks(const struct linear_codes *a)
{
    ASSERT(a->cols % 16 == 0 && (uintptr_t)a->x % 16 == 0 && (uintptr_t)a->codes % 16 == 0 &&
           (uintptr_t)a->turned % 16 == 0);
    return cuda_blocks(a->rows, BLOCK_ROWS) * cuda_blocks(a->cols, BLOCK_COLS);
}

void linear_encode_e4m3_cuda(const struct linear_codes *a, const struct cuda *on)
{
    encode_kernel<false><<<encode_blocks(a), THREADS, 0, on->stream>>>(*a, linear_padded(a->rows));
    cuda_launched(on, "linear E4M3 codes");
}

void linear_encode_e5m2_cuda(const struct linear_codes *a, const struct cuda *on)
{
    encode_kernel<true><<<encode_blocks(a), THREADS, 0, on->stream>>>(*a, linear_padded(a->rows));
    cuda_launched(on, "linear E5M2 codes");
}
