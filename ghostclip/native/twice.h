/* Reads the file THIS while REAL is float and while it is double, or for one of them; NAME(x) is x_float or x_double. */

#ifndef ONLY_DOUBLE
#define REAL float
#define INTEGER int32_t
#define NAME(x) x##_float
#include "vectors.h"
#include THIS

#undef REAL
#undef INTEGER
#undef NAME
#undef LANES
#undef VEC
#undef INTS
#endif

#ifndef ONLY_FLOAT
#define REAL double
#define INTEGER int64_t
#define NAME(x) x##_double
#include "vectors.h"
#include THIS
#endif
