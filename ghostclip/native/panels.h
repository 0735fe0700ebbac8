/* Inner products of positions over their features, a panel of columns at a time against blocks of rows: what the files
 * that form Gram matrices share. Read as vectors.h is, once while REAL is not defined and once for each type.
 */

#ifndef REAL

/* Vectors in a panel of columns, and the features of it that stay in the first-level cache. */
#define PANEL 2
#define DEPTH 128
/* Panels that share one read of rows that are too many for the second-level cache, of about so many bytes. */
#define PANELS 4
#define CACHE (1 << 20)
#define ROUND_UP(count, step) (((count) + (step) - 1) / (step) * (step))
/* Rows in a block: as many as leave room in the registers for a panel's columns. */
#if BYTES == 64
#define BLOCK 8
#else
#define BLOCK 4
#endif

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
#pragma GCC unroll 8
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

#endif
