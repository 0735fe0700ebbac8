/* Vectors for the files that read themselves once for each type of number: their size, while REAL is not defined; then
 * those of REAL, and of INTEGER, which has as many bits. */

#ifndef REAL

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "words.h"

#if defined(__AVX512F__)
#define BYTES 64
#elif defined(__AVX__)
#define BYTES 32
#else
#define BYTES 16
#endif
/* Vectors that are added up together. */
#define SUMS 16
#define LESSER(a, b) ((a) < (b) ? (a) : (b))
#define INLINE static inline __attribute__((always_inline))

#else

#define LANES ((long)(BYTES / sizeof(REAL)))
#define VEC NAME(vector)
#define INTS NAME(integers)
typedef REAL VEC __attribute__((vector_size(BYTES), aligned(sizeof(REAL)), may_alias));
typedef INTEGER INTS __attribute__((vector_size(BYTES), aligned(sizeof(REAL)), may_alias));

static const INTEGER NAME(numbers)[SUMS] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

/* The sum of each of SUMS vectors: neighbours of two vectors are added into one, until they are all sums. */
INLINE void NAME(fold)(VEC *sums, REAL *found) {
#if defined(__clang__)
    for (int pair = 0; pair < SUMS; pair++) {
        found[pair] = 0;
        for (long lane = 0; lane < LANES; lane++) found[pair] += sums[pair][lane];
    }
#else
    const INTS evens = 2 * *(const INTS *)NAME(numbers), odds = evens + 1;
#pragma GCC unroll 8
    for (long count = SUMS / 2; count * LANES >= SUMS; count /= 2)
#pragma GCC unroll 8
        for (long pair = 0; pair < count; pair++)
            sums[pair] = __builtin_shuffle(sums[2 * pair], sums[2 * pair + 1], evens) +
                         __builtin_shuffle(sums[2 * pair], sums[2 * pair + 1], odds);
    memcpy(found, sums, SUMS * sizeof(REAL));
#endif
}

#endif
