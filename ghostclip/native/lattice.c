/* Noisy sums rounded to a lattice: the first look at each coordinate, which settles all but about one in two hundred.
 * noise/hardened.py says what is computed and why it is exact; what is left open here is settled there.
 *
 * It is read twice, with REAL float and double (twice.h); NAME(x) is x_float or x_double.
 */

#ifndef REAL

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "vectors.h"

/* A word holds a layer of the ziggurat, a sign, and the first digits of where in the layer's width the noise lies. */
#define LAYER_BITS 10
#define DIGITS 21
/* Coordinates whose layers are looked up together. */
#define GROUP 64

/* A layer's width, and the digits up to which all of the layer is under the curve. */
struct layer {
    float width;
    uint32_t inside;
};

#define THIS "lattice.c"
#include "twice.h"

#else

/* out [n]: step * (the integer nearest to sums * scale + spread * noise); left: the indices of those that this did not
 * settle, whose number is returned. */
int64_t NAME(ghostclip_lattice)(const REAL *restrict sums, REAL *restrict out, int64_t *restrict left,
                                const uint32_t *restrict words, const struct layer *restrict layers, int64_t n,
                                double scale, double step, double limit, double spread) {
    int64_t count = 0;
    for (int64_t start = 0; start < n; start += GROUP) {
        const int64_t size = n - start < GROUP ? n - start : GROUP;
        float widths[GROUP];
        uint32_t inside[GROUP];
        uint8_t open[GROUP] = {0};
        for (int64_t i = 0; i < size; i++) {
            const struct layer *layer = &layers[words[start + i] & ((1 << LAYER_BITS) - 1)];
            widths[i] = layer->width, inside[i] = layer->inside;
        }
        for (int64_t i = 0; i < size; i++) {
            const uint32_t word = words[start + i], digits = word >> (LAYER_BITS + 1);
            const double width = widths[i] * spread, share = ((int32_t)digits + 0.5) * (1.0 / (1 << DIGITS));
            double target = sums[start + i] * scale;
            target = target == target ? target : 0.0;
            target = target > limit ? limit : target < -limit ? -limit : target;
            const double noise = width * share, noisy = target + (word >> LAYER_BITS & 1 ? -noise : noise);
            /* Adding and taking off 1.5 * 2^52 rounds to an integer; limit is far below. */
            const double whole = (noisy + 0x1.8p52) - 0x1.8p52;
            const double error = width * (0.5 / (1 << DIGITS)) + (fabs(target) + width) * 0x1p-50;
            open[i] = !(digits < inside[i]) | !(fabs(fabs(noisy - whole) - 0.5) > error);
            out[start + i] = (REAL)(whole * step);
        }
        for (int64_t i = 0; i < size; i += 8) {
            uint64_t eight;
            memcpy(&eight, open + i, 8);
            for (int64_t j = i; eight && j < i + 8; j++) {
                left[count] = start + j;
                count += open[j];
            }
        }
    }
    return count;
}

#endif
