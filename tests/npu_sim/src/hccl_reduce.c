// The arithmetic of reductions. 16-bit floats are widened, combined, and rounded to nearest.

#include "hccl.h"

#include <string.h>

static float widen(uint16_t bits, int type) {
    if (type == FLOAT16) {
        _Float16 half;
        memcpy(&half, &bits, sizeof half);
        return half;
    }
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
}

static uint16_t narrow(float value, int type) {
    uint16_t bits;
    if (type == FLOAT16) {
        _Float16 half = value;
        memcpy(&bits, &half, sizeof bits);
        return bits;
    }
    uint32_t wide;
    memcpy(&wide, &value, sizeof wide);
    if (value != value) return 0x7fc0;
    return (wide + 0x7fff + ((wide >> 16) & 1)) >> 16;  // to nearest, ties to even
}

#define COMBINE(a, b)                                  \
    (reduction == SUM       ? (a) + (b)                \
     : reduction == PRODUCT ? (a) * (b)                \
     : reduction == MAXIMUM ? ((a) > (b) ? (a) : (b))  \
                            : ((a) < (b) ? (a) : (b)))

#define REDUCE_AS(TYPE)                                                                                      \
    do {                                                                                                     \
        for (size_t i = 0; i < count; i++) ((TYPE *)sum)[i] = COMBINE(((TYPE *)sum)[i], ((TYPE *)term)[i]); \
        return SUCCESS;                                                                                      \
    } while (0)

int combine_terms(void *sum, const void *term, size_t count, int type, int reduction) {
    switch (type) {
        case INT8: REDUCE_AS(int8_t);
        case INT16: REDUCE_AS(int16_t);
        case INT32: REDUCE_AS(int32_t);
        case INT64: REDUCE_AS(int64_t);
        case FLOAT32: REDUCE_AS(float);
        case FLOAT16:
        case BFLOAT16:
            for (size_t i = 0; i < count; i++) {
                float a = widen(((uint16_t *)sum)[i], type), b = widen(((const uint16_t *)term)[i], type);
                ((uint16_t *)sum)[i] = narrow(COMBINE(a, b), type);
            }
            return SUCCESS;
    }
    return E_NOT_SUPPORTED;
}
