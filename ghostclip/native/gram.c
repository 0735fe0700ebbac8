/* Squared norms of sums of outer products by Gram matrices (Lee & Kifer 2020, section 5): for left [B, T, p] and right
 * [B, T, d], sum_{s,t} (left_s . left_t) (right_s . right_t) for each example. Only about the half s <= t is computed: a
 * panel of columns t at a time, against blocks of rows s up to the panel's own.
 *
 * This file reads itself twice, with REAL float and double; NAME(x) is x_float or x_double.
 */

#ifndef REAL

#include "vectors.h"

/* Vectors in a panel of columns, and the features of it that stay in the first-level cache. */
#define PANEL 2
#define DEPTH 128
/* Rows in a block: as many as leave room in the registers for a panel's columns. */
#if BYTES == 64
#define BLOCK 8
#else
#define BLOCK 4
#endif

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

#define COLUMNS (PANEL * LANES)

/* LANES vectors as rows of a square: rows and columns exchanged, by as many perfect shuffles as halve LANES. */
INLINE void NAME(transpose)(VEC *rows) {
    VEC next[BYTES / sizeof(REAL)];
#if defined(__clang__)
    for (long row = 0; row < LANES; row++)
        for (long lane = 0; lane < LANES; lane++) next[row][lane] = rows[lane][row];
    memcpy(rows, next, sizeof(next));
#else
    const INTS numbers = *(const INTS *)NAME(numbers), low = numbers / 2 + numbers % 2 * (INTEGER)LANES;
#pragma GCC unroll 4
    for (long step = 1; step < LANES; step *= 2) {
#pragma GCC unroll 16
        for (long row = 0; row < LANES / 2; row++) {
            next[2 * row] = __builtin_shuffle(rows[row], rows[row + LANES / 2], low);
            next[2 * row + 1] = __builtin_shuffle(rows[row], rows[row + LANES / 2], low + (INTEGER)(LANES / 2));
        }
#pragma GCC unroll 16
        for (long row = 0; row < LANES; row++) rows[row] = next[row];
    }
#endif
}

/* packed [depth, COLUMNS]: positions of from [count, depth] as columns, zeros beside the last. */
static void NAME(pack)(REAL *packed, const REAL *from, long stride, long count, long depth) {
    for (long v = 0; v < PANEL; v++)
        for (long k = 0; k < depth; k += LANES) {
            VEC square[BYTES / sizeof(REAL)];
            const long wide = depth - k < LANES ? depth - k : LANES;
#pragma GCC unroll 16
            for (long row = 0; row < LANES; row++) {
                const REAL *at = from + (v * LANES + row) * stride + k;
                square[row] = (VEC){0};
                if (v * LANES + row >= count) continue;
                if (wide == LANES)
                    square[row] = *(const VEC *)at;
                else
                    memcpy(&square[row], at, wide * sizeof(REAL));
            }
            NAME(transpose)(square);
            for (long j = 0; j < wide; j++) *(VEC *)(packed + (k + j) * COLUMNS + v * LANES) = square[j];
        }
}

/* into [BLOCK, COLUMNS] += inner products of rows with the packed columns, those of vectors [skipped, PANEL). */
INLINE void NAME(block)(const REAL *const *rows, const REAL *packed, long depth, REAL *into, const int skipped) {
    VEC sums[BLOCK][PANEL];
#pragma GCC unroll 8
    for (int i = 0; i < BLOCK; i++)
#pragma GCC unroll 2
        for (int v = skipped; v < PANEL; v++) sums[i][v] = *(VEC *)(into + (i * PANEL + v) * LANES);
    for (long k = 0; k < depth; k++) {
        VEC columns[PANEL];
#pragma GCC unroll 2
        for (int v = skipped; v < PANEL; v++) columns[v] = *(const VEC *)(packed + (k * PANEL + v) * LANES);
#pragma GCC unroll 8
        for (int i = 0; i < BLOCK; i++) {
            const REAL mine = rows[i][k];
#pragma GCC unroll 2
            for (int v = skipped; v < PANEL; v++) sums[i][v] += mine * columns[v];
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < BLOCK; i++)
#pragma GCC unroll 2
        for (int v = skipped; v < PANEL; v++) *(VEC *)(into + (i * PANEL + v) * LANES) = sums[i][v];
}

/* strip [start + count, COLUMNS]: inner products of each position up to the panel's last with the panel's, positions
 * [start, start + count). Where a row's own column is behind a whole vector, that vector's are left out: zeros. */
static void NAME(fill)(REAL *strip, REAL *packed, const REAL *from, long stride, long width, long start, long count) {
    const long rows = start + count;
    memset(strip, 0, (rows + BLOCK) * COLUMNS * sizeof(REAL));
    for (long k = 0; k < width; k += DEPTH) {
        const long depth = width - k < DEPTH ? width - k : DEPTH;
        NAME(pack)(packed, from + start * stride + k, stride, count, depth);
        for (long row = 0; row < rows; row += BLOCK) {
            const REAL *these[BLOCK];
            for (int i = 0; i < BLOCK; i++) these[i] = from + (row + i < rows ? row + i : rows - 1) * stride + k;
            if (row >= start + LANES)
                NAME(block)(these, packed, depth, strip + row * COLUMNS, 1);
            else
                NAME(block)(these, packed, depth, strip + row * COLUMNS, 0);
        }
    }
}

/* squared [batch], and scale [batch]: sum_t |left_t|^2 |right_t|^2, for examples [first, last). Strides are those of
 * examples and positions. Returns 0, or 1 where there is no memory. */
int NAME(gram)(const REAL *left, long left_example, long left_position, const REAL *right, long right_example,
               long right_position, REAL *squared, REAL *scale, long positions, long outputs, long inputs, long first,
               long last) {
    const long strip = (positions + BLOCK) * COLUMNS;
    REAL *packed = aligned_alloc(BYTES, (DEPTH * COLUMNS + 2 * strip) * sizeof(REAL));
    if (!packed) return 1;
    REAL *lefts = packed + DEPTH * COLUMNS, *rights = lefts + strip;
    for (long example = first; example < last; example++) {
        const REAL *of_left = left + example * left_example, *of_right = right + example * right_example;
        double twice = 0, diagonal = 0;
        for (long start = 0; start < positions; start += COLUMNS) {
            const long count = positions - start < COLUMNS ? positions - start : COLUMNS;
            NAME(fill)(lefts, packed, of_left, left_position, outputs, start, count);
            NAME(fill)(rights, packed, of_right, right_position, inputs, start, count);
            VEC above = {0};
            for (long s = 0; s < start + count; s++) {
                const REAL *l = lefts + s * COLUMNS, *r = rights + s * COLUMNS;
                const INTEGER own = s < start ? -1 : s - start;
#pragma GCC unroll 2
                for (INTEGER v = 0; v < PANEL; v++) {
                    const VEC pairs = ((const VEC *)l)[v] * ((const VEC *)r)[v];
                    const INTS behind = *(const INTS *)NAME(numbers) + v * (INTEGER)LANES > own;
                    above += (VEC)((INTS)pairs & behind);
                }
                if (own >= 0) diagonal += (double)l[own] * r[own];
                if (s % BLOCK == 0 || s == start + count - 1) {
                    for (long lane = 0; lane < LANES; lane++) twice += above[lane];
                    above = (VEC){0};
                }
            }
        }
        squared[example] = 2 * twice + diagonal;
        scale[example] = diagonal;
    }
    free(packed);
    return 0;
}

#undef COLUMNS
#undef LANES
#undef VEC
#undef INTS

#endif
