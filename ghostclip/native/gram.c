/* Squared norms of sums of outer products by Gram matrices (Lee & Kifer 2020, section 5): for left [B, T, p] and right
 * [B, T, d], sum_{s,t} (left_s . left_t) (right_s . right_t) for each example. Only the half s <= t is computed, in
 * blocks of 4 x 4 that never leave the registers and the first-level cache.
 *
 * This file reads itself twice, with REAL float and double; NAME(x) is x_float or x_double.
 */

#ifndef REAL

#include "vectors.h"

#define SIDE 4
#define STRIP_BYTES 16384
#define ROUND_UP(count, step) (((count) + (step) - 1) / (step) * (step))

#define REAL float
#define INTEGER int32_t
#define NAME(x) x##_float
#include "gram.c"

#undef REAL
#undef INTEGER
#undef NAME

#define REAL double
#define INTEGER int64_t
#define NAME(x) x##_double
#include "gram.c"

#else

#include "vectors.h"

static const INTEGER NAME(even)[16] = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30};

/* Rows [positions, width] of one example next to each other, zeros behind each row and below the last. */
static void NAME(gather)(REAL *rows, const REAL *from, long stride, long positions, long width, long padded) {
    for (long t = 0; t < positions; t++) {
        memcpy(rows + t * padded, from + t * stride, width * sizeof(REAL));
        memset(rows + t * padded + width, 0, (padded - width) * sizeof(REAL));
    }
    memset(rows + positions * padded, 0, (ROUND_UP(positions, SIDE) - positions) * padded * sizeof(REAL));
}

/* The sum of each of the SIDE x SIDE vectors: neighbours of two vectors are added into one, until they are all sums. */
INLINE void NAME(fold)(VEC *sums, REAL *found) {
#if defined(__clang__)
    for (int pair = 0; pair < SIDE * SIDE; pair++) {
        found[pair] = 0;
        for (long lane = 0; lane < LANES; lane++) found[pair] += sums[pair][lane];
    }
#else
    const INTS evens = *(const INTS *)NAME(even), odds = evens + 1;
#pragma GCC unroll 8
    for (long count = SIDE * SIDE / 2; count * LANES >= SIDE * SIDE; count /= 2)
#pragma GCC unroll 8
        for (long pair = 0; pair < count; pair++)
            sums[pair] = __builtin_shuffle(sums[2 * pair], sums[2 * pair + 1], evens) +
                         __builtin_shuffle(sums[2 * pair], sums[2 * pair + 1], odds);
    memcpy(found, sums, SIDE * SIDE * sizeof(REAL));
#endif
}

/* Inner products of SIDE rows with SIDE others. */
INLINE void NAME(products)(const REAL *a, const REAL *b, long padded, REAL *found) {
    VEC sums[SIDE * SIDE] = {0};
    for (long k = 0; k < padded; k += LANES) {
        VEC mine[SIDE];
#pragma GCC unroll 4
        for (int i = 0; i < SIDE; i++) mine[i] = *(const VEC *)(a + i * padded + k);
#pragma GCC unroll 4
        for (int j = 0; j < SIDE; j++) {
            const VEC other = *(const VEC *)(b + j * padded + k);
#pragma GCC unroll 4
            for (int i = 0; i < SIDE; i++) sums[SIDE * i + j] += mine[i] * other;
        }
    }
    NAME(fold)(sums, found);
}

/* squared [batch], and scale [batch]: sum_t |left_t|^2 |right_t|^2, for examples [first, last). Strides are those of
 * examples and positions. Returns 0, or 1 where there is no memory. */
int NAME(gram)(const REAL *left, long left_example, long left_position, const REAL *right, long right_example,
               long right_position, REAL *squared, REAL *scale, long positions, long outputs, long inputs, long first,
               long last) {
    const long rows = ROUND_UP(positions, SIDE), wide = ROUND_UP(outputs, LANES), narrow = ROUND_UP(inputs, LANES);
    /* As many rows as stay in the first-level cache while others pass by. */
    const long fit = STRIP_BYTES / ((wide + narrow) * sizeof(REAL)), strip = fit < SIDE ? SIDE : fit / SIDE * SIDE;
    REAL *lefts = aligned_alloc(BYTES, rows * (wide + narrow) * sizeof(REAL)), *rights = lefts + rows * wide;
    if (!lefts) return 1;
    for (long example = first; example < last; example++) {
        double total = 0, diagonal = 0;
        NAME(gather)(lefts, left + example * left_example, left_position, positions, outputs, wide);
        NAME(gather)(rights, right + example * right_example, right_position, positions, inputs, narrow);
        for (long start = 0; start < rows; start += strip)
            for (long s = 0; s < rows && s < start + strip; s += SIDE)
                for (long t = s > start ? s : start; t < rows && t < start + strip; t += SIDE) {
                    REAL of_left[SIDE * SIDE], of_right[SIDE * SIDE], sum = 0;
                    NAME(products)(lefts + s * wide, lefts + t * wide, wide, of_left);
                    NAME(products)(rights + s * narrow, rights + t * narrow, narrow, of_right);
                    for (int pair = 0; pair < SIDE * SIDE; pair++) sum += of_left[pair] * of_right[pair];
                    total += t > s ? 2 * sum : sum;
                    for (int i = 0; t == s && i < SIDE; i++)
                        diagonal += of_left[i * SIDE + i] * of_right[i * SIDE + i];
                }
        squared[example] = total;
        scale[example] = diagonal;
    }
    free(lefts);
    return 0;
}

#undef LANES
#undef VEC
#undef INTS

#endif
