/* What functions get that share their work among threads: 64 bits each, whole numbers, addresses and bits of others. */

#ifndef WORDS_H
#define WORDS_H

#include <stdint.h>
#include <string.h>

typedef int64_t Word;

/* The number with these bits. */
static inline double real_of(Word bits) {
    double found;
    memcpy(&found, &bits, sizeof found);
    return found;
}

#endif
