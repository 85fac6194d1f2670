/* What kernels for codes of few bits share. A code is an index into a table of int8 levels, or with 8 bits the level
 * itself; an element is its level times the scale of its row and group of columns. The codes of the kept elements among
 * 64 columns are one stream of bits, lowest first, that begins with a whole byte. */

enum { SHORT_BASE = (127 - 20) * 16, SHORT_SHIFT = 3 }; /* as in scale_grid.py */

/* Bytes of so many codes. */
INLINE int64_t code_bytes(const Job *job, int64_t count)
{
    return (count * job->value_bits + 7) >> 3;
}

/* The codes of 64 columns, in a buffer of SLACK bytes where fewer may be left. */
INLINE const uint8_t *whole_codes(const uint8_t *codes, const uint8_t *end, void *buffer, const int careful)
{
    return careful && end - codes < SLACK ? copy_last(codes, end, SLACK, buffer) : codes;
}

/* The sum over groups of whole numbers times scales, eight groups at a time: every kernel the same to the bit. */
INLINE void add_scaled(float *lanes, int64_t group, int32_t sum, float scale, float x_scale)
{
    lanes[group & 7] += (scale * x_scale) * (float)sum;
}

INLINE float sum_lanes(const float *l)
{
    return ((l[0] + l[4]) + (l[2] + l[6])) + ((l[1] + l[5]) + (l[3] + l[7]));
}

/* Where the scales of a row of x begin: eight groups at a time, the last ones zero. */
INLINE const float *scales_of_x(const Job *job, int m)
{
    return job->x_scales + m * ((job->groups + 7) / 8 * 8);
}

/* The bfloat16 number that a code of 8 bits stands for, see scale_grid.py. */
INLINE uint16_t wide_scale(uint8_t code)
{
    return code ? (uint16_t)((SHORT_BASE + code) << SHORT_SHIFT) : 0;
}

/* The same of eight codes at once. */
INLINE void wide_scales(const uint8_t *codes, uint16_t *scales)
{
    typedef uint8_t Bytes __attribute__((vector_size(8)));
    typedef uint16_t Halves __attribute__((vector_size(16)));
    Bytes bytes;
    memcpy(&bytes, codes, 8);
    const Halves wide = __builtin_convertvector(bytes, Halves);
    const Halves found = ((wide + SHORT_BASE) << SHORT_SHIFT) & (Halves)(wide != 0);
    memcpy(scales, &found, 16);
}

INLINE float group_scale(const Job *job, int64_t row, int64_t group)
{
    const int64_t at = row * job->groups + group;
    if (job->scale_bytes == 1)
        return from_bf16(wide_scale(((const uint8_t *)job->scales)[at]));
    return from_bf16(((const uint16_t *)job->scales)[at]);
}

/* Copies up to `most` bytes; all of them at once where there are so many. */
INLINE void copy_few(void *to, const void *from, int bytes, const int most)
{
    if (bytes == most)
        memcpy(to, from, (size_t)most);
    else
        memcpy(to, from, (size_t)bytes);
}

/* The scales of up to eight groups from `block` on, zeros behind the last; returns how many there are. */
INLINE int scales_of_block(const Job *job, int64_t row, int64_t block, uint16_t *scales)
{
    const int groups = job->groups - block < 8 ? (int)(job->groups - block) : 8, bytes = job->scale_bytes;
    const char *from = (const char *)job->scales + (row * job->groups + block) * bytes;
    uint8_t codes[8] = {0};
    if (bytes == 1) {
        copy_few(codes, from, groups, 8);
        wide_scales(codes, scales);
    } else {
        memset(scales, 0, 16);
        copy_few(scales, from, groups * 2, 16);
    }
    return groups;
}

/* Kernels without an instruction that expands look codes up some time before they spread the levels, so that these have
 * arrived in the cache. The codes of 2, 4 and 8 bits of all rows are one stream, whose bytes hold whole codes: it is looked
 * up as it lies. With 3 bits every word of columns begins anew. */
enum { AHEAD = 1024 };              /* levels that are looked up together */
typedef int8_t Levels[AHEAD + 128]; /* spreading reads 16 bytes at any of them */

/* Defines NAME_floats_M and NAME_bytes_M, functions for M rows of x, from an inlined NAME_coded(job, first, last, sums, M,
 * bytes). */
#define CODED_ROWS(TARGET, NAME, M)                                                                         \
    TARGET static void NAME##_floats_##M(const Job *job, int64_t first, int64_t last, float *sums)          \
    {                                                                                                       \
        NAME##_coded(job, first, last, sums, M, 0);                                                         \
    }                                                                                                       \
    TARGET static void NAME##_bytes_##M(const Job *job, int64_t first, int64_t last, float *sums)           \
    {                                                                                                       \
        NAME##_coded(job, first, last, sums, M, 1);                                                         \
    }
#define CODED_FUNCTIONS(TARGET, NAME) \
    CODED_ROWS(TARGET, NAME, 1)       \
    CODED_ROWS(TARGET, NAME, 2)       \
    CODED_ROWS(TARGET, NAME, 4)       \
    CODED_ROWS(TARGET, NAME, 6)
