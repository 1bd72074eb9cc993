/* attention: tensor maps for TMA, made on the host: what a box of an operand of the Hopper kernels is. */
#pragma once

#include "attention/sm90.cuh"

/* What cuTensorMapEncodeTiled is told; extents and box innermost first, strides (bytes) from dimension 1 on. Elements
 * outside the tensor load as zero and are not stored. */
struct tensor_map_shape {
    const void *data; /* a multiple of 16 */
    CUtensorMapDataType type;
    int rank;
    uint64_t extent[5], stride[4]; /* strides: multiples of 16, in any order */
    uint32_t box[5];
    CUtensorMapSwizzle swizzle;
};

static inline CUtensorMap tensor_map(const struct cuda *on, const struct tensor_map_shape *s)
{
    void *entry = NULL;
    cudaDriverEntryPointQueryResult found;
    CUtensorMap map = {};
    cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found);
    if (error != cudaSuccess || found != cudaDriverEntryPointSuccess) {
        cuda_note(on, "cuTensorMapEncodeTiled", (int)(error != cudaSuccess ? error : cudaErrorSymbolNotFound));
        return map;
    }
    const uint32_t ones[5] = {1, 1, 1, 1, 1};
    CUresult result = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(entry)(
        &map, s->type, (uint32_t)s->rank, const_cast<void *>(s->data), s->extent, s->stride, s->box, ones,
        CU_TENSOR_MAP_INTERLEAVE_NONE, s->swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result != CUDA_SUCCESS) {
        cuda_note(on, "cuTensorMapEncodeTiled: strides must be multiples of 16 bytes", (int)cudaErrorInvalidValue);
    }
    return map;
}

/* Tiles of 128 bytes x `rows` tokens of one head: coordinates (element, token, head, batch) of (B, heads, T, 128)
 * elements, strides in bytes. Rows beyond T load as zeros. */
static inline CUtensorMap rows_map(const struct cuda *on, const void *data, CUtensorMapDataType type,
                                   const uint64_t (&stride)[3], int64_t tokens, int64_t heads, int64_t batch, int rows)
{
    struct tensor_map_shape s = {};
    s.data = data;
    s.type = type;
    s.rank = 4;
    s.extent[0] = 128;
    s.extent[1] = (uint64_t)tokens;
    s.extent[2] = (uint64_t)heads;
    s.extent[3] = (uint64_t)batch;
    s.stride[0] = stride[0];
    /* A dimension of one entry has any stride; the encoder still wants a legal one. */
    s.stride[1] = heads > 1 ? stride[1] : stride[0];
    s.stride[2] = batch > 1 ? stride[2] : stride[0];
    s.box[0] = type == CU_TENSOR_MAP_DATA_TYPE_UINT8 ? 128 : 64;
    s.box[1] = (uint32_t)rows;
    s.box[2] = s.box[3] = 1;
    s.swizzle = CU_TENSOR_MAP_SWIZZLE_128B;
    return tensor_map(on, &s);
}

/* Rows of K in an order that gives a thread of a quad N neighbouring keys (16 or 32) of its scores: row 8 j + 2 c + e
 * of a box of 4 N keys is key N c + 2 j + e. Dimensions: 64 features (128 of E4M3), then e, c, j, then heads; strides
 * in bytes. Coordinate e, which steps by a token, also selects the first key, and the batch if `heads` are those of
 * one. */
template <int N>
static inline CUtensorMap blocked_map(const struct cuda *on, const void *data, bool e4m3, uint64_t token, uint64_t head,
                                      uint64_t tokens, uint64_t heads)
{
    struct tensor_map_shape s = {};
    s.data = data;
    s.type = e4m3 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    s.rank = 5;
    s.extent[0] = 128;
    s.extent[1] = tokens > 1 ? tokens : 2;
    s.extent[2] = 4;
    s.extent[3] = N / 2;
    s.extent[4] = heads;
    s.stride[0] = token;
    s.stride[1] = N * token;
    s.stride[2] = 2 * token;
    s.stride[3] = heads > 1 ? head : token;
    s.box[0] = e4m3 ? 128 : 64;
    s.box[1] = 2;
    s.box[2] = 4;
    s.box[3] = N / 2;
    s.box[4] = 1;
    s.swizzle = CU_TENSOR_MAP_SWIZZLE_128B;
    return tensor_map(on, &s);
}

/* Of BF16, 64 features a tile. */
static inline CUtensorMap head_map(const struct cuda *on, const struct head_view *view, int64_t tokens, int64_t heads,
                                   int64_t batch, int rows)
{
    const uint64_t stride[3] = {(uint64_t)view->token_stride * sizeof(bf16), (uint64_t)view->head_stride * sizeof(bf16),
                                (uint64_t)view->batch_stride * sizeof(bf16)};
    return rows_map(on, view->data, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, stride, tokens, heads, batch, rows);
}

/* Of E4M3, contiguous. */
static inline CUtensorMap codes_map(const struct cuda *on, const void *data, int64_t tokens, int64_t heads,
                                    int64_t batch, int rows)
{
    const uint64_t stride[3] = {128, (uint64_t)tokens * 128, (uint64_t)(heads * tokens) * 128};
    return rows_map(on, data, CU_TENSOR_MAP_DATA_TYPE_UINT8, stride, tokens, heads, batch, rows);
}
