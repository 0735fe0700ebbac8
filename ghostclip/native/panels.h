/* A panel of columns against a block of rows, and how rows become columns: what the files that form sums of products
 * share. Read as vectors.h is, once while REAL is not defined and once for each type.
 */

#ifndef REAL

/* Vectors in a panel of columns. */
#define PANEL 2
#define ROUND_UP(count, step) (((count) + (step) - 1) / (step) * (step))

#else

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

/* LANES positions as columns of packed, from [count, wide]: zeros for those behind count. With `all` there are as many
 * positions and numbers as lanes. */
INLINE void NAME(pack_square)(REAL *packed, const REAL *from, long stride, long count, long wide, const int all) {
    VEC square[BYTES / sizeof(REAL)];
#pragma GCC unroll 16
    for (long row = 0; row < LANES; row++)
        if (all)
            square[row] = *(const VEC *)(from + row * stride);
        else if (row >= count)
            square[row] = (VEC){0};
        else if (wide == LANES)
            square[row] = *(const VEC *)(from + row * stride);
        else
            for (long j = 0; j < LANES; j++) square[row][j] = j < wide ? from[row * stride + j] : 0;
    NAME(transpose)(square);
#pragma GCC unroll 16
    for (long j = 0; j < LANES; j++)
        if (all || j < wide) *(VEC *)(packed + j * COLUMNS) = square[j];
}

/* packed [depth, COLUMNS]: positions of from [count, depth] as columns, zeros beside the last. */
static void NAME(pack)(REAL *packed, const REAL *from, long stride, long count, long depth) {
    for (long v = 0; v < PANEL; v++, from += LANES * stride, count -= LANES)
        for (long k = 0; k < depth; k += LANES) {
            REAL *into = packed + k * COLUMNS + v * LANES;
            if (count >= LANES && depth - k >= LANES)
                NAME(pack_square)(into, from + k, stride, LANES, LANES, 1);
            else
                NAME(pack_square)(into, from + k, stride, count, LESSER(LANES, depth - k), 0);
        }
}

#endif
