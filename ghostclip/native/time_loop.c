/* Recurrent layers on the CPU: gates recomputed, and the way back through time (Lee & Kifer 2020, sections 5.3, 5.4).
 *
 * This file reads itself twice, with REAL float and double; NAME(x) is x_float or x_double. All arrays are row-major
 * and dense unless a stride is given. Examples never meet, so that callers may split them, [first, last), among
 * threads, and a NaN stays in its own example. A block of ROWS examples goes through all time steps before the next
 * one begins: what it carries from step to step stays in the first-level cache, the recurrent weight in the second.
 *
 * Numbers too small for full precision count as zero here: gradients that fade over hundreds of steps would otherwise
 * make every product many times slower.
 */

#ifndef REAL

#include "vectors.h"

#define ROWS (BYTES == 64 ? 8 : 4)
#define VECTORS 3
#define PADDED(count) (((count) + LANES - 1) / LANES * LANES)

#define LINE 64

/* Memory to be asked for, a line at a time, and what comes after it. */
typedef struct Ahead {
    const char *next, *end;
    struct Ahead *more;
} Ahead;

INLINE Ahead ahead_of(const void *start, long bytes, Ahead *more) {
    const Ahead found = {start, (const char *)start + bytes, more};
    return found;
}

#if defined(__SSE__)
INLINE unsigned flush_tiny(void) {
    unsigned before = __builtin_ia32_stmxcsr();
    __builtin_ia32_ldmxcsr(before | 0x8040);
    return before;
}
INLINE void restore_tiny(unsigned before) { __builtin_ia32_ldmxcsr(before); }
#else
INLINE unsigned flush_tiny(void) { return 0; }
INLINE void restore_tiny(unsigned before) { (void)before; }
#endif

#ifndef ONLY_DOUBLE
#define REAL float
#define INTEGER int32_t
#define NAME(x) x##_float
#define ROUNDER 12582912.0f
#define EXPONENT_BIAS 127
#define MANTISSA_BITS 23
#define LN2_HIGH 0.693359375f
#define LN2_LOW -2.12194440e-4f
#define EXP_LIMIT 87.0f
#define TANH_LIMIT 40.0f
/* (exp(r) - 1 - r) / r^2 */
#define SERIES(r) \
    (1.0f / 2 + r * (1.0f / 6 + r * (1.0f / 24 + r * (1.0f / 120 + r * (1.0f / 720 + r * (1.0f / 5040))))))
#include "time_loop.c"

#undef REAL
#undef INTEGER
#undef NAME
#undef ROUNDER
#undef EXPONENT_BIAS
#undef MANTISSA_BITS
#undef LN2_HIGH
#undef LN2_LOW
#undef EXP_LIMIT
#undef TANH_LIMIT
#undef SERIES
#endif

#ifndef ONLY_FLOAT
#define REAL double
#define INTEGER int64_t
#define NAME(x) x##_double
#define ROUNDER 6755399441055744.0
#define EXPONENT_BIAS 1023
#define MANTISSA_BITS 52
#define LN2_HIGH 6.93145751953125e-1
#define LN2_LOW 1.42860682030941723212e-6
#define EXP_LIMIT 700.0
#define TANH_LIMIT 80.0
#define SERIES(r)                                                                                                    \
    (1.0 / 2 + r * (1.0 / 6 + r * (1.0 / 24 + r * (1.0 / 120 + r * (1.0 / 720 + r * (1.0 / 5040 + r * (1.0 / 40320 + \
     r * (1.0 / 362880 + r * (1.0 / 3628800 + r * (1.0 / 39916800 + r * (1.0 / 479001600 +                           \
     r * (1.0 / 6227020800.0))))))))))))
#include "time_loop.c"
#endif

#else

#include "vectors.h"

INLINE VEC NAME(load)(const REAL *from) { return *(const VEC *)from; }
INLINE void NAME(store)(REAL *to, VEC value) { *(VEC *)to = value; }

/* The first `count` numbers, or all where there are enough. */
INLINE VEC NAME(load_part)(const REAL *from, long count) {
    VEC found = {0};
    if (count >= LANES) return NAME(load)(from);
    memcpy(&found, from, count * sizeof(REAL));
    return found;
}

INLINE void NAME(store_part)(REAL *to, VEC value, long count) {
    if (count >= LANES) NAME(store)(to, value);
    else memcpy(to, &value, count * sizeof(REAL));
}

INLINE VEC NAME(choose)(INTS where, VEC yes, VEC no) { return (VEC)((where & (INTS)yes) | (~where & (INTS)no)); }

/* exp(x) - 1 for |x| up to EXP_LIMIT, to a few units in the last place near zero too: with x = n ln2 + r and
 * |r| <= ln2 / 2, from the series of exp(r) - 1. NaN gives NaN. */
INLINE VEC NAME(expm1_of)(VEC x) {
    const VEC zero = {0}, rounder = zero + ROUNDER;
    const VEC shifted = x * (REAL)1.4426950408889634 + rounder;
    const VEC n = shifted - rounder;
    const VEC r = (x - n * LN2_HIGH) - n * LN2_LOW;
    const VEC power = (VEC)(((INTS)shifted - (INTS)rounder + EXPONENT_BIAS) << MANTISSA_BITS);
    const VEC grown = r + r * r * SERIES(r);
    return power * grown + (power - 1);
}

INLINE VEC NAME(sigmoid)(VEC x) {
    const VEC zero = {0}, limit = zero + EXP_LIMIT;
    VEC negative = NAME(choose)(-x > limit, limit, -x);
    negative = NAME(choose)(negative < -limit, -limit, negative);
    return 1 / (2 + NAME(expm1_of)(negative));
}

INLINE VEC NAME(tanh_of)(VEC x) {
    const VEC zero = {0}, limit = zero + TANH_LIMIT;
    const INTS sign = (INTS)x & (INTS)(-zero);
    VEC twice = (VEC)((INTS)(2 * x) & ~(INTS)(-zero));
    twice = NAME(choose)(twice > limit, limit, twice);
    const VEC grown = NAME(expm1_of)(twice);
    return (VEC)((INTS)(grown / (grown + 2)) | sign);
}

/* The padded length of a row. */
long NAME(padded)(long count) { return PADDED(count); }

/* A weight [inner, outer] as panels of up to VECTORS vectors of columns, each [inner, columns], zeros past the end. */
int NAME(pack)(const REAL *weight, REAL *panels, long inner, long outer) {
    for (long start = 0; start < outer; start += VECTORS * LANES) {
        long width = outer - start < VECTORS * LANES ? outer - start : VECTORS * LANES;
        long padded = PADDED(width);
        for (long k = 0; k < inner; k++, panels += padded) {
            memcpy(panels, weight + k * outer + start, width * sizeof(REAL));
            memset(panels + width, 0, (padded - width) * sizeof(REAL));
        }
    }
    return 0;
}

/* A weight [gates * hidden, inner], transposed, as such panels of gates * PADDED(hidden) columns. */
int NAME(pack_gates)(const REAL *weight, REAL *panels, long gates, long hidden, long inner) {
    const long padded = PADDED(hidden), outer = gates * padded;
    for (long start = 0; start < outer; start += VECTORS * LANES) {
        const long width = outer - start < VECTORS * LANES ? outer - start : VECTORS * LANES;
        for (long column = start; column < start + width; column++) {
            const long h = column % padded;
            const REAL *from = weight + (column / padded * hidden + h) * inner;
            for (long k = 0; k < inner; k++) panels[k * width + column - start] = h < hidden ? from[k] : 0;
        }
        panels += inner * width;
    }
    return 0;
}

/* out [rows, vectors * LANES] += left [rows, inner] @ panel, all of it in registers; while it runs, the memory the
 * next step needs is asked for. */
INLINE void NAME(tile)(const REAL *left, long left_stride, const REAL *panel, long inner, REAL *out, long out_stride,
                       Ahead *ahead, const int rows, const int vectors) {
    const char *next = ahead->next, *end = ahead->end;
    VEC sums[ROWS][VECTORS];
#pragma GCC unroll 8
    for (int row = 0; row < rows; row++)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++) sums[row][v] = *(const VEC *)(out + row * out_stride + v * LANES);
    for (long k = 0; k < inner; k++) {
        VEC columns[VECTORS];
        if (next < end) {
            __builtin_prefetch(next, 0, 2);
            next += LINE;
        }
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++) columns[v] = *(const VEC *)(panel + (k * vectors + v) * LANES);
#pragma GCC unroll 8
        for (int row = 0; row < rows; row++)
#pragma GCC unroll 8
            for (int v = 0; v < vectors; v++) sums[row][v] += left[row * left_stride + k] * columns[v];
    }
#pragma GCC unroll 8
    for (int row = 0; row < rows; row++)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++) *(VEC *)(out + row * out_stride + v * LANES) = sums[row][v];
    ahead->next = next;
}

#define TILES(vectors)                                                                                                \
    do {                                                                                                              \
        if (rows == ROWS)                                                                                             \
            NAME(tile)(left, left_stride, panels, inner, out + start, out_stride, ahead, ROWS, vectors);              \
        else                                                                                                          \
            for (long row = 0; row < rows; row++)                                                                     \
                NAME(tile)(left + row * left_stride, left_stride, panels, inner, out + row * out_stride + start,      \
                           out_stride, ahead, 1, vectors);                                                            \
        panels += inner * (vectors) * LANES;                                                                          \
    }while (0)

/* out [rows, outer padded] += left [rows, inner] @ the packed weight; the order of sums is the same for any rows. */
static void NAME(multiply)(const REAL *left, long left_stride, const REAL *panels, long inner, long outer, REAL *out,
                           long out_stride, long rows, Ahead *ahead) {
    for (long start = 0; start < outer; start += VECTORS * LANES) {
        const long vectors = (outer - start + LANES - 1) / LANES;
        if (ahead->next >= ahead->end && ahead->more) ahead = ahead->more;
        if (vectors >= 3)
            TILES(3);
        else if (vectors == 2)
            TILES(2);
        else
            TILES(1);
    }
}

/* Incoming [rows, width] of one step, null for zeros, into padded rows of the carried gradient. */
INLINE void NAME(take)(REAL *carried, long padded, const REAL *incoming, long stride, long rows, long width) {
    for (long row = 0; row < rows; row++) {
        if (incoming) memcpy(carried + row * padded, incoming + row * stride, width * sizeof(REAL));
        else memset(carried + row * padded, 0, width * sizeof(REAL));
        memset(carried + row * padded + width, 0, (padded - width) * sizeof(REAL));
    }
}

INLINE void NAME(add_rows)(REAL *sum, long sum_stride, const REAL *amount, long stride, long rows, long width) {
    if (!amount) return;
    for (long row = 0; row < rows; row++)
        for (long h = 0; h < width; h++) sum[row * sum_stride + h] += amount[row * stride + h];
}

INLINE void NAME(give)(REAL *out, const REAL *carried, long padded, long rows, long width) {
    for (long row = 0; row < rows; row++) memcpy(out + row * width, carried + row * padded, width * sizeof(REAL));
}

/* What comes to h_t from outside of the recurrence, into the carried gradient; h_n only at the last step. */
INLINE void NAME(outside)(REAL *carried, long padded, const REAL *output, long step_stride, long row_stride,
                          const REAL *h_n, long t, long steps, long block, long rows, long hidden) {
    const REAL *incoming = output ? output + t * step_stride + block * row_stride : 0;
    NAME(take)(carried, padded, incoming, row_stride, rows, hidden);
    if (t == steps - 1) NAME(add_rows)(carried, padded, h_n ? h_n + block * hidden : 0, hidden, rows, hidden);
}

/* Rows of pre-activations: every row the bias [width], null for zeros. */
INLINE void NAME(fill_bias)(REAL *z, const REAL *bias, long rows, long width) {
    for (long row = 0; row < rows; row++) {
        if (bias) memcpy(z + row * width, bias, width * sizeof(REAL));
        else memset(z + row * width, 0, width * sizeof(REAL));
    }
}

/* Adds to what is summed over time, and writes `hidden` numbers of one gate's gradient. A last vector that is not full
 * is written in full where `spills`: into the next gate's first numbers, which are to come, h going down. */
INLINE void NAME(emit)(VEC value, REAL *grad, REAL *summed, long h, long hidden, int spills) {
    NAME(store)(summed + h, NAME(load)(summed + h) + value);
    if (spills) NAME(store)(grad + h, value);
    else NAME(store_part)(grad + h, value, hidden - h);
}

/* One step for one example: gates i, f, g, o [4, padded] of pre-activations z, and the next cell state. */
INLINE void NAME(lstm_gate)(const REAL *z, REAL *gates, const REAL *before, REAL *after, long padded) {
    for (long h = 0; h < padded; h += LANES) {
        const VEC i = NAME(sigmoid)(NAME(load)(z + h)), f = NAME(sigmoid)(NAME(load)(z + padded + h));
        const VEC g = NAME(tanh_of)(NAME(load)(z + 2 * padded + h));
        NAME(store)(gates + h, i);
        NAME(store)(gates + padded + h, f);
        NAME(store)(gates + 2 * padded + h, g);
        NAME(store)(gates + 3 * padded + h, NAME(sigmoid)(NAME(load)(z + 3 * padded + h)));
        NAME(store)(after + h, f * NAME(load)(before + h) + i * g);
    }
}

/* The gates i, f, g, o [steps, batch, 4, padded] and the cells [steps + 1, batch, padded] after the first, from inputs
 * x [steps, batch, inputs], states before each step, both weights packed, and the sum of the biases [4, padded] (null
 * for none). Returns 0, or 1 where there is no memory. */
int NAME(lstm_gates)(const REAL *x, const REAL *states, const REAL *panels_ih, const REAL *panels_hh, const REAL *bias,
                     REAL *gates, REAL *cells, long steps, long batch, long inputs, long hidden, long first,
                     long last) {
    const long padded = PADDED(hidden), width = 4 * padded;
    REAL *z = malloc(ROWS * width * sizeof(REAL));
    if (!z) return 1;
    const unsigned mode = flush_tiny();
    for (long block = first; block < last; block += ROWS) {
        const long rows = last - block < ROWS ? last - block : ROWS;
        for (long t = 0; t < steps; t++) {
            const long at = t * batch + block, next = t + 1 < steps ? at + batch : at;
            Ahead kept = ahead_of(gates + next * width, rows * width * sizeof(REAL), 0);
            Ahead seen = ahead_of(states + next * hidden, rows * hidden * sizeof(REAL), &kept);
            Ahead soon = ahead_of(x + next * inputs, rows * inputs * sizeof(REAL), &seen);
            NAME(fill_bias)(z, bias, rows, width);
            NAME(multiply)(x + at * inputs, inputs, panels_ih, inputs, width, z, width, rows, &soon);
            NAME(multiply)(states + at * hidden, hidden, panels_hh, hidden, width, z, width, rows, &soon);
            for (long row = 0; row < rows; row++)
                NAME(lstm_gate)(z + row * width, gates + (at + row) * width, cells + (at + row) * padded,
                                cells + (at + row + batch) * padded, padded);
        }
    }
    restore_tiny(mode);
    free(z);
    return 0;
}

/* One step of an LSTM for one example: grad [4 hidden] at the pre-activations; dc is carried on. */
INLINE void NAME(lstm_step)(const REAL *gates, const REAL *before, const REAL *after, const REAL *dh, REAL *dc,
                            REAL *grad, REAL *summed, long hidden, long padded) {
    const int spills = hidden >= LANES;
    for (long h = padded - LANES; h >= 0; h -= LANES) {
        const VEC i = NAME(load)(gates + h), f = NAME(load)(gates + padded + h);
        const VEC g = NAME(load)(gates + 2 * padded + h), o = NAME(load)(gates + 3 * padded + h);
        const VEC squashed = NAME(tanh_of)(NAME(load)(after + h)), above = NAME(load)(dh + h);
        const VEC cell = NAME(load)(dc + h) + above * o * (1 - squashed * squashed);
        NAME(emit)(cell * g * i * (1 - i), grad, summed, h, hidden, spills);
        NAME(emit)(cell * NAME(load)(before + h) * f * (1 - f), grad + hidden, summed + padded, h, hidden, spills);
        NAME(emit)(cell * i * (1 - g * g), grad + 2 * hidden, summed + 2 * padded, h, hidden, spills);
        NAME(emit)(above * squashed * o * (1 - o), grad + 3 * hidden, summed + 3 * padded, h, hidden, 0);
        NAME(store)(dc + h, cell * f);
    }
}

/* The gate gradients grad [steps, batch, 4 hidden], their sums over time summed [batch, 4 hidden], and the gradients
 * h0 and c0 [batch, hidden], from what comes in at output, h_n, c_n (each may be null), and lstm_gates' gates and
 * cells. Returns 0, or 1 where there is no memory. */
int NAME(lstm_back)(const REAL *gates, const REAL *cells, const REAL *panels, const REAL *output, long step_stride,
                    long row_stride, const REAL *h_n, const REAL *c_n, REAL *grad, REAL *summed, REAL *h0, REAL *c0,
                    long steps, long batch, long hidden, long first, long last) {
    const long padded = PADDED(hidden), width = 4 * hidden;
    REAL *dh = malloc(6 * ROWS * padded * sizeof(REAL)), *dc = dh + ROWS * padded, *sums = dc + ROWS * padded;
    if (!dh) return 1;
    const unsigned mode = flush_tiny();
    for (long block = first; block < last; block += ROWS) {
        const long rows = last - block < ROWS ? last - block : ROWS;
        NAME(take)(dc, padded, c_n ? c_n + block * hidden : 0, hidden, rows, hidden);
        NAME(outside)(dh, padded, output, step_stride, row_stride, h_n, steps - 1, steps, block, rows, hidden);
        memset(sums, 0, 4 * ROWS * padded * sizeof(REAL));
        for (long t = steps - 1; t >= 0; t--) {
            const long at = t * batch + block;
            for (long row = 0; row < rows; row++)
                NAME(lstm_step)(gates + (at + row) * 4 * padded, cells + (at + row) * padded,
                                cells + (at + row + batch) * padded, dh + row * padded, dc + row * padded,
                                grad + (at + row) * width, sums + row * 4 * padded, hidden, padded);
            if (t) NAME(outside)(dh, padded, output, step_stride, row_stride, h_n, t - 1, steps, block, rows, hidden);
            else memset(dh, 0, ROWS * padded * sizeof(REAL));
            const long prior = t ? at - batch : at;
            Ahead grads = ahead_of(grad + prior * width, rows * width * sizeof(REAL), 0);
            Ahead states = ahead_of(cells + prior * padded, rows * padded * sizeof(REAL), &grads);
            Ahead soon = ahead_of(gates + prior * 4 * padded, rows * 4 * padded * sizeof(REAL), &states);
            NAME(multiply)(grad + at * width, width, panels, width, hidden, dh, padded, rows, &soon);
        }
        NAME(give)(h0 + block * hidden, dh, padded, rows, hidden);
        NAME(give)(c0 + block * hidden, dc, padded, rows, hidden);
        NAME(give)(summed + block * width, sums, padded, 4 * rows, hidden);
    }
    restore_tiny(mode);
    free(dh);
    return 0;
}

/* One step for one example: r, z, n and the hidden side of n [4, padded], from both sides' pre-activations. */
INLINE void NAME(gru_gate)(const REAL *a, const REAL *b, REAL *gates, long padded) {
    for (long h = 0; h < padded; h += LANES) {
        const VEC side = NAME(load)(b + 2 * padded + h);
        const VEC r = NAME(sigmoid)(NAME(load)(a + h) + NAME(load)(b + h));
        NAME(store)(gates + h, r);
        NAME(store)(gates + padded + h, NAME(sigmoid)(NAME(load)(a + padded + h) + NAME(load)(b + padded + h)));
        NAME(store)(gates + 2 * padded + h, NAME(tanh_of)(NAME(load)(a + 2 * padded + h) + r * side));
        NAME(store)(gates + 3 * padded + h, side);
    }
}

/* As lstm_gates: r, z, n and the hidden side of n [steps, batch, 4, padded]; the biases [3, padded] stay apart. */
int NAME(gru_gates)(const REAL *x, const REAL *states, const REAL *panels_ih, const REAL *panels_hh,
                    const REAL *bias_ih, const REAL *bias_hh, REAL *gates, long steps, long batch, long inputs,
                    long hidden, long first, long last) {
    const long padded = PADDED(hidden), width = 3 * padded;
    REAL *a = malloc(2 * ROWS * width * sizeof(REAL)), *b = a + ROWS * width;
    if (!a) return 1;
    const unsigned mode = flush_tiny();
    for (long block = first; block < last; block += ROWS) {
        const long rows = last - block < ROWS ? last - block : ROWS;
        for (long t = 0; t < steps; t++) {
            const long at = t * batch + block, next = t + 1 < steps ? at + batch : at;
            Ahead kept = ahead_of(gates + next * 4 * padded, rows * 4 * padded * sizeof(REAL), 0);
            Ahead seen = ahead_of(states + next * hidden, rows * hidden * sizeof(REAL), &kept);
            Ahead soon = ahead_of(x + next * inputs, rows * inputs * sizeof(REAL), &seen);
            NAME(fill_bias)(a, bias_ih, rows, width);
            NAME(fill_bias)(b, bias_hh, rows, width);
            NAME(multiply)(x + at * inputs, inputs, panels_ih, inputs, width, a, width, rows, &soon);
            NAME(multiply)(states + at * hidden, hidden, panels_hh, hidden, width, b, width, rows, &soon);
            for (long row = 0; row < rows; row++)
                NAME(gru_gate)(a + row * width, b + row * width, gates + (at + row) * 4 * padded, padded);
        }
    }
    restore_tiny(mode);
    free(a);
    return 0;
}

/* One step of a GRU for one example: both gradients [3 hidden]; next: what h_{t-1} gets beside the product with W_hh.
 * Of the four sums the last two are those of n, at the input's side and the hidden one. */
INLINE void NAME(gru_step)(const REAL *gates, const REAL *before, const REAL *dh, REAL *into_input, REAL *into_hidden,
                           REAL *sums, REAL *next, long hidden, long padded) {
    const int spills = hidden >= LANES;
    for (long h = padded - LANES; h >= 0; h -= LANES) {
        const VEC r = NAME(load)(gates + h), z = NAME(load)(gates + padded + h);
        const VEC n = NAME(load)(gates + 2 * padded + h), side = NAME(load)(gates + 3 * padded + h);
        const VEC above = NAME(load)(dh + h), state = NAME(load_part)(before + h, hidden - h);
        const VEC dn = above * (1 - z) * (1 - n * n), dr = dn * side * r * (1 - r);
        const VEC dz = above * (state - n) * z * (1 - z);
        NAME(emit)(dr, into_input, sums, h, hidden, spills);
        NAME(emit)(dz, into_input + hidden, sums + padded, h, hidden, spills);
        NAME(emit)(dn, into_input + 2 * hidden, sums + 2 * padded, h, hidden, 0);
        NAME(store_part)(into_hidden + h, dr, spills ? LANES : hidden);
        NAME(store_part)(into_hidden + hidden + h, dz, spills ? LANES : hidden);
        NAME(emit)(dn * r, into_hidden + 2 * hidden, sums + 3 * padded, h, hidden, 0);
        NAME(store)(next + h, above * z);
    }
}

/* As lstm_back, with gates of gru_gates and the states [steps, batch, hidden] before each step; the sums over time are
 * [batch, 4 hidden]: of r, z, n at the input's side, n at the hidden side. */
int NAME(gru_back)(const REAL *gates, const REAL *states, const REAL *panels, const REAL *output, long step_stride,
                   long row_stride, const REAL *h_n, REAL *into_input, REAL *into_hidden, REAL *summed, REAL *h0,
                   long steps, long batch, long hidden, long first, long last) {
    const long padded = PADDED(hidden), width = 3 * hidden;
    REAL *dh = malloc(6 * ROWS * padded * sizeof(REAL)), *next = dh + ROWS * padded, *sums = next + ROWS * padded;
    if (!dh) return 1;
    const unsigned mode = flush_tiny();
    for (long block = first; block < last; block += ROWS) {
        const long rows = last - block < ROWS ? last - block : ROWS;
        NAME(outside)(dh, padded, output, step_stride, row_stride, h_n, steps - 1, steps, block, rows, hidden);
        memset(sums, 0, 4 * ROWS * padded * sizeof(REAL));
        for (long t = steps - 1; t >= 0; t--) {
            const long at = t * batch + block;
            for (long row = 0; row < rows; row++)
                NAME(gru_step)(gates + (at + row) * 4 * padded, states + (at + row) * hidden, dh + row * padded,
                               into_input + (at + row) * width, into_hidden + (at + row) * width,
                               sums + row * 4 * padded, next + row * padded, hidden, padded);
            if (t) NAME(outside)(dh, padded, output, step_stride, row_stride, h_n, t - 1, steps, block, rows, hidden);
            else memset(dh, 0, ROWS * padded * sizeof(REAL));
            NAME(add_rows)(dh, padded, next, padded, rows, hidden);
            Ahead soon = ahead_of(gates + (t ? at - batch : at) * 4 * padded, rows * 4 * padded * sizeof(REAL), 0);
            NAME(multiply)(into_hidden + at * width, width, panels, width, hidden, dh, padded, rows, &soon);
        }
        NAME(give)(h0 + block * hidden, dh, padded, rows, hidden);
        NAME(give)(summed + block * 4 * hidden, sums, padded, 4 * rows, hidden);
    }
    restore_tiny(mode);
    free(dh);
    return 0;
}

/* One step of a layer without gates for one example: grad [hidden]. */
INLINE void NAME(rnn_step)(const REAL *after, const REAL *dh, REAL *grad, REAL *sums, long relu, long hidden,
                           long padded) {
    const VEC zero = {0};
    for (long h = 0; h < padded; h += LANES) {
        const VEC state = NAME(load_part)(after + h, hidden - h), above = NAME(load)(dh + h);
        VEC factor = 1 - state * state;
        if (relu) factor = NAME(choose)(state > zero, zero + 1, zero);
        NAME(emit)(above * factor, grad, sums, h, hidden, 0);
    }
}

/* As lstm_back for a layer without gates: states [steps, batch, hidden] after each step; relu is 0 for tanh. */
int NAME(rnn_back)(const REAL *states, const REAL *panels, const REAL *output, long step_stride, long row_stride,
                   const REAL *h_n, REAL *grad, REAL *summed, REAL *h0, long relu, long steps, long batch, long hidden,
                   long first, long last) {
    const long padded = PADDED(hidden);
    REAL *dh = malloc(2 * ROWS * padded * sizeof(REAL)), *sums = dh + ROWS * padded;
    if (!dh) return 1;
    const unsigned mode = flush_tiny();
    for (long block = first; block < last; block += ROWS) {
        const long rows = last - block < ROWS ? last - block : ROWS;
        NAME(outside)(dh, padded, output, step_stride, row_stride, h_n, steps - 1, steps, block, rows, hidden);
        memset(sums, 0, ROWS * padded * sizeof(REAL));
        for (long t = steps - 1; t >= 0; t--) {
            const long at = t * batch + block;
            for (long row = 0; row < rows; row++)
                NAME(rnn_step)(states + (at + row) * hidden, dh + row * padded, grad + (at + row) * hidden,
                               sums + row * padded, relu, hidden, padded);
            if (t) NAME(outside)(dh, padded, output, step_stride, row_stride, h_n, t - 1, steps, block, rows, hidden);
            else memset(dh, 0, ROWS * padded * sizeof(REAL));
            const long prior = t ? at - batch : at;
            Ahead grads = ahead_of(grad + prior * hidden, rows * hidden * sizeof(REAL), 0);
            Ahead soon = ahead_of(states + prior * hidden, rows * hidden * sizeof(REAL), &grads);
            NAME(multiply)(grad + at * hidden, hidden, panels, hidden, hidden, dh, padded, rows, &soon);
        }
        NAME(give)(h0 + block * hidden, dh, padded, rows, hidden);
        NAME(give)(summed + block * hidden, sums, padded, rows, hidden);
    }
    restore_tiny(mode);
    free(dh);
    return 0;
}

#endif
