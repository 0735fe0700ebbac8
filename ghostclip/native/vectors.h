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
#define LESSER(a, b) ((a) < (b) ? (a) : (b))
#define INLINE static inline __attribute__((always_inline))

/* Memory that starts at a whole vector, and in ``whole`` what is to be freed; null where there is none. Windows has no
 * aligned_alloc. */
INLINE void *aligned(size_t size, void **whole) {
    char *start = *whole = malloc(size + BYTES);
    return start ? start + (BYTES - (uintptr_t)start % BYTES) : NULL;
}

#else

#define LANES ((long)(BYTES / sizeof(REAL)))
#define VEC NAME(vector)
#define INTS NAME(integers)
typedef REAL VEC __attribute__((vector_size(BYTES), aligned(sizeof(REAL)), may_alias));
typedef INTEGER INTS __attribute__((vector_size(BYTES), aligned(sizeof(REAL)), may_alias));

static const INTEGER NAME(numbers)[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

#endif
