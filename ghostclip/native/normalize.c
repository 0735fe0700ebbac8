/* Gradients of the scales of normalizations, for each example: sums over its positions of gradients times normalized
 * inputs, which are never formed. Mean and variance by the corrected two-pass algorithm (Chan, Golub and LeVeque 1983).
 *
 * It is read twice, with REAL float and double (twice.h); NAME(x) is x_float or x_double.
 */

#ifndef REAL

#include <math.h>

#include "vectors.h"

/* Numbers of a row after which their sum goes on in double precision. */
#define PART 4096

#define THIS "normalize.c"
#include "twice.h"

#else

/* What makes the numbers x of each of SUMS rows normalized: ((x - middle) - shift) * scale. */
struct NAME(moments) {
    REAL middle[SUMS], shift[SUMS], scale[SUMS];
};

/* For each of up to SUMS rows, sums of x - middle, and of the squares of that; or, where there are other numbers, of
 * those, and of their products with x - middle. */
static void NAME(row_sums)(const REAL *x, long stride, const REAL *other, long other_stride, const REAL *middle,
                           long rows, long count, double *ones, double *products) {
    for (long row = 0; row < SUMS; row++) ones[row] = products[row] = 0;
    for (long start = 0; start < count; start += PART) {
        const long end = LESSER(count, start + PART);
        VEC of_ones[SUMS] = {0}, of_products[SUMS] = {0};
        REAL folded[SUMS];
        for (long row = 0; row < rows; row++) {
            const REAL *mine = x + row * stride, *factors = other ? other + row * other_stride : 0;
            const REAL from = middle[row];
            VEC one[2] = {0}, product[2] = {0};
            long k = start;
            for (; k + 2 * LANES <= end; k += 2 * LANES)
#pragma GCC unroll 2
                for (int i = 0; i < 2; i++) {
                    const VEC away = *(const VEC *)(mine + k + i * LANES) - from;
                    const VEC factor = other ? *(const VEC *)(factors + k + i * LANES) : away;
                    one[i] += factor, product[i] += away * factor;
                }
            for (; k + LANES <= end; k += LANES) {
                const VEC away = *(const VEC *)(mine + k) - from, factor = other ? *(const VEC *)(factors + k) : away;
                one[0] += factor, product[0] += away * factor;
            }
            of_ones[row] = one[0] + one[1], of_products[row] = product[0] + product[1];
            for (; k < end; k++) {
                const REAL away = mine[k] - from, factor = other ? factors[k] : away;
                ones[row] += factor, products[row] += (double)away * factor;
            }
        }
        NAME(fold)(of_ones, folded);
        for (long row = 0; row < SUMS; row++) ones[row] += folded[row];
        NAME(fold)(of_products, folded);
        for (long row = 0; row < SUMS; row++) products[row] += folded[row];
    }
}

/* Of up to SUMS rows of count numbers; with centred 0 their means are taken for zero. */
static void NAME(moments_of)(struct NAME(moments) *found, const REAL *x, long stride, long rows, long count, double eps,
                             long centred) {
    double ones[SUMS], products[SUMS];
    memset(found, 0, sizeof(*found));
    if (centred) {
        NAME(row_sums)(x, stride, 0, 0, found->middle, rows, count, ones, products);
        for (long row = 0; row < SUMS; row++) found->middle[row] = ones[row] / count;
    }
    NAME(row_sums)(x, stride, 0, 0, found->middle, rows, count, ones, products);
    for (long row = 0; row < SUMS; row++) {
        const double shift = centred ? ones[row] / count : 0, variance = products[row] / count - shift * shift;
        found->shift[row] = shift;
        found->scale[row] = 1 / sqrt((variance < 0 ? 0 : variance) + eps);
    }
}

/* found [batch, channels] for images and gradients [batch, channels, positions], normalized in groups of channels; of
 * examples [first, last). */
long NAME(channels)(const REAL *images, const REAL *gradients, REAL *found, long channels, long groups, long positions,
                    Word eps_bits, long first, long last) {
    const double eps = real_of(eps_bits);
    const long each = channels / groups;
    struct NAME(moments) of;
    double ones[SUMS], products[SUMS];
    for (long group = first * groups; group < last * groups; group += SUMS) {
        const long some = LESSER(SUMS, last * groups - group), behind = (group + some) * each;
        NAME(moments_of)(&of, images + group * each * positions, each * positions, some, each * positions, eps, 1);
        for (long channel = group * each; channel < behind; channel += SUMS) {
            const long rows = LESSER(SUMS, behind - channel);
            const REAL *x = images + channel * positions, *grads = gradients + channel * positions;
            REAL middle[SUMS] = {0};
            for (long row = 0; row < rows; row++) middle[row] = of.middle[(channel + row) / each - group];
            NAME(row_sums)(x, positions, grads, positions, middle, rows, positions, ones, products);
            for (long row = 0; row < rows; row++) {
                const long own = (channel + row) / each - group;
                found[channel + row] = of.scale[own] * (products[row] - of.shift[own] * ones[row]);
            }
        }
    }
    return 0;
}

/* found [batch, width] for inputs and gradients [batch, positions, width], each position normalized by itself; of
 * examples [first, last). Strides are those of examples and positions. Returns 0, or 1 where there is no memory. */
long NAME(rows)(const REAL *inputs, long input_example, long input_position, const REAL *gradients, long example_stride,
                long position_stride, REAL *found, long positions, long width, long centred, Word eps_bits,
                long first, long last) {
    const double eps = real_of(eps_bits);
    REAL *part = malloc(width * sizeof(REAL));
    if (!part) return 1;
    struct NAME(moments) of;
    for (long example = first; example < last; example++) {
        REAL *restrict into = found + example * width;
        memset(into, 0, width * sizeof(REAL));
        for (long start = 0; start < positions; start += SUMS) {
            const REAL *x = inputs + example * input_example + start * input_position;
            const REAL *grads = gradients + example * example_stride + start * position_stride;
            const long some = LESSER(SUMS, positions - start);
            REAL *restrict sums = part;
            NAME(moments_of)(&of, x, input_position, some, width, eps, centred);
            memset(part, 0, width * sizeof(REAL));
            for (long row = 0; row < some; row++, x += input_position, grads += position_stride) {
                const REAL middle = of.middle[row], shift = of.shift[row], scale = of.scale[row];
                for (long k = 0; k < width; k++) sums[k] += grads[k] * (((x[k] - middle) - shift) * scale);
            }
            for (long k = 0; k < width; k++) into[k] += part[k];
        }
    }
    free(part);
    return 0;
}

#endif
