/* Squared norms of sums of outer products by Gram matrices (Lee & Kifer 2020, section 5): for left [B, T, p] and right
 * [B, T, d], sum_{s,t} (left_s . left_t) (right_s . right_t) for each example. Only about the half s <= t is computed.
 *
 * It is read twice, with REAL float and double (twice.h); NAME(x) is x_float or x_double.
 */

#ifndef REAL

#include "vectors.h"
#include "panels.h"

/* Rows in a block: its sums take most of the registers, of which there are 32 of 64 bytes, or 16. */
#if BYTES == 64
#define BLOCK 8
#else
#define BLOCK 6
#endif
/* Features of a panel that stay in the first-level cache. */
#define DEPTH (8192 / BYTES)
/* Features that are taken between two looks at how many are left. */
#define STEPS 4
/* Panels that share one read of rows that are too many for the second-level cache, of about so many bytes. */
#define PANELS 4
#define CACHE (1 << 20)

#define THIS "gram.c"
#include "twice.h"

#else

#include "panels.h"

/* sums += products of one feature of rows and packed columns, of vectors [skipped, PANEL). */
INLINE void NAME(step)(const REAL *const *rows, const REAL *packed, long k, VEC sums[BLOCK][PANEL], const int skipped) {
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

/* into [BLOCK, COLUMNS] += inner products of rows with the packed columns, those of vectors [skipped, PANEL). */
INLINE void NAME(block)(const REAL *const *rows, const REAL *packed, long depth, REAL *into, const int skipped) {
    VEC sums[BLOCK][PANEL];
#pragma GCC unroll 8
    for (int i = 0; i < BLOCK; i++)
#pragma GCC unroll 2
        for (int v = skipped; v < PANEL; v++) sums[i][v] = *(VEC *)(into + (i * PANEL + v) * LANES);
    long k = 0;
#pragma GCC unroll 1
    for (; k + STEPS <= depth; k += STEPS)
#pragma GCC unroll 4
        for (long step = 0; step < STEPS; step++) NAME(step)(rows, packed, k + step, sums, skipped);
    for (; k < depth; k++) NAME(step)(rows, packed, k, sums, skipped);
#pragma GCC unroll 8
    for (int i = 0; i < BLOCK; i++)
#pragma GCC unroll 2
        for (int v = skipped; v < PANEL; v++) *(VEC *)(into + (i * PANEL + v) * LANES) = sums[i][v];
}

/* strips, one for each of so many panels from the one at start on, strip numbers apart: inner products [end, COLUMNS] of
 * each position up to the panel's last, end, with the panel's. Where a row's own column is behind a whole vector, that
 * vector's are left out: zeros. Some features of all rows are taken at a time, and serve all panels. */
static void NAME(fill)(REAL *strips, long strip, REAL *packed, const REAL *from, long stride, long width, long positions,
                       long start, long panels) {
    for (long panel = 0; panel < panels; panel++)
        memset(strips + panel * strip, 0,
               (LESSER(positions, start + (panel + 1) * COLUMNS) + BLOCK) * COLUMNS * sizeof(REAL));
    for (long k = 0; k < width; k += DEPTH) {
        const long depth = LESSER(DEPTH, width - k);
        for (long panel = 0; panel < panels; panel++) {
            const long column = start + panel * COLUMNS, end = LESSER(positions, column + COLUMNS);
            NAME(pack)(packed, from + column * stride + k, stride, end - column, depth);
            for (long row = 0; row < end; row += BLOCK) {
                const REAL *these[BLOCK];
                REAL *into = strips + panel * strip + row * COLUMNS;
                for (int i = 0; i < BLOCK; i++) these[i] = from + LESSER(row + i, end - 1) * stride + k;
                if (row >= column + LANES)
                    NAME(block)(these, packed, depth, into, 1);
                else
                    NAME(block)(these, packed, depth, into, 0);
            }
        }
    }
}

/* 0 for a row of zeros, 1 for finite numbers, 2 where there is another one. */
static int NAME(kind)(const REAL *row, long width) {
    INTS somes = {0}, others = {0};
    long k = 0;
    for (; k + LANES <= width; k += LANES) {
        const VEC these = *(const VEC *)(row + k);
        somes |= these != 0;
        others |= these * 0 != 0;
    }
    int some = 0, other = 0;
    for (long lane = 0; lane < LANES; lane++) some |= somes[lane] != 0, other |= others[lane] != 0;
    for (; k < width; k++) some |= row[k] != 0, other |= row[k] * 0 != 0;
    return other ? 2 : some;
}

/* Whether a position adds nothing: zeros on one side, beside finite numbers. */
INLINE int NAME(is_empty)(const REAL *left, const REAL *right, long outputs, long inputs) {
    const int own = NAME(kind)(left, outputs), other = NAME(kind)(right, inputs);
    return own < 2 && other < 2 && !(own && other);
}

/* squared [batch], scale [batch], which is sum_t |left_t|^2 |right_t|^2, and sizes [2, batch], sum_t |left_t|^2 and
 * sum_t |right_t|^2, for examples [first, last). Strides are those of examples and positions. An example's first and last
 * positions are left out where they add nothing, as padding does.
 * Returns 0, or 1 where there is no memory. */
int NAME(gram)(const REAL *left, long left_example, long left_position, const REAL *right, long right_example,
               long right_position, REAL *squared, REAL *scale, REAL *sizes, long batch, long positions, long outputs,
               long inputs, long first, long last) {
    const long strip = (positions + BLOCK) * COLUMNS, all = (positions + COLUMNS - 1) / COLUMNS;
    const long wide = outputs > inputs ? outputs : inputs;
    const long most = positions * wide * (long)sizeof(REAL) > CACHE ? LESSER(PANELS, all) : 1;
    void *whole;
    REAL *packed = aligned((DEPTH * COLUMNS + 2 * most * strip) * sizeof(REAL), &whole);
    if (!packed) return 1;
    REAL *lefts = packed + DEPTH * COLUMNS, *rights = lefts + most * strip;
    for (long example = first; example < last; example++) {
        const REAL *of_left = left + example * left_example, *of_right = right + example * right_example;
        double twice = 0, diagonal = 0, of_lefts = 0, of_rights = 0;
        long count = positions;
        while (count && NAME(is_empty)(of_left + (count - 1) * left_position, of_right + (count - 1) * right_position,
                                       outputs, inputs))
            count--;
        for (; count && NAME(is_empty)(of_left, of_right, outputs, inputs); count--) {
            of_left += left_position;
            of_right += right_position;
        }
        const long panels = (count + COLUMNS - 1) / COLUMNS;
        for (long panel = 0; panel < panels; panel++) {
            const long start = panel * COLUMNS, end = LESSER(count, start + COLUMNS), place = panel % most;
            if (!place) {
                const long some = LESSER(most, panels - panel);
                NAME(fill)(lefts, strip, packed, of_left, left_position, outputs, count, start, some);
                NAME(fill)(rights, strip, packed, of_right, right_position, inputs, count, start, some);
            }
            VEC above = {0};
            for (long s = 0; s < end; s++) {
                const REAL *l = lefts + place * strip + s * COLUMNS, *r = rights + place * strip + s * COLUMNS;
                const INTEGER own = s < start ? -1 : s - start;
#pragma GCC unroll 2
                for (INTEGER v = 0; v < PANEL; v++) {
                    const VEC pairs = ((const VEC *)l)[v] * ((const VEC *)r)[v];
                    const INTS behind = *(const INTS *)NAME(numbers) + v * (INTEGER)LANES > own;
                    above += (VEC)((INTS)pairs & behind);
                }
                if (own >= 0) {
                    diagonal += (double)l[own] * r[own];
                    of_lefts += l[own];
                    of_rights += r[own];
                }
                if (s % BLOCK == 0 || s == end - 1) {
                    for (long lane = 0; lane < LANES; lane++) twice += above[lane];
                    above = (VEC){0};
                }
            }
        }
        squared[example] = 2 * twice + diagonal;
        scale[example] = diagonal;
        sizes[example] = of_lefts;
        sizes[batch + example] = of_rights;
    }
    free(whole);
    return 0;
}

/* The same where positions are rows of all examples one after another: those of example i are starts[i] to starts[i+1]. */
int NAME(ragged_gram)(const REAL *left, long left_row, const REAL *right, long right_row, const int64_t *starts,
                      REAL *squared, REAL *scale, REAL *sizes, long batch, long outputs, long inputs, long first,
                      long last) {
    for (long example = first; example < last; example++) {
        const long start = starts[example], rows = starts[example + 1] - start;
        squared[example] = scale[example] = sizes[example] = sizes[batch + example] = 0;
        if (rows && NAME(gram)(left + start * left_row, 0, left_row, right + start * right_row, 0, right_row,
                               squared + example, scale + example, sizes + example, batch, rows, outputs, inputs, 0, 1))
            return 1;
    }
    return 0;
}

#undef COLUMNS

#endif
