/* Reads the file THIS twice, while REAL is float and while it is double; NAME(x) is x_float or x_double. */

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

#define REAL double
#define INTEGER int64_t
#define NAME(x) x##_double
#include "vectors.h"
#include THIS
