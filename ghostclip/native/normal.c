/* Standard normal numbers from ChaCha (RFC 8439, section 2.3) by Box and Muller's (1958) transform.

   The cipher runs on LANES blocks side by side, one in each lane of the processor's vectors, and the transform on all
   their words. Both are written without intrinsics, for any compiler with vector types. */

#include <math.h>

#include "words.h"

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX2__)
#define LANES 8
#else
#define LANES 4
#endif
#define WORDS (16 * LANES)
/* ChaCha12, as random generators take it; no attack is known on more than 7 rounds. RFC 8439 has 20. */
#define ROUNDS 12
#define PAIRS (WORDS / 2)
/* Sizes of a word below it, one in 2^19, get more bits. */
#define SMALL (1 << 12)
/* Floats in a line of the cache, and how far ahead sums are fetched. */
#define LINE 16
#define AHEAD (2 * WORDS)

typedef uint32_t lanes __attribute__((vector_size(4 * LANES)));

#define ROTATE(x, k) (((x) << (k)) | ((x) >> (32 - (k))))
#define QUARTER(a, b, c, d)                                                                                            \
    a += b, d = ROTATE(d ^ a, 16), c += d, b = ROTATE(b ^ c, 12), a += b, d = ROTATE(d ^ a, 8), c += d,                \
        b = ROTATE(b ^ c, 7)

int ghostclip_lanes(void) { return LANES; }

/* Blocks counter ... counter + LANES - 1 of a nonce's key stream: word w of block l at words[w * LANES + l]. */
static void blocks(const uint32_t key[8], uint32_t nonce, uint64_t counter, uint32_t words[WORDS]) {
    lanes start[16], state[16];
    const uint32_t constants[4] = {0x61707865, 0x3320646e, 0x79622d32, 0x6b206574};
    for (int w = 0; w < 4; w++) start[w] = (lanes){0} + constants[w];
    for (int w = 0; w < 8; w++) start[4 + w] = (lanes){0} + key[w];
    for (int l = 0; l < LANES; l++) {
        start[12][l] = (uint32_t)(counter + l);
        start[13][l] = (uint32_t)((counter + l) >> 32);
    }
    start[14] = (lanes){0} + nonce;
    start[15] = (lanes){0};
    for (int w = 0; w < 16; w++) state[w] = start[w];
    for (int round = 0; round < ROUNDS; round += 2) {
        QUARTER(state[0], state[4], state[8], state[12]);
        QUARTER(state[1], state[5], state[9], state[13]);
        QUARTER(state[2], state[6], state[10], state[14]);
        QUARTER(state[3], state[7], state[11], state[15]);
        QUARTER(state[0], state[5], state[10], state[15]);
        QUARTER(state[1], state[6], state[11], state[12]);
        QUARTER(state[2], state[7], state[8], state[13]);
        QUARTER(state[3], state[4], state[9], state[14]);
    }
    for (int w = 0; w < 16; w++) state[w] += start[w];
    memcpy(words, state, 4 * WORDS);
}

/* -2 ln x for x in [2^-64, 1], never below 0: x = 2^e (1 + f), f in [sqrt(1/2) - 1, sqrt(2) - 1), and ln(1 + f) =
 * f - f^2 p(f) with the polynomial p of degree 7 that interpolates at Chebyshev's points (relative error 1.3e-7; no
 * division). Its coefficients stand here twice as large. */
static inline float minus_twice_the_logarithm(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    int32_t exponent = (int32_t)(bits - 0x3f3504f3) >> 23;
    bits -= (uint32_t)exponent << 23;
    float m;
    memcpy(&m, &bits, 4);
    float f = m - 1.0f;
    float p = 0.9999999f + f * (-0.6666732f + f * (0.5000322f + f * (-0.39946212f + f * (0.33150096f
            + f * (-0.2961292f + f * (0.28515594f - f * 0.18008404f))))));
    return f * (f * p - 2.0f) - (float)exponent * 1.38629436112f;
}

/* 31 bits of a word. */
static inline int32_t size_of(uint32_t word) { return (int32_t)(word >> 1); }

/* One pair from u in (0, 1], which is its distance from zero, and the angle from a word: 30 bits are x in
 * [-pi/4, pi/4), where few terms of the series are enough, and two the quadrant: whether it is the one number or the
 * other that is the cosine's, and with which sign. */
static inline void pair(float u, uint32_t word, float std, float *one, float *other) {
    float radius = std * sqrtf(minus_twice_the_logarithm(u));
    float x = (float)(int32_t)(word & ~3u) * (1.57079632679f * 0x1p-32f), q = x * x;
    float sine = x * (1.0f - q * (1.0f / 6 - q * (1.0f / 120 - q * (1.0f / 5040 - q * (1.0f / 362880)))));
    float cosine = 1.0f - q * (0.5f - q * (1.0f / 24 - q * (1.0f / 720 - q * (1.0f / 40320))));
    uint32_t bits;
    memcpy(&bits, &cosine, 4);
    bits ^= word << 31;
    memcpy(&cosine, &bits, 4);
    *one = radius * (word & 2 ? sine : cosine);
    *other = radius * (word & 2 ? cosine : sine);
}

/* Normal numbers out of a group of blocks. Where the size of a word is small, which makes a number far out, it gets 32
 * more bits from the other nonce's stream: with 31 alone, numbers would end at 6.7 standard deviations. */
static void transform(const uint32_t words[WORDS], float std, float *restrict out, const uint32_t key[8],
                      uint64_t counter) {
    int32_t least = SMALL;
    for (int i = 0; i < PAIRS; i++) {
        const int32_t size = size_of(words[i]);
        pair((float)size * 0x1p-31f + 0x1p-32f, words[PAIRS + i], std, &out[i], &out[PAIRS + i]);
        least = size < least ? size : least;
    }
    if (least == SMALL) return;
    uint32_t more[WORDS];
    blocks(key, 1, counter, more);
    for (int i = 0; i < PAIRS; i++) {
        if (size_of(words[i]) >= SMALL) continue;
        const double u = (size_of(words[i]) * 0x1p32 + more[i] + 0.5) * 0x1p-63;
        pair((float)u, words[PAIRS + i], std, &out[i], &out[PAIRS + i]);
    }
    memset(more, 0, sizeof more);
}

/* Overwrites out[first ... last) with normal numbers of that standard deviation (a double's bits), where out[0] is the
 * first one from block counter on; first is a multiple of WORDS. Returns 0. */
int ghostclip_normal(float *out, Word std, const uint32_t key[8], Word counter, Word first, Word last) {
    const float deviation = (float)real_of(std);
    uint32_t words[WORDS];
    float rest[WORDS];
    for (Word done = first; done < last; done += WORDS) {
        const uint64_t block = counter + done / 16;
        blocks(key, 0, block, words);
        if (last - done >= WORDS) {
            transform(words, deviation, out + done, key, block);
        } else {
            transform(words, deviation, rest, key, block);
            memcpy(out + done, rest, 4 * (last - done));
        }
    }
    memset(words, 0, sizeof words);
    memset(rest, 0, sizeof rest);
    return 0;
}

/* Turns noise w into (w + the sum of weight * kept) over kept numbers, and each of these into share * kept + gain * that.
 * Of number k the factors are weight, share and gain; state holds it stride floats after that of k - 1. */
static void recall(float *restrict noise, float *restrict state, Word stride, const float *factors, Word kept,
                   Word some) {
    for (Word k = 0; k < kept; k++)
        for (Word i = 0; i < some; i++) noise[i] += factors[3 * k] * state[k * stride + i];
    for (Word k = 0; k < kept; k++) {
        const float share = factors[3 * k + 1], gain = factors[3 * k + 2];
        if (gain == 0) continue;
        for (Word i = 0; i < some; i++) state[k * stride + i] = share * state[k * stride + i] + gain * noise[i];
    }
}

/* Scales numbers and adds normal ones to them (factor and standard deviation are doubles' bits): each of count parts is
 * a pointer to floats, how many there are, and a pointer to kept floats for each of them, from which `recall` makes
 * noise of these; the parts share one stream, as if they lay side by side. After the factors of `recall` stands what
 * its noise is multiplied with. Of all these numbers it takes [first, last), first a multiple of WORDS. Returns 0. */
int ghostclip_release(const Word *parts, Word count, Word scale, Word std, const float *factors, Word kept,
                      const uint32_t key[8], Word counter, Word first, Word last) {
    const float factor = (float)real_of(scale), deviation = (float)real_of(std), times = factors[3 * kept];
    uint32_t words[WORDS];
    float fresh[WORDS];
    Word begin = 0, drawn = first;
    for (Word part = 0; part < count && begin < last; part++) {
        const Word size = parts[3 * part + 1], end = begin + size, stop = end < last ? end : last;
        for (Word at = begin > first ? begin : first; at < stop;) {
            if (at == drawn) {
                blocks(key, 0, counter + at / 16, words);
                transform(words, deviation, fresh, key, counter + at / 16);
                drawn += WORDS;
            }
            const Word some = stop < drawn ? stop - at : drawn - at;
            float *numbers = (float *)(intptr_t)parts[3 * part] + (at - begin);
            float *noise = fresh + (at - (drawn - WORDS));
            /* What comes after the next group is on its way from memory while that group's noise is made. */
            for (Word i = 0; i < some; i += LINE) __builtin_prefetch(numbers + AHEAD + i, 1);
            if (kept) recall(noise, (float *)(intptr_t)parts[3 * part + 2] + (at - begin), size, factors, kept, some);
            for (Word i = 0; i < some; i++) numbers[i] = numbers[i] * factor + times * noise[i];
            at += some;
        }
        begin = end;
    }
    memset(words, 0, sizeof words);
    memset(fresh, 0, sizeof fresh);
    return 0;
}

/* Overwrites out[0 ... n) with words of the key stream, lanes interleaved; returns the number of blocks used up. */
uint64_t ghostclip_words(uint32_t *out, uint64_t n, const uint32_t key[8], uint64_t counter) {
    uint32_t words[WORDS];
    uint64_t used = 0;
    for (uint64_t done = 0; done < n; done += WORDS, used += LANES) {
        blocks(key, 0, counter + used, words);
        memcpy(out + done, words, 4 * (n - done < WORDS ? n - done : WORDS));
    }
    return used;
}
