/* Gradients that fall on a few rows of a table (embeddings): squared norms of each example's sums of rows, and the
 * weighted sum of all of them. Positions of one example with the same index are chained; a row that stands alone is
 * read where it is, and no sum takes more memory than one row.
 *
 * It is read twice, with REAL float and double (twice.h); NAME(x) is x_float or x_double.
 */

#ifndef REAL

#include "vectors.h"

#define NONE -1L
/* So many gradients of one row are added up as they are. */
#define FEW 64

/* Where an index that differs from most others may be found first. */
INLINE long place_of(long index, long mask) {
    return (long)(((uint64_t)index * UINT64_C(0x9E3779B97F4A7C15)) >> 20) & mask;
}

#define THIS "rows.c"
#include "twice.h"

#else

INLINE double NAME(square)(const REAL *row, long width) {
    VEC sums = {0};
    double total = 0;
    long k = 0;
    for (; k + LANES <= width; k += LANES) {
        const VEC part = *(const VEC *)(row + k);
        sums += part * part;
    }
    for (long lane = 0; lane < LANES; lane++) total += sums[lane];
    for (; k < width; k++) total += (double)row[k] * row[k];
    return total;
}

/* squared [batch] for indices [batch, positions] and gradients [batch, positions, width], of which examples
 * [first, last); and sizes [batch], the sum of all rows' own squared norms. Strides are those of examples and
 * positions. Returns 0, or 1 where there is no memory. */
int NAME(rows_squared)(const int64_t *indices, long index_example, long index_position, const REAL *gradients,
                       long example_stride, long position_stride, REAL *squared, REAL *sizes, long positions, long width,
                       long first, long last) {
    long places = 16;
    while (places < 2 * positions) places *= 2;
    /* table: the first position of each chain; heads: those in order; ends and next: by position. */
    long *table = malloc((places + 3 * positions) * sizeof(long));
    REAL *sum = malloc(width * sizeof(REAL));
    if (!table || !sum) {
        free(table);
        free(sum);
        return 1;
    }
    long *heads = table + places, *ends = heads + positions, *next = ends + positions;
    for (long example = first; example < last; example++) {
        const int64_t *index = indices + example * index_example;
        const REAL *rows = gradients + example * example_stride;
        long chains = 0;
        double total = 0, size = 0;
        for (long place = 0; place < places; place++) table[place] = NONE;
        for (long t = 0; t < positions; t++) {
            const long mine = index[t * index_position];
            long place = place_of(mine, places - 1);
            next[t] = NONE;
            while (table[place] != NONE && index[table[place] * index_position] != mine)
                place = (place + 1) & (places - 1);
            if (table[place] == NONE)
                table[place] = heads[chains++] = t;
            else
                next[ends[table[place]]] = t;
            ends[table[place]] = t;
        }
        for (long chain = 0; chain < chains; chain++) {
            const REAL *row = rows + heads[chain] * position_stride;
            const double own = NAME(square)(row, width);
            size += own;
            if (next[heads[chain]] == NONE) {
                total += own;
                continue;
            }
            memcpy(sum, row, width * sizeof(REAL));
            for (long t = next[heads[chain]]; t != NONE; t = next[t]) {
                row = rows + t * position_stride;
                size += NAME(square)(row, width);
                for (long k = 0; k < width; k++) sum[k] += row[k];
            }
            total += NAME(square)(sum, width);
        }
        squared[example] = total;
        sizes[example] = size;
    }
    free(table);
    free(sum);
    return 0;
}

/* table [rows, width], of zeros, += weights[b] * gradients[b, t] at row indices[b, t], for columns [first, last).
 * A row on which more than FEW gradients fall is added up in double: in float one example could change how hundreds of
 * thousands of others are rounded, each a little. Returns 0, or 1 where there is no memory. */
int NAME(rows_added)(const int64_t *indices, long index_example, long index_position, const REAL *gradients,
                     long example_stride, long position_stride, const REAL *weights, REAL *table, long rows, long batch,
                     long positions, long width, long first, long last) {
    /* Of each row how many gradients fall on it; then 1 + its number among those in double, or 0. */
    long *found = calloc(rows + 1, sizeof(long)), many = 0;
    if (!found) return 1;
    for (long example = 0; example < batch; example++)
        for (long t = 0; t < positions; t++) found[indices[example * index_example + t * index_position]]++;
    for (long row = 0; row < rows; row++) found[row] = found[row] > FEW ? ++many : 0;
    double *sums = calloc(many * (last - first) + 1, sizeof(double));
    if (!sums) {
        free(found);
        return 1;
    }
    for (long example = 0; example < batch; example++) {
        const REAL weight = weights[example];
        for (long t = 0; t < positions; t++) {
            const REAL *from = gradients + example * example_stride + t * position_stride;
            const long row = indices[example * index_example + t * index_position];
            if (found[row]) {
                double *sum = sums + (found[row] - 1) * (last - first) - first;
                for (long k = first; k < last; k++) sum[k] += (double)weight * from[k];
            } else {
                REAL *into = table + row * width;
                for (long k = first; k < last; k++) into[k] += weight * from[k];
            }
        }
    }
    for (long row = 0; row < rows && many; row++) {
        const double *sum = sums + (found[row] - 1) * (last - first) - first;
        for (long k = first; k < last && found[row]; k++) table[row * width + k] = (REAL)sum[k];
    }
    free(found);
    free(sums);
    return 0;
}

#endif
