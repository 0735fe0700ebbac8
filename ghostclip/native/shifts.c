/* Per-example gradients of a convolution's weights from the images as they lie, without patches: the weight of output p
 * at input c and tap k has the gradient sum_t gradient[p, t] image[c, shift_k(t)] (Lee & Kifer 2020, section 5.2, where
 * the sum is a product with patches).
 *
 * It is read twice, with REAL float and double (twice.h); NAME(x) is x_float or x_double.
 */

#ifndef REAL

#include "vectors.h"
#include "panels.h"

/* Rows in a block: its sums leave room in the registers, and some blocks are a whole square to be turned. */
#if BYTES == 64
#define BLOCK 8
#else
#define BLOCK 4
#endif
/* Weights of an output that are formed together: whole blocks of rows, and whole squares to be turned. */
#define ROWS(lanes) ((lanes) > BLOCK ? (lanes) : BLOCK)

#define THIS "shifts.c"
#include "twice.h"

#else

#include "panels.h"

/* What a convolution does along one axis: size places out of length. */
struct NAME(line) {
    long length, size, taps, pad, step, stride;
};

/* into [BLOCK, COLUMNS]: sums over places (y, x) of rows[i][y * down + x * along] times the packed columns, of which so
 * many vectors are formed. */
INLINE void NAME(products)(const REAL *const *rows, const REAL *packed, long lines, long down, long places, long along,
                           REAL *into, const int vectors) {
    VEC sums[BLOCK][PANEL];
    const REAL *these[BLOCK];
#pragma GCC unroll 8
    for (int i = 0; i < BLOCK; i++) {
        these[i] = rows[i];
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++) sums[i][v] = (VEC){0};
    }
    for (long y = 0; y < lines; y++) {
#pragma GCC unroll 4
        for (long x = 0; x < places; x++) {
            VEC columns[PANEL];
#pragma GCC unroll 2
            for (int v = 0; v < vectors; v++) columns[v] = *(const VEC *)(packed + v * LANES);
#pragma GCC unroll 8
            for (int i = 0; i < BLOCK; i++) {
                const REAL mine = these[i][x * along];
#pragma GCC unroll 2
                for (int v = 0; v < vectors; v++) sums[i][v] += mine * columns[v];
            }
            packed += COLUMNS;
        }
#pragma GCC unroll 8
        for (int i = 0; i < BLOCK; i++) these[i] += down;
    }
#pragma GCC unroll 8
    for (int i = 0; i < BLOCK; i++)
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++) *(VEC *)(into + (i * PANEL + v) * LANES) = sums[i][v];
}

/* The same for a convolution over framed images; the loops are compiled for what they are given as numbers. */
static void NAME(block_of)(const REAL *const *rows, const REAL *packed, const struct NAME(line) *down,
                           const struct NAME(line) *along, REAL *into, int vectors) {
    const long lower = down->stride * (along->length + 2 * along->pad);
    if (along->stride == 1 && vectors == PANEL)
        NAME(products)(rows, packed, down->size, lower, along->size, 1, into, PANEL);
    else if (along->stride == 1)
        NAME(products)(rows, packed, down->size, lower, along->size, 1, into, 1);
    else if (vectors == PANEL)
        NAME(products)(rows, packed, down->size, lower, along->size, along->stride, into, PANEL);
    else
        NAME(products)(rows, packed, down->size, lower, along->size, along->stride, into, 1);
}

/* The sum of squares of the first rows of tile [.., COLUMNS]. */
static double NAME(squares)(const REAL *tile, long rows) {
    VEC found = {0};
    for (long k = 0; k < rows * COLUMNS; k += LANES) found += *(const VEC *)(tile + k) * *(const VEC *)(tile + k);
    double total = 0;
    for (long lane = 0; lane < LANES; lane++) total += found[lane];
    return total;
}

/* kept [outputs, weights], so many of each, from tile [ROWS, COLUMNS]: weights as rows, outputs as columns. */
static void NAME(turn)(REAL *kept, const REAL *tile, long weights, long rows, long outputs) {
    for (long row = 0; row < rows; row += LANES)
        for (long v = 0; v * LANES < outputs; v++) {
            const long some = LESSER(LANES, outputs - v * LANES), wide = LESSER(LANES, rows - row);
            REAL *into = kept + v * LANES * weights + row;
            VEC square[BYTES / sizeof(REAL)];
#pragma GCC unroll 16
            for (long j = 0; j < LANES; j++) square[j] = *(const VEC *)(tile + (row + j) * COLUMNS + v * LANES);
            NAME(transpose)(square);
            if (wide == LANES)
#pragma GCC unroll 16
                for (long j = 0; j < LANES; j++) {
                    if (j < some) *(VEC *)(into + j * weights) = square[j];
                }
            else
                for (long j = 0; j < some; j++) memcpy(into + j * weights, &square[j], wide * sizeof(REAL));
        }
}

/* framed [inputs, height + 2 pad, width + 2 pad]: an image with zeros around it. With ``last`` its channels are its last
 * axis. */
static void NAME(frame)(REAL *framed, const REAL *image, long inputs, struct NAME(line) down, struct NAME(line) along,
                        int last) {
    const long width = along.length + 2 * along.pad, height = down.length + 2 * down.pad;
    for (long c = 0; c < inputs; c++)
        for (long y = 0; y < down.length; y++) {
            REAL *into = framed + (c * height + down.pad + y) * width + along.pad;
            if (last) {
                const REAL *from = image + y * along.length * inputs + c;
                for (long x = 0; x < along.length; x++) into[x] = from[x * inputs];
            } else {
                memcpy(into, image + (c * down.length + y) * along.length, along.length * sizeof(REAL));
            }
        }
}

/* packed [places, COLUMNS]: so many of a gradient's outputs, which are its last axis, and zeros beside them. */
static void NAME(gather)(REAL *packed, const REAL *gradient, long outputs, long count, long places) {
    for (long place = 0; place < places; place++, packed += COLUMNS, gradient += outputs) {
        memset(packed, 0, COLUMNS * sizeof(REAL));
        memcpy(packed, gradient, count * sizeof(REAL));
    }
}

/* squared [batch] and, unless it is null, kept [batch, outputs, inputs, row_taps, column_taps], for a convolution over
 * images [batch, inputs, height, width] with gradients [batch, outputs, rows, columns], of examples [first, last). Where
 * images_last or gradients_last isn't 0, channels are the last axis in memory. Returns 0, or 1 where there is no memory. */
int NAME(shifts)(const REAL *images, const REAL *gradients, REAL *squared, REAL *kept, long inputs, long outputs,
                 long height, long width, long rows, long columns, long row_taps, long column_taps, long row_pad,
                 long column_pad, long row_step, long column_step, long row_stride, long column_stride,
                 long images_last, long gradients_last, long first, long last) {
    const struct NAME(line) down = {height, rows, row_taps, row_pad, row_step, row_stride};
    const struct NAME(line) along = {width, columns, column_taps, column_pad, column_step, column_stride};
    const long tall = height + 2 * row_pad, broad = width + 2 * column_pad, places = rows * columns;
    const long weights = inputs * row_taps * column_taps, group = ROWS(LANES);
    void *whole;
    REAL *packed = aligned((places + group) * COLUMNS * sizeof(REAL), &whole);
    REAL *framed = calloc(inputs * tall * broad, sizeof(REAL));
    const REAL **taps = malloc((weights + group) * sizeof(REAL *));
    if (!packed || !framed || !taps) {
        free(whole);
        free(framed);
        free(taps);
        return 1;
    }
    REAL *tile = packed + places * COLUMNS;
    /* What is behind the last weight repeats it. */
    for (long w = 0; w < weights + group; w++) {
        const long which = LESSER(w, weights - 1), c = which / (row_taps * column_taps);
        const long y = which / column_taps % row_taps * row_step, x = which % column_taps * column_step;
        taps[w] = framed + (c * tall + y) * broad + x;
    }
    for (long example = first; example < last; example++) {
        NAME(frame)(framed, images + example * inputs * height * width, inputs, down, along, images_last != 0);
        double total = 0;
        for (long p = 0; p < outputs; p += COLUMNS) {
            const long count = LESSER(COLUMNS, outputs - p);
            const int vectors = count > LANES ? PANEL : 1;
            if (gradients_last)
                NAME(gather)(packed, gradients + example * outputs * places + p, outputs, count, places);
            else
                NAME(pack)(packed, gradients + (example * outputs + p) * places, places, count, places);
            memset(tile, 0, group * COLUMNS * sizeof(REAL));
            for (long w = 0; w < weights; w += group) {
                const long some = LESSER(group, weights - w);
                for (long block = 0; block < group; block += BLOCK)
                    NAME(block_of)(taps + w + block, packed, &down, &along, tile + block * COLUMNS, vectors);
                total += NAME(squares)(tile, some);
                if (kept) NAME(turn)(kept + (example * outputs + p) * weights + w, tile, weights, some, count);
            }
        }
        squared[example] = total;
    }
    free(whole);
    free(framed);
    free(taps);
    return 0;
}

#undef COLUMNS

#endif
