/* Linear layers on one position an example, all layers of a batch in one call: squared norms of both factors, weighted
 * sums of their gradients; and for any layers the norms of groups and the weights that clip them.
 *
 * A layer is LAYER numbers: left [batch, outputs], its row stride, outputs, right [batch, inputs], its row stride,
 * inputs, NAMES, and for `sums` weights [batch] and what is asked for, or 0: the weight's sum [outputs, inputs], the
 * bias' sum [outputs], the weighted left [batch, outputs] for a product elsewhere. For `clip` the weights are those of
 * the layer's group.
 *
 * It is read twice, with REAL float and double (twice.h); NAME(x) is x_float or x_double.
 */

#ifndef REAL

#include <math.h>

#include "vectors.h"

#define LAYER 11
#define BLOCK 3
#define WEIGHT 1
#define BIAS 2
/* Numbers of a row after which their sum goes on in double precision. */
#define PART 8192
/* Columns whose sums stay in the first-level cache, and rows after which a sum is put by, for precision. */
#define COLUMNS 512
#define STRETCH 128
/* Vectors in a panel of inputs, and outputs beside it: as many sums as there are registers. */
#define PANEL 3
#if BYTES == 64
#define TALL 8
#else
#define TALL 4
#endif

#define THIS "affine.c"
#include "twice.h"

#else

/* Squares of the numbers of a row, added up lane by lane. */
INLINE VEC NAME(squares)(const REAL *row, long count) {
    VEC sums[4] = {0}, last = {0};
    const long rest = count % LANES;
    long k = 0;
    for (; k + 4 * LANES <= count; k += 4 * LANES)
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            const VEC some = *(const VEC *)(row + k + i * LANES);
            sums[i] += some * some;
        }
    for (; k + LANES <= count; k += LANES) {
        const VEC some = *(const VEC *)(row + k);
        sums[0] += some * some;
    }
    if (count >= LANES) {
        /* The last full vector, without what was added already. */
        const INTS fresh = *(const INTS *)NAME(numbers) >= (INTEGER)(LANES - rest);
        last = (VEC)(*(const INTS *)(row + count - LANES) & fresh);
    } else
        memcpy(&last, row + k, rest * sizeof(REAL));
    return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + last * last;
}

/* Sums of the squares of up to SUMS rows. */
static void NAME(row_squares)(const REAL *rows, long stride, long count, long width, double *found) {
    for (long row = 0; row < SUMS; row++) found[row] = 0;
    for (long start = 0; start < width; start += PART) {
        VEC sums[SUMS] = {0};
        REAL folded[SUMS];
        for (long row = 0; row < count; row++)
            sums[row] = NAME(squares)(rows + row * stride + start, LESSER(PART, width - start));
        NAME(fold)(sums, folded);
        for (long row = 0; row < SUMS; row++) found[row] += folded[row];
    }
}

/* Sums of the squares of up to SUMS rows of both factors; of the right one where a weight is asked for. */
static void NAME(factors)(const int64_t *layer, long first, long count, double *lefts, double *rights) {
    const REAL *left = (const REAL *)(intptr_t)layer[0], *right = (const REAL *)(intptr_t)layer[3];
    NAME(row_squares)(left + first * layer[1], layer[1], count, layer[2], lefts);
    if (layer[6] & WEIGHT) NAME(row_squares)(right + first * layer[4], layer[4], count, layer[5], rights);
}

/* squared: a row [batch] for each name of each layer, that of the weight before that of the bias. */
void NAME(squared_norms)(const int64_t *layers, long count, long batch, REAL *squared) {
    for (const int64_t *layer = layers; layer < layers + count * LAYER; layer += LAYER) {
        REAL *of_weight = layer[6] & WEIGHT ? squared : 0, *of_bias = 0;
        if (of_weight) squared += batch;
        if (layer[6] & BIAS) of_bias = squared, squared += batch;
        for (long first = 0; first < batch; first += SUMS) {
            const long some = LESSER(SUMS, batch - first);
            double lefts[SUMS], rights[SUMS];
            NAME(factors)(layer, first, some, lefts, rights);
            for (long row = 0; row < some; row++) {
                if (of_weight) of_weight[first + row] = lefts[row] * rights[row];
                if (of_bias) of_bias[first + row] = lefts[row];
            }
        }
    }
}

/* Each left times its weights where that is asked for, and the bias' sum. */
static void NAME(scale)(const int64_t *layer, long batch) {
    const REAL *left = (const REAL *)(intptr_t)layer[0], *weights = (const REAL *)(intptr_t)layer[7];
    REAL *sums = (REAL *)(intptr_t)layer[9], *scaled = (REAL *)(intptr_t)layer[10];
    for (long column = 0; column < layer[2]; column += COLUMNS) {
        const long some = LESSER(COLUMNS, layer[2] - column);
        REAL total[COLUMNS] = {0};
        for (long first = 0; first < batch; first += STRETCH) {
            REAL part[COLUMNS] = {0};
            for (long row = first; row < batch && row < first + STRETCH; row++) {
                const REAL *from = left + row * layer[1] + column, weight = weights[row];
                if (scaled) {
                    REAL *to = scaled + row * layer[2] + column;
                    for (long k = 0; k < some; k++) part[k] += to[k] = weight * from[k];
                } else {
                    for (long k = 0; k < some; k++) part[k] += weight * from[k];
                }
            }
            for (long k = 0; k < some; k++) total[k] += part[k];
        }
        if (sums) memcpy(sums + column, total, some * sizeof(REAL));
    }
}

/* sums [tall, wide] put or added where less than whole vectors are wide. A function of its own, and not a part of every
 * tile: with it there, compiling took 8 s. */
static __attribute__((noinline)) void NAME(put)(const REAL *found, long tall, REAL *sums, long apart, long wide,
                                                int more) {
    for (long i = 0; i < tall; i++, found += PANEL * LANES, sums += apart)
        for (long k = 0; k < wide; k++) sums[k] = more ? sums[k] + found[k] : found[k];
}

/* sums [tall, wide] of products of columns of left and panel [count, PANEL * LANES]; added to those before, if any. */
INLINE void NAME(tile)(const REAL *left, long stride, const REAL *panel, long count, REAL *sums, long apart, long wide,
                       int more, const int tall, const int vectors) {
    VEC total[TALL][PANEL];
    REAL edge[TALL * PANEL * (BYTES / sizeof(REAL))];
#pragma GCC unroll 8
    for (int i = 0; i < tall; i++)
#pragma GCC unroll 3
        for (int v = 0; v < vectors; v++) total[i][v] = (VEC){0};
    for (long k = 0; k < count; k++, left += stride, panel += PANEL * LANES) {
        VEC right[PANEL];
#pragma GCC unroll 3
        for (int v = 0; v < vectors; v++) right[v] = *(const VEC *)(panel + v * LANES);
#pragma GCC unroll 8
        for (int i = 0; i < tall; i++)
#pragma GCC unroll 3
            for (int v = 0; v < vectors; v++) total[i][v] += left[i] * right[v];
    }
    if (wide < vectors * LANES) {
#pragma GCC unroll 8
        for (int i = 0; i < tall; i++)
#pragma GCC unroll 3
            for (int v = 0; v < vectors; v++) *(VEC *)(edge + (i * PANEL + v) * LANES) = total[i][v];
        NAME(put)(edge, tall, sums, apart, wide, more);
        return;
    }
#pragma GCC unroll 8
    for (int i = 0; i < tall; i++, sums += apart)
#pragma GCC unroll 3
        for (int v = 0; v < vectors; v++) {
            REAL *into = sums + v * LANES;
            if (more) total[i][v] += *(const VEC *)into;
            *(VEC *)into = total[i][v];
        }
}

#define TILES(tall)                                                                                    \
    for (; outputs - row >= tall; row += tall) {                                                       \
        const REAL *left = lefts + row;                                                                \
        REAL *sums = found + row * inputs;                                                             \
        if (vectors == 3)                                                                              \
            NAME(tile)(left, stride, panel, some, sums, inputs, wide, first > 0, tall, 3);             \
        else if (vectors == 2)                                                                         \
            NAME(tile)(left, stride, panel, some, sums, inputs, wide, first > 0, tall, 2);             \
        else                                                                                           \
            NAME(tile)(left, stride, panel, some, sums, inputs, wide, first > 0, tall, 1);             \
    }

/* The weight's sum: panels of weighted inputs, which stay in the cache, against all outputs. */
static void NAME(multiply)(const int64_t *layer, long batch) {
    const long stride = layer[1], outputs = layer[2], inputs = layer[5];
    const REAL *weights = (const REAL *)(intptr_t)layer[7];
    for (long column = 0; column < inputs; column += PANEL * LANES) {
        const long wide = LESSER(PANEL * LANES, inputs - column), vectors = (wide + LANES - 1) / LANES;
        REAL *found = (REAL *)(intptr_t)layer[8] + column, panel[STRETCH * PANEL * LANES];
        for (long first = 0; first == 0 || first < batch; first += STRETCH) { /* zeros for no example */
            const REAL *lefts = (const REAL *)(intptr_t)layer[0] + first * stride;
            const REAL *right = (const REAL *)(intptr_t)layer[3] + first * layer[4] + column;
            const long some = LESSER(STRETCH, batch - first);
            for (long k = 0; k < some; k++, right += layer[4]) {
                REAL *to = panel + k * PANEL * LANES;
                if (wide == PANEL * LANES)
#pragma GCC unroll 3
                    for (long v = 0; v < PANEL * LANES; v += LANES)
                        *(VEC *)(to + v) = weights[first + k] * *(const VEC *)(right + v);
                else
                    for (long j = 0; j < vectors * LANES; j++) to[j] = j < wide ? weights[first + k] * right[j] : 0;
            }
            long row = 0;
#if TALL == 8
            TILES(8)
#endif
            TILES(4)
            TILES(2)
            TILES(1)
        }
    }
}
#undef TILES

/* What is asked for of each layer's weighted sums. */
void NAME(sums)(const int64_t *layers, long count, long batch) {
    for (const int64_t *layer = layers; layer < layers + count * LAYER; layer += LAYER) {
        if (layer[9] || layer[10]) NAME(scale)(layer, batch);
        if (layer[8]) NAME(multiply)(layer, batch);
    }
}

/* norms [groups, batch] from squared norms: each of count blocks is a pointer to [rows, batch], the number of its rows,
 * and whether it is the last one of its group. */
void NAME(norms)(const int64_t *blocks, long count, long batch, REAL *norms) {
    const int64_t *behind = blocks + count * BLOCK;
    for (const int64_t *group = blocks, *next; group < behind; group = next, norms += batch) {
        for (next = group; !next[2]; next += BLOCK) {}
        next += BLOCK;
        for (long first = 0; first < batch; first += COLUMNS) {
            const long some = LESSER(COLUMNS, batch - first);
            double total[COLUMNS] = {0};
            for (const int64_t *block = group; block < next; block += BLOCK) {
                const REAL *squared = (const REAL *)(intptr_t)block[0] + first;
                for (long row = 0; row < block[1]; row++, squared += batch)
                    for (long k = 0; k < some; k++) total[k] += squared[k];
            }
            for (long k = 0; k < some; k++) norms[first + k] = sqrt(total[k]);
        }
    }
}

/* Whether all numbers are finite. */
long NAME(finite)(const REAL *numbers, long count) {
    long fine = 1;
    for (long k = 0; k < count; k++) fine &= numbers[k] - numbers[k] == 0;
    return fine;
}

/* min(1, bound / norm) for norms [groups, batch], with a bound for each group; 1 for a norm of zero, NaN for NaN. */
void NAME(weights)(const REAL *norms, const double *bounds, long groups, long batch, REAL *weights) {
    for (long group = 0; group < groups; group++, norms += batch, weights += batch) {
        const REAL most = bounds[group];
        for (long k = 0; k < batch; k++) {
            const REAL weight = most / norms[k];
            weights[k] = weight > 1 ? 1 : weight;
        }
    }
}

#endif
