/* Noisy sums rounded to a lattice: the first look at each coordinate, which settles all but about one in fifty.
 * noise/lattice.py says what is computed and why it is exact; what is left open here is settled there.
 *
 * It is read twice, with REAL float and double (twice.h); NAME(x) is x_float or x_double. */

#ifndef REAL

#include <math.h>
#include <stdint.h>

#include "vectors.h"

#define THIS "lattice.c"
#include "twice.h"

#else

/* out [n]: step * (the integer nearest to sums * scale + noise), where open [n] is 0. A word holds a layer of the
 * ziggurat (8 bits), a sign, and the first 23 binary digits of where in the layer's width the noise lies. */
void NAME(ghostclip_lattice)(const REAL *restrict sums, REAL *restrict out, uint8_t *restrict open,
                             const uint32_t *restrict words, int64_t n, double scale, double step, double limit,
                             const double *restrict widths, const double *restrict inside) {
    for (int64_t i = 0; i < n; i++) {
        const uint32_t word = words[i], layer = word & 255;
        const double share = ((double)(int32_t)(word >> 9) + 0.5) * 0x1p-23, width = widths[layer];
        double target = (double)sums[i] * scale;
        target = target == target ? target : 0.0;
        target = target > limit ? limit : target < -limit ? -limit : target;
        const double noise = width * share, noisy = target + (word & 256 ? -noise : noise);
        /* Adding and taking off 1.5 * 2^52 rounds to an integer; limit is far below. */
        const double whole = (noisy + 0x1.8p52) - 0x1.8p52;
        const double error = width * 0x1p-24 + (fabs(target) + width) * 0x1p-50;
        open[i] = !(share < inside[layer] - 0x1p-23) | !(fabs(fabs(noisy - whole) - 0.5) > error);
        out[i] = (REAL)(whole * step);
    }
}

#endif
