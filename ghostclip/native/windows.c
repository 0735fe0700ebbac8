/* Squared norms of a convolution's weight gradients, stride 1, by Gram matrices of pixels: inner products of patches
 * are sums of those of pixels over the kernel's windows (norms/windows.py), half of which are computed, rows first.
 *
 * It is read twice, with REAL float and double (twice.h); NAME(x) is x_float or x_double.
 */

#ifndef REAL

#include "vectors.h"
#include "panels.h"

#define THIS "windows.c"
#include "twice.h"

#else

#include "panels.h"

/* into [BLOCK, COLUMNS], rows so far apart: inner products over channels, stride apart, of BLOCK positions from rows on
 * with a panel of them from columns on, of which vectors [skipped, PANEL) are formed. */
INLINE void NAME(tile)(REAL *into, long apart, const REAL *rows, const REAL *columns, long stride, long channels,
                       const int skipped) {
    VEC sums[BLOCK][PANEL];
#pragma GCC unroll 8
    for (int i = 0; i < BLOCK; i++)
#pragma GCC unroll 2
        for (int v = skipped; v < PANEL; v++) sums[i][v] = (VEC){0};
#pragma GCC unroll 2
    for (long c = 0; c < channels; c++) {
        VEC these[PANEL];
#pragma GCC unroll 2
        for (int v = skipped; v < PANEL; v++) these[v] = *(const VEC *)(columns + c * stride + v * LANES);
#pragma GCC unroll 8
        for (int i = 0; i < BLOCK; i++) {
            const REAL mine = rows[c * stride + i];
#pragma GCC unroll 2
            for (int v = skipped; v < PANEL; v++) sums[i][v] += mine * these[v];
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < BLOCK; i++)
#pragma GCC unroll 2
        for (int v = skipped; v < PANEL; v++) *(VEC *)(into + i * apart + v * LANES) = sums[i][v];
}

/* Where rows of positions are at least as long as a panel. */
INLINE long NAME(apart)(long positions) {
    return positions < COLUMNS ? COLUMNS : positions;
}

/* pairs [positions, apart]: inner products of positions s <= t of from [channels, positions]; others may be anything.
 * aside [channels, COLUMNS] takes what is narrower than a panel. */
static void NAME(pairs)(REAL *pairs, REAL *aside, const REAL *from, long channels, long positions) {
    const long apart = NAME(apart)(positions);
    if (positions < apart) {
        for (long c = 0; c < channels; c++) memcpy(aside + c * apart, from + c * positions, positions * sizeof(REAL));
        from = aside;
    }
    for (long panel = 0; panel < positions; panel += COLUMNS) {
        /* The last panel, and its last block of rows, end where the positions end. */
        const long start = LESSER(panel, apart - COLUMNS), end = LESSER(positions, start + COLUMNS);
        for (long block = 0; block < end; block += BLOCK) {
            const long row = LESSER(block, apart - BLOCK);
            REAL *into = pairs + row * apart + start;
            if (row >= start + LANES)
                NAME(tile)(into, apart, from + row, from + start, apart, channels, 1);
            else
                NAME(tile)(into, apart, from + row, from + start, apart, channels, 0);
        }
    }
}

/* What a convolution of stride 1 does along one axis: size positions out of length, taps shifted by step - pad. */
struct NAME(axis) {
    long length, size, taps, pad, step;
};

/* The lanes of the v-th vector of a row that lie in [low, high). */
INLINE INTS NAME(between)(long v, long low, long high) {
    const INTS numbers = *(const INTS *)NAME(numbers) + (INTEGER)(v * LANES);
    return (numbers >= (INTEGER)low) & (numbers < (INTEGER)high);
}

/* across [size, padded]: the pairs of two rows of pixels, [.., length] each, summed over taps along the row; what is
 * behind a row's end or, where the two rows are the same one, before the diagonal may be anything. */
INLINE void NAME(sum_across)(REAL *restrict across, long padded, const REAL *restrict pairs, long stride,
                             struct NAME(axis) axis) {
    memset(across, 0, axis.size * padded * sizeof(REAL));
    for (long tap = 0; tap < axis.taps; tap++) {
        const long shift = tap * axis.step - axis.pad, low = shift < 0 ? -shift : 0;
        const long high = axis.length - shift < axis.size ? axis.length - shift : axis.size;
        for (long v = 0; v * LANES < axis.size; v++) {
            const INTS mine = NAME(between)(v, low, high);
            for (long s = low; s < high; s++) {
                const VEC from = *(const VEC *)(pairs + (s + shift) * stride + shift + v * LANES);
                *(VEC *)(across + s * padded + v * LANES) += (VEC)((INTS)from & mine);
            }
        }
    }
}

/* squared [batch] and scale [batch] as gram.c's, for a convolution of stride 1 over images [batch, inputs, height,
 * width] with gradients [batch, outputs, rows, columns], of examples [first, last). Returns 0, or 1 where there is no
 * memory. */
int NAME(windows)(const REAL *images, const REAL *gradients, REAL *squared, REAL *scale, long inputs, long outputs,
                  long height, long width, long rows, long columns, long row_taps, long column_taps, long row_pad,
                  long column_pad, long row_step, long column_step, long first, long last) {
    const struct NAME(axis) down = {height, rows, row_taps, row_pad, row_step};
    const struct NAME(axis) along = {width, columns, column_taps, column_pad, column_step};
    const long pixels = height * width, places = rows * columns;
    const long pixel_stride = NAME(apart)(pixels), place_stride = NAME(apart)(places);
    const long aside = (inputs > outputs ? inputs : outputs) * COLUMNS;
    const long padded = ROUND_UP(columns, LANES), block = columns * padded, slack = column_pad + LANES;
    const long tables = pixel_stride * pixel_stride + place_stride * place_stride + (height * height + 1) * block;
    REAL *room = malloc((aside + tables + 3 * slack) * sizeof(REAL));
    if (!room) return 1;
    memset(room, 0, aside * sizeof(REAL));
    /* Whole vectors are read, whose ends may lie outside of what they are read for. */
    REAL *of_pixels = room + aside + slack, *of_places = of_pixels + pixel_stride * pixel_stride + slack;
    REAL *across = of_places + place_stride * place_stride + slack;
    REAL *sums = across + height * height * block;
    for (long example = first; example < last; example++) {
        double twice = 0, diagonal = 0;
        NAME(pairs)(of_pixels, room, images + example * inputs * pixels, inputs, pixels);
        NAME(pairs)(of_places, room, gradients + example * outputs * places, outputs, places);
        for (long y = 0; y < height; y++)
            for (long z = y; z < height; z++)
                NAME(sum_across)(across + (y * height + z) * block, padded,
                                 of_pixels + y * width * pixel_stride + z * width, pixel_stride, along);
        for (long y = 0; y < rows; y++)
            for (long z = y; z < rows; z++) {
                memset(sums, 0, block * sizeof(REAL));
                for (long tap = 0; tap < down.taps; tap++) {
                    const long shift = tap * down.step - down.pad;
                    if (y + shift < 0 || z + shift >= height) continue;
                    const REAL *from = across + ((y + shift) * height + z + shift) * block;
                    for (long k = 0; k < block; k += LANES) *(VEC *)(sums + k) += *(const VEC *)(from + k);
                }
                const REAL *with = of_places + y * columns * place_stride + z * columns;
                VEC found = {0};
                for (long v = 0; v * LANES < columns; v++)
                    for (long s = 0; s < columns; s++) {
                        const VEC one = *(const VEC *)(sums + s * padded + v * LANES);
                        const VEC other = *(const VEC *)(with + s * place_stride + v * LANES);
                        found += (VEC)((INTS)(one * other) & NAME(between)(v, y == z ? s + 1 : 0, columns));
                    }
                for (long lane = 0; lane < LANES; lane++) twice += found[lane];
                for (long s = 0; y == z && s < columns; s++)
                    diagonal += (double)sums[s * padded + s] * with[s * place_stride + s];
            }
        squared[example] = 2 * twice + diagonal;
        scale[example] = diagonal;
    }
    free(room);
    return 0;
}

#undef COLUMNS

#endif
