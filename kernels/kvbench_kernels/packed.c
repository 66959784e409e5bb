/* Decode attention on a CPU, over exact tokens, and over packed ones that are dequantised a block at a time.
 *
 * Plain C without threads. Each function has a version for the machine's own vector instructions; the loader picks it.
 * kvbench passes pointers to contiguous fp32 and uint8 memory (storage/kernels/on_cpu.py). Its own PyTorch code computes
 * the same and is the reference.
 *
 *     value = scale * table[code] + low
 *
 * axis 0: a step is a token. Its C channels are packed in runs of `run` channels, and each `group` of channels has a
 *         scale and a low.
 * axis 1: a step is `run` tokens. A run is these tokens of a channel, for C channels side by side, and each channel has
 *         a scale and a low.
 *
 * A run of m codes of `bits` bits is packed in one of two ways (kvbench/kv/packed.py). `runs`: in planes of 4, 2 and 1
 * bits, the plane of the lowest bits first. A plane of w bits takes b = ceil(m w / 8) bytes, and byte j holds the codes
 * j, j + b, j + 2 b, ... from its lowest bits up. `stream`: all codes are one little-endian number, the first code in its
 * lowest bits.
 */

#include <stdint.h>

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#define FOR_EACH_CPU __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FOR_EACH_CPU
#endif
#define INLINE static inline __attribute__((always_inline))

#define INTERFACE 5      /* the layout of `struct packed` and of the arguments */
#define MOST_CODES 16384 /* numbers of a block: as fp32 they stay in the second-level cache */
#define TOKENS 32        /* tokens of a block if each token is a step of its own */
#define MOST_SCALES 512  /* scales of a step: one for each channel, at most */
#define MOST_GROUPS 64   /* groups of a token whose codes are multiplied as they are: each has 8 channels or more */
#define AHEAD 32         /* tokens from one that is read to one that is fetched */

/* Eight numbers. Wider vectors would be kept in memory, and not in registers, on processors without AVX-512. They need no
 * alignment. */
typedef float floats __attribute__((vector_size(32), aligned(4)));
typedef int32_t ints __attribute__((vector_size(32)));
#define LANES 8
typedef uint8_t bytes __attribute__((vector_size(16), aligned(1)));
#define WIDTH 16
/* The numbers of two vectors at these places. */
#define FOLD(a, b, ...) (__builtin_shufflevector(a, b, __VA_ARGS__))

/* Keys or values of N heads, one head of a row after the other. */
struct packed {
    const uint8_t *codes; /* [heads, steps, step_bytes] */
    const void *scale;    /* [heads, steps, scales], in fp32 or fp16 */
    const void *low;      /* [heads, steps, scales], in the type of the scales; null: 0 */
    const float *table;   /* [2^bits]; null: a code is its own number */
    int64_t heads, steps, channels, bits, run, group, axis, stream;
    int64_t normed; /* 1: the numbers of a token are divided by their Euclidean norm before they are scaled */
    int64_t step_bytes, scales;
    int64_t head_bytes;           /* from one head's codes to the next one's */
    int64_t scale_head, low_head; /* from one head's scales, or lows, to the next one's, counted in numbers */
    int64_t half;                 /* 1: scales and lows are fp16 */
};

int64_t kvbench_kernels_interface(void) { return INTERFACE; }
int64_t kvbench_kernels_most_codes(void) { return MOST_CODES; }

/* to[0 .. count) = (from >> shift) & mask, or with these bits put in at first_bit. */
INLINE void take_bits(const uint8_t *from, uint8_t *to, int64_t count, int shift, uint8_t mask, int first_bit)
{
    int64_t j = 0;
    for (; j + WIDTH <= count; j += WIDTH) {
        const bytes code = (*(const bytes *)(from + j) >> shift) & mask;
        if (first_bit)
            *(bytes *)(to + j) |= code << first_bit;
        else
            *(bytes *)(to + j) = code;
    }
    for (; j < count; j++) {
        const uint8_t code = (uint8_t)((from[j] >> shift) & mask);
        to[j] = first_bit ? (uint8_t)(to[j] | code << first_bit) : code;
    }
}

/* Unpack m codes of a stream. */
INLINE const uint8_t *unpack_stream(const uint8_t *packed, uint8_t *codes, int64_t bits, int64_t m)
{
    if (bits == 8)
        return packed;
    if (bits == 4) {
        int64_t j = 0;
        for (; j + WIDTH <= m / 2; j += WIDTH) {
            const bytes even = *(const bytes *)(packed + j) & 15, odd = *(const bytes *)(packed + j) >> 4;
            *(bytes *)(codes + 2 * j) = FOLD(even, odd, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
            *(bytes *)(codes + 2 * j + WIDTH) =
                FOLD(even, odd, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
        }
        for (; j < m / 2; j++) {
            codes[2 * j] = packed[j] & 15;
            codes[2 * j + 1] = packed[j] >> 4;
        }
        if (m % 2)
            codes[m - 1] = packed[m / 2] & 15;
        return codes;
    }
    const int mask = (1 << bits) - 1;
    for (int64_t j = 0; j < m; j++) {
        const int64_t byte = j * bits / 8;
        const int shift = (int)(j * bits % 8);
        int code = packed[byte] >> shift;
        /* a code that ends in the next byte; behind the last code there may be none */
        if (shift + bits > 8)
            code |= packed[byte + 1] << (8 - shift);
        codes[j] = (uint8_t)(code & mask);
    }
    return codes;
}

/* Unpack m codes, each `inner` bytes wide, and return where they are. Codes of 8 bits stay where they are. */
INLINE const uint8_t *unpack(const uint8_t *packed, uint8_t *codes, int64_t bits, int64_t m, int64_t inner)
{
    if (bits == 8)
        return packed;
    int first_bit = 0;
    for (int width = 4; width; width /= 2) {
        if (!(bits & width))
            continue;
        const int64_t run = (m * width + 7) / 8;
        const uint8_t mask = (uint8_t)((1 << width) - 1);
        for (int64_t place = 0; place * run < m; place++) {
            const int64_t count = m - place * run < run ? m - place * run : run;
            uint8_t *to = codes + place * run * inner;
            take_bits(packed, to, count * inner, (int)(place * width), mask, first_bit);
        }
        packed += run * inner;
        first_bit += width;
    }
    return codes;
}

/* fp16 numbers, each in the lower half of its place, as fp32. They are finite.
 * The bits of exponent and fraction, moved to their places in fp32, stand for 2^-112 times the number. */
INLINE floats from_fp16(ints stored)
{
    const floats number = (floats)((stored & 0x7fff) << 13) * 0x1p112f;
    return (floats)((ints)number | (stored & 0x8000) << 16);
}

/* Return `count` scales or lows from number `first` on, as fp32: where they are, or in `room` if they are fp16. */
INLINE const float *as_fp32(const void *stored, int64_t first, int64_t count, int64_t half, float *room)
{
    if (!stored)
        return 0;
    if (!half)
        return (const float *)stored + first;
    const uint16_t *from = (const uint16_t *)stored + first;
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        ints wide;
        for (int lane = 0; lane < LANES; lane++)
            wide[lane] = from[i + lane];
        *(floats *)(room + i) = from_fp16(wide);
    }
    for (; i < count; i++) {
        const ints wide = {from[i]};
        room[i] = from_fp16(wide)[0];
    }
    return room;
}

INLINE void clear(float *numbers, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        numbers[i] = 0;
}

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* Channels of a dequantised token: C with zeros behind them up to a multiple of WIDTH. */
INLINE int64_t padded(int64_t channels) { return (channels + WIDTH - 1) / WIDTH * WIDTH; }

/* values[0 .. count) = scale * table[code] + low, with one scale and one low. */
INLINE void scale_run(const uint8_t *code, const float *table, float scale, float low, int64_t count, float *values)
{
    int64_t c = 0;
    /* GCC makes vector instructions of loops of a fixed length, and none of its own conversion of a vector of bytes */
    if (table) {
        for (; c + WIDTH <= count; c += WIDTH)
            for (int i = 0; i < WIDTH; i++)
                values[c + i] = scale * table[code[c + i]] + low;
        for (; c < count; c++)
            values[c] = scale * table[code[c]] + low;
        return;
    }
    for (; c + WIDTH <= count; c += WIDTH)
        for (int i = 0; i < WIDTH; i++)
            values[c + i] = scale * (float)code[c + i] + low;
    for (; c < count; c++)
        values[c] = scale * (float)code[c] + low;
}

/* values[0 .. count) = scale * values + low. */
INLINE void scale_numbers(float scale, float low, int64_t count, float *values)
{
    int64_t c = 0;
    for (; c + LANES <= count; c += LANES)
        *(floats *)(values + c) = scale * *(floats *)(values + c) + low;
    for (; c < count; c++)
        values[c] = scale * values[c] + low;
}

/* values[0 .. count) = table[code]. A table of codes of up to 4 bits has WIDTH numbers, and stays in a register. */
INLINE void look_up(const uint8_t *code, const float *table, int64_t bits, int64_t count, float *values)
{
    int64_t c = 0;
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
    if (bits <= 4 && __builtin_cpu_supports("avx2")) {
        const floats low_half = *(const floats *)table, high_half = *(const floats *)(table + LANES);
        for (; c + LANES <= count; c += LANES) {
            ints places;
            for (int i = 0; i < LANES; i++)
                places[i] = code[c + i];
            *(floats *)(values + c) = __builtin_shuffle(low_half, high_half, places);
        }
    }
#endif
    for (; c < count; c++)
        values[c] = table[code[c]];
}

/* values[0 .. count) = scale * code + low, with a scale and a low for each number. */
INLINE void scale_each(const uint8_t *code, const float *scale, const float *low, int64_t count, float *values)
{
    int64_t c = 0;
    for (; c + WIDTH <= count; c += WIDTH)
        for (int i = 0; i < WIDTH; i++)
            values[c + i] = scale[c + i] * (float)code[c + i] + low[c + i];
    for (; c < count; c++)
        values[c] = scale[c] * (float)code[c] + low[c];
}

/* The bytes b of a run if its codes are one plane of 8, 4 or 2 bits and need no table, else 0. Such codes are dequantised
 * as they are read, without a copy: byte j holds the codes j, j + b, j + 2 b, ... from its lowest bits up. */
INLINE int64_t bytes_of_plane(const struct packed *p)
{
    if (p->stream || p->table || (p->bits != 8 && p->bits != 4 && p->bits != 2) || p->run * p->bits % 8)
        return 0;
    return p->run * p->bits / 8;
}

/* Dequantise one token of axis 0 whose runs are a plane each. A run is one group, or a plane's codes at one place are
 * whole groups. `bits` and `step` are constants, so that the loops over them are unrolled. */
INLINE void dequantise_planes(const struct packed *p, const uint8_t *packed, const float *scale, const float *low,
                              int64_t plane, float *values, const int bits, const int step)
{
    const int several = p->group < p->run;
    /* bytes whose codes at one place have the same scale */
    const int64_t span = several ? p->group : plane, spans = plane / span;
    for (int64_t run = 0; run < p->channels / p->run; run++, packed += plane, values += p->run) {
        for (int64_t s = 0; s < spans; s++) {
            for (int64_t j = s * span; j < (s + 1) * span; j += step) {
                for (int place = 0; place < 8 / bits; place++) {
                    const int64_t g = several ? place * spans + s : 0;
                    const float factor = scale[g], least_value = low ? low[g] : 0;
                    float *to = values + place * plane + j;
                    for (int i = 0; i < step; i++)
                        to[i] = factor * (float)((packed[j + i] >> (place * bits)) & ((1 << bits) - 1)) + least_value;
                }
            }
        }
        const int64_t groups = several ? 8 / bits * spans : 1;
        scale += groups;
        if (low)
            low += groups;
    }
}

INLINE float sum_of_squares(const float *values, int64_t count)
{
    floats squares = {0};
    int64_t c = 0;
    for (; c + LANES <= count; c += LANES)
        squares += *(const floats *)(values + c) * *(const floats *)(values + c);
    float sum = 0;
    for (; c < count; c++)
        sum += values[c] * values[c];
    for (int i = 0; i < LANES; i++)
        sum += squares[i];
    return sum;
}

/* Dequantise one token of axis 0. `table` is p->table, with room for WIDTH numbers. */
INLINE void dequantise_token(const struct packed *p, const uint8_t *packed, const float *scale, const float *low,
                             const float *table, uint8_t *codes, float *values)
{
    const int64_t channels = p->channels;
    const uint8_t *code = packed;
    if (p->bits < 8) {
        /* the last run is whole, too: channels that are not there fill it up */
        for (int64_t start = 0; start < channels; start += p->run) {
            if (p->stream)
                unpack_stream(packed, codes + start, p->bits, p->run);
            else
                unpack(packed, codes + start, p->bits, p->run, 1);
            packed += (p->run * p->bits + 7) / 8;
        }
        code = codes;
    }
    /* a table in a register is read first, and so is one whose numbers are divided by their norm */
    const int reads_first = table && (p->bits <= 4 || p->normed);
    if (reads_first)
        look_up(code, table, p->bits, channels, values);
    float factor = 1;
    if (p->normed)
        factor = 1 / __builtin_sqrtf(1e-30f + sum_of_squares(values, channels));
    for (int64_t g = 0, start = 0; start < channels; g++, start += p->group) {
        const int64_t count = start + p->group < channels ? p->group : channels - start;
        const float least_value = low ? low[g] : 0;
        if (reads_first)
            scale_numbers(factor * scale[g], least_value, count, values + start);
        else
            scale_run(code + start, table, scale[g], least_value, count, values + start);
    }
}

/* values[t, c] = scale[c] * code + low[c] for the tokens of a step of axis 1, whose codes lie in planes of one width. */
INLINE void dequantise_step(const uint8_t *packed, const float *scale, const float *low, int64_t plane,
                            int64_t channels, float *values, const int bits)
{
    const int mask = (1 << bits) - 1;
    for (int64_t j = 0; j < plane; j++, packed += channels) {
        for (int64_t c = 0; c < channels; c += WIDTH) {
            for (int place = 0; place < 8 / bits; place++) {
                float *to = values + (j + place * plane) * channels + c;
                for (int i = 0; i < WIDTH; i++)
                    to[i] = scale[c + i] * (float)((packed[c + i] >> (place * bits)) & mask) + low[c + i];
            }
        }
    }
}

/* Dequantise the tokens of `steps` steps into rows of padded(C) numbers. */
INLINE void dequantise(const struct packed *p, int64_t head, int64_t first, int64_t steps, uint8_t *codes, float *values)
{
    const int64_t channels = p->channels, width = padded(channels);
    float scale_room[MOST_SCALES], low_room[MOST_SCALES];
    /* a table of less than WIDTH numbers is looked up as one of WIDTH */
    float small_table[WIDTH] = {0};
    const float *table = p->table;
    if (table && p->bits <= 4) {
        for (int i = 0; i < 1 << p->bits; i++)
            small_table[i] = table[i];
        table = small_table;
    }
    int64_t plane = bytes_of_plane(p);
    if (p->axis == 0 && (plane % 8 || channels % p->run))
        plane = 0;
    if (p->axis == 0 && p->group != p->run && (p->group > p->run || p->group % 8 || plane % p->group))
        plane = 0;
    if (p->axis == 1 && channels % WIDTH)
        plane = 0;
    for (int64_t step = first; step < first + steps; step++) {
        const uint8_t *packed = p->codes + head * p->head_bytes + step * p->step_bytes;
        const int64_t first_scale = head * p->scale_head + step * p->scales;
        const int64_t first_low = head * p->low_head + step * p->scales;
        const float *scale = as_fp32(p->scale, first_scale, p->scales, p->half, scale_room);
        const float *low = as_fp32(p->low, first_low, p->scales, p->half, low_room);
        if (p->axis == 0) {
            const int wide = (p->group < p->run ? p->group : plane) % WIDTH == 0;
            if (!plane)
                dequantise_token(p, packed, scale, low, table, codes, values);
            else if (p->bits == 8 && wide)
                dequantise_planes(p, packed, scale, low, plane, values, 8, WIDTH);
            else if (p->bits == 4 && wide)
                dequantise_planes(p, packed, scale, low, plane, values, 4, WIDTH);
            else if (p->bits == 2 && wide)
                dequantise_planes(p, packed, scale, low, plane, values, 2, WIDTH);
            else if (p->bits == 8)
                dequantise_planes(p, packed, scale, low, plane, values, 8, WIDTH / 2);
            else if (p->bits == 4)
                dequantise_planes(p, packed, scale, low, plane, values, 4, WIDTH / 2);
            else
                dequantise_planes(p, packed, scale, low, plane, values, 2, WIDTH / 2);
            values += width;
            continue;
        }
        if (plane) {
            if (p->bits == 8)
                dequantise_step(packed, scale, low, plane, channels, values, 8);
            else if (p->bits == 4)
                dequantise_step(packed, scale, low, plane, channels, values, 4);
            else
                dequantise_step(packed, scale, low, plane, channels, values, 2);
            values += p->run * width;
            continue;
        }
        const uint8_t *code = unpack(packed, codes, p->bits, p->run, channels);
        for (int64_t t = 0; t < p->run; t++, values += width)
            scale_each(code + t * channels, scale, low, channels, values);
    }
}

INLINE int64_t tokens_of_a_step(const struct packed *p) { return p->axis ? p->run : 1; }
INLINE int64_t steps_of_a_block(const struct packed *p) { return p->axis ? 1 : TOKENS; }

INLINE floats products(const float *a, const float *b, int64_t width)
{
    floats sums = {0};
    for (int64_t c = 0; c < width; c += LANES)
        sums += *(const floats *)(a + c) * *(const floats *)(b + c);
    return sums;
}

INLINE float dot(const float *a, const float *b, int64_t width)
{
    const floats sums = products(a, b, width);
    float sum = 0;
    for (int i = 0; i < LANES; i++)
        sum += sums[i];
    return sum;
}

/* The sums of 8 vectors, one in each place. Each level adds halves, of two vectors at once, so that no sum is by itself. */
INLINE floats sums_of(const floats v[LANES])
{
    floats by4[4], by2[2];
    for (int i = 0; i < 4; i++)
        by4[i] = FOLD(v[2 * i], v[2 * i + 1], 0, 1, 2, 3, 8, 9, 10, 11)
                 + FOLD(v[2 * i], v[2 * i + 1], 4, 5, 6, 7, 12, 13, 14, 15);
    for (int i = 0; i < 2; i++)
        by2[i] = FOLD(by4[2 * i], by4[2 * i + 1], 0, 1, 4, 5, 8, 9, 12, 13)
                 + FOLD(by4[2 * i], by4[2 * i + 1], 2, 3, 6, 7, 10, 11, 14, 15);
    return FOLD(by2[0], by2[1], 0, 2, 4, 6, 8, 10, 12, 14) + FOLD(by2[0], by2[1], 1, 3, 5, 7, 9, 11, 13, 15);
}

/* The products of two queries with four tokens: a number that is loaded meets several others. */
INLINE void products_of_group(const float *query, const float *values, int64_t width, floats first[4], floats second[4])
{
    floats sums[8] = {{0}};
    for (int64_t c = 0; c < width; c += LANES) {
        const floats q0 = *(const floats *)(query + c), q1 = *(const floats *)(query + width + c);
        for (int i = 0; i < 4; i++) {
            const floats v = *(const floats *)(values + i * width + c);
            sums[i] += q0 * v;
            sums[4 + i] += q1 * v;
        }
    }
    for (int i = 0; i < 4; i++) {
        first[i] = sums[i];
        second[i] = sums[4 + i];
    }
}

/* Fetch `count` numbers into the cache before they are read. What lies behind the last token is fetched in vain. */
INLINE void fetch(const float *numbers, int64_t count)
{
    for (int64_t i = 0; i < count; i += 16) /* a line of the cache has 64 bytes */
        __builtin_prefetch(numbers + i);
}

/* out[r, l] = sum over c of query[r, c] * values[l, c], for rows of `width` numbers; out has `length` numbers a query.
 * Rows in memory are fetched `ahead` tokens before they are read. 0: they are in the cache. */
INLINE void multiply(const float *query, int64_t queries, const float *values, int64_t width, int64_t tokens, float *out,
                     int64_t length, const int ahead)
{
    int64_t t = 0;
    /* all queries meet the same eight tokens, which stay in the first-level cache */
    for (; t + LANES <= tokens; t += LANES) {
        if (ahead)
            fetch(values + (t + ahead) * width, LANES * width);
        int64_t r = 0;
        for (; r + 2 <= queries; r += 2) {
            floats first[LANES], second[LANES];
            for (int i = 0; i < LANES; i += 4)
                products_of_group(query + r * width, values + (t + i) * width, width, first + i, second + i);
            *(floats *)(out + r * length + t) = sums_of(first);
            *(floats *)(out + (r + 1) * length + t) = sums_of(second);
        }
        if (r < queries) { /* the last of an odd number */
            floats sums[LANES];
            for (int i = 0; i < LANES; i++)
                sums[i] = products(query + r * width, values + (t + i) * width, width);
            *(floats *)(out + r * length + t) = sums_of(sums);
        }
    }
    for (; t < tokens; t++)
        for (int64_t r = 0; r < queries; r++)
            out[r * length + t] = dot(query + r * width, values + t * width, width);
}

/* Add the weighted sum of `tokens` rows of values to `count` times LANES numbers. */
INLINE void add_weighted(const float *w, const float *values, int64_t width, int64_t tokens, float *sum, const int count)
{
    floats sums[8];
    for (int i = 0; i < count; i++)
        sums[i] = *(floats *)(sum + i * LANES);
    for (int64_t t = 0; t < tokens; t++)
        for (int i = 0; i < count; i++)
            sums[i] += w[t] * *(const floats *)(values + t * width + i * LANES);
    for (int i = 0; i < count; i++)
        *(floats *)(sum + i * LANES) = sums[i];
}

/* Add the sum over l of weight[r, l] * values[l, c] to out[r, c]; weight has `length` numbers a query. `ahead` as above. */
INLINE void add_all(const float *weight, int64_t length, int64_t queries, const float *values, int64_t width,
                    int64_t tokens, float *out, const int ahead)
{
    /* all queries meet the same block of tokens */
    for (int64_t first = 0; first < tokens; first += TOKENS) {
        const int64_t count = least(tokens - first, TOKENS);
        const float *block = values + first * width;
        if (ahead)
            fetch(block + ahead * width, count * width);
        for (int64_t r = 0; r < queries; r++) {
            const float *w = weight + r * length + first;
            float *sum = out + r * width;
            int64_t c = 0;
            /* eight sums at once, since one alone would wait for its last product */
            for (; c + 8 * LANES <= width; c += 8 * LANES)
                add_weighted(w, block + c, width, count, sum + c, 8);
            for (; c < width; c += LANES)
                add_weighted(w, block + c, width, count, sum + c, 1);
        }
    }
}

/* What follows multiplies codes as they are:
 *
 *     sum over i of x_i (scale code_i + low) = sum over i of (x_i scale) code_i + low sum over i of x_i
 *
 * A code is unpacked and multiplied in registers. To write its number and to read it again would take most of the time. */

#define AT_ONCE 4 /* queries that meet an unpacked code */

/* Four vectors of codes, from bits / 2 vectors of bytes that lie `apart` bytes from each other: first those at the lowest
 * bits of all, then those at the next place. */
INLINE void codes_at(const uint8_t *packed, int64_t apart, floats codes[4], const int bits)
{
    const int rows = bits / 2, mask = (1 << bits) - 1;
    for (int row = 0; row < rows; row++) {
        ints wide;
        for (int lane = 0; lane < LANES; lane++)
            wide[lane] = packed[row * apart + lane];
        for (int place = 0; place < 8 / bits; place++)
            codes[place * rows + row] = __builtin_convertvector((wide >> (place * bits)) & mask, floats);
    }
}

/* 1 if `kvbench_kernels_logits_of_codes` (axis 1) or `kvbench_kernels_add_codes` (axis 0) can read the codes. */
INLINE int reads_codes(const struct packed *p)
{
    const int64_t plane = bytes_of_plane(p);
    if (!plane || plane % LANES || p->normed || p->channels > MOST_SCALES)
        return 0;
    if (p->axis)
        return p->channels % WIDTH == 0;
    return p->run % (4 * LANES) == 0 && p->channels % p->run == 0 && p->group % LANES == 0 && p->run % p->group == 0;
}

/* Write the products of a step's run with queries: out[r, t] = sum over c of factor[r, c] code[t, c] + first[r]. */
INLINE void multiply_codes(const uint8_t *packed, int64_t plane, int64_t channels, const float *factor,
                           const float *first, float *out, int64_t length, const int bits, const int queries)
{
    const int rows = bits / 2;
    for (int64_t j = 0; j < plane; j += LANES) {
        floats sums[4][AT_ONCE][LANES];
        for (int i = 0; i < LANES; i += rows) {
            floats four[AT_ONCE][4] = {{{0}}};
            for (int64_t c = 0; c < channels; c += LANES) {
                floats codes[4];
                codes_at(packed + (j + i) * channels + c, channels, codes, bits);
                for (int r = 0; r < queries; r++)
                    for (int t = 0; t < 4; t++)
                        four[r][t] += *(const floats *)(factor + r * channels + c) * codes[t];
            }
            for (int r = 0; r < queries; r++)
                for (int t = 0; t < 4; t++)
                    sums[t / rows][r][i + t % rows] = four[r][t];
        }
        for (int place = 0; place < 8 / bits; place++)
            for (int r = 0; r < queries; r++)
                *(floats *)(out + r * length + place * plane + j) = sums_of(sums[place][r]) + first[r];
    }
}

/* Write the logits of a head's first `count` steps of axis 1. `bits` is a constant, so that the loops are unrolled. */
INLINE void logits_of_width(const struct packed *p, int64_t head, int64_t count, const float *query, int64_t queries,
                            int64_t length, float *logits, const int bits)
{
    const int64_t channels = p->channels, plane = bytes_of_plane(p);
    float scale_room[MOST_SCALES], low_room[MOST_SCALES], factor[AT_ONCE * MOST_SCALES];
    for (int64_t step = 0; step < count; step++, logits += p->run) {
        const uint8_t *packed = p->codes + head * p->head_bytes + step * p->step_bytes;
        const float *scale = as_fp32(p->scale, head * p->scale_head + step * p->scales, channels, p->half, scale_room);
        const float *low = as_fp32(p->low, head * p->low_head + step * p->scales, channels, p->half, low_room);
        for (int64_t r = 0; r < queries; r += AT_ONCE) {
            const int some = (int)least(queries - r, AT_ONCE);
            float first[AT_ONCE] = {0};
            for (int i = 0; i < some; i++) {
                const float *q = query + (r + i) * channels;
                for (int64_t c = 0; c < channels; c += LANES)
                    *(floats *)(factor + i * channels + c) = *(const floats *)(q + c) * *(const floats *)(scale + c);
                if (low)
                    first[i] = dot(q, low, channels);
            }
            float *out = logits + r * length;
            if (some == 4)
                multiply_codes(packed, plane, channels, factor, first, out, length, bits, 4);
            else if (some == 3)
                multiply_codes(packed, plane, channels, factor, first, out, length, bits, 3);
            else if (some == 2)
                multiply_codes(packed, plane, channels, factor, first, out, length, bits, 2);
            else
                multiply_codes(packed, plane, channels, factor, first, out, length, bits, 1);
        }
    }
}

/* The same for codes of any width that `reads_codes` allows. It is no part of its callers, which would take minutes to
 * compile. */
FOR_EACH_CPU void kvbench_kernels_logits_of_codes(const struct packed *p, int64_t head, int64_t count,
                                                  const float *query, int64_t queries, int64_t length, float *logits)
{
    if (p->bits == 8)
        logits_of_width(p, head, count, query, queries, length, logits, 8);
    else if (p->bits == 4)
        logits_of_width(p, head, count, query, queries, length, logits, 4);
    else
        logits_of_width(p, head, count, query, queries, length, logits, 2);
}

/* Add to sum[r, c] the sum over tokens of factor[r, group of c, t] code[t, c], for the channels of a run from `start` on. */
INLINE void add_run(const uint8_t *packed, int64_t step_bytes, int64_t plane, int64_t start, int64_t group,
                    int64_t groups, const float *factor, int64_t tokens, float *sum, int64_t width, const int bits,
                    const int queries)
{
    const int rows = bits / 2;
    for (int64_t j = 0; j < plane; j += rows * LANES) {
        floats sums[AT_ONCE][4] = {{{0}}};
        int64_t channel[4];
        const float *factors[4];
        for (int i = 0; i < 4; i++) {
            channel[i] = start + i / rows * plane + j + i % rows * LANES;
            factors[i] = factor + channel[i] / group * TOKENS;
        }
        for (int64_t t = 0; t < tokens; t++) {
            floats codes[4];
            codes_at(packed + t * step_bytes + j, LANES, codes, bits);
            for (int r = 0; r < queries; r++)
                for (int i = 0; i < 4; i++)
                    sums[r][i] += factors[i][r * groups * TOKENS + t] * codes[i];
        }
        for (int r = 0; r < queries; r++)
            for (int i = 0; i < 4; i++)
                *(floats *)(sum + r * width + channel[i]) += sums[r][i];
    }
}

/* Add the weighted values of a head's first `count` steps of axis 0 to sums[r, c]. `bits` is a constant again. */
INLINE void add_width(const struct packed *p, int64_t head, int64_t count, const float *weight, int64_t queries,
                      int64_t length, float *sums, const int bits)
{
    const int64_t groups = p->scales, width = padded(p->channels), plane = bytes_of_plane(p);
    float scale_room[TOKENS * MOST_GROUPS], low_room[TOKENS * MOST_GROUPS];
    float scales[MOST_GROUPS * TOKENS], lows[MOST_GROUPS * TOKENS], factor[AT_ONCE * MOST_GROUPS * TOKENS];
    for (int64_t first = 0; first < count; first += TOKENS) {
        const int64_t tokens = least(count - first, TOKENS), stored = first * groups;
        const uint8_t *packed = p->codes + head * p->head_bytes + first * p->step_bytes;
        const float *scale = as_fp32(p->scale, head * p->scale_head + stored, tokens * groups, p->half, scale_room);
        const float *low = as_fp32(p->low, head * p->low_head + stored, tokens * groups, p->half, low_room);
        /* a group's numbers one after the other, as the weights are; 0 for tokens that the last block lacks */
        clear(scales, groups * TOKENS);
        clear(lows, groups * TOKENS);
        for (int64_t t = 0; t < tokens; t++)
            for (int64_t g = 0; g < groups; g++)
                scales[g * TOKENS + t] = scale[t * groups + g];
        for (int64_t t = 0; low && t < tokens; t++)
            for (int64_t g = 0; g < groups; g++)
                lows[g * TOKENS + t] = low[t * groups + g];
        for (int64_t r = 0; r < queries; r += AT_ONCE) {
            const int some = (int)least(queries - r, AT_ONCE);
            for (int i = 0; i < some; i++) {
                float w[TOKENS];
                clear(w, TOKENS);
                for (int64_t t = 0; t < tokens; t++)
                    w[t] = weight[(r + i) * length + first + t];
                for (int64_t g = 0; g < groups; g++) {
                    float *to = factor + (i * groups + g) * TOKENS;
                    for (int64_t t = 0; t < TOKENS; t += LANES)
                        *(floats *)(to + t) = *(floats *)(w + t) * *(floats *)(scales + g * TOKENS + t);
                    const float all = dot(w, lows + g * TOKENS, TOKENS);
                    float *of_group = sums + (r + i) * width + g * p->group;
                    for (int64_t c = 0; c < p->group; c += LANES)
                        *(floats *)(of_group + c) += all;
                }
            }
            for (int64_t start = 0, run = 0; start < p->channels; start += p->run, run++) {
                const uint8_t *codes = packed + run * plane;
                float *out = sums + r * width;
                if (some == 4)
                    add_run(codes, p->step_bytes, plane, start, p->group, groups, factor, tokens, out, width, bits, 4);
                else if (some == 3)
                    add_run(codes, p->step_bytes, plane, start, p->group, groups, factor, tokens, out, width, bits, 3);
                else if (some == 2)
                    add_run(codes, p->step_bytes, plane, start, p->group, groups, factor, tokens, out, width, bits, 2);
                else
                    add_run(codes, p->step_bytes, plane, start, p->group, groups, factor, tokens, out, width, bits, 1);
            }
        }
    }
}

/* The same for codes of any width that `reads_codes` allows. */
FOR_EACH_CPU void kvbench_kernels_add_codes(const struct packed *p, int64_t head, int64_t count, const float *weight,
                                            int64_t queries, int64_t length, float *sums)
{
    if (p->bits == 8)
        add_width(p, head, count, weight, queries, length, sums, 8);
    else if (p->bits == 4)
        add_width(p, head, count, weight, queries, length, sums, 4);
    else
        add_width(p, head, count, weight, queries, length, sums, 2);
}

/* Write the logits of a head's first `count` steps, or add its weighted values: one of `logits` and `sums` is set. */
INLINE void over_steps(const struct packed *p, int64_t head, int64_t count, const float *factors, int64_t queries,
                       int64_t length, float *logits, float *sums, uint8_t *codes, float *values)
{
    const int64_t width = padded(p->channels), tokens = tokens_of_a_step(p);
    if (logits && p->axis == 1 && reads_codes(p)) {
        kvbench_kernels_logits_of_codes(p, head, count, factors, queries, length, logits);
        return;
    }
    if (sums && p->axis == 0 && reads_codes(p)) {
        kvbench_kernels_add_codes(p, head, count, factors, queries, length, sums);
        return;
    }
    for (int64_t step = 0; step < count; step += steps_of_a_block(p)) {
        const int64_t steps = least(steps_of_a_block(p), count - step);
        dequantise(p, head, step, steps, codes, values);
        if (logits)
            multiply(factors, queries, values, width, steps * tokens, logits + step * tokens, length, 0);
        else
            add_all(factors + step * tokens, length, queries, values, width, steps * tokens, sums, 0);
    }
}

/* out[head, r, l] = sum over c of query[head, r, c] * key[head, l, c], for the L tokens of all steps.
 * A query has padded(C) numbers, those behind C are 0. */
FOR_EACH_CPU void kvbench_kernels_logits(const struct packed *keys, const float *query, int64_t queries, float *out)
{
    uint8_t codes[MOST_CODES];
    float values[MOST_CODES];
    const int64_t width = padded(keys->channels), length = keys->steps * tokens_of_a_step(keys);
    clear(values, MOST_CODES);
    for (int64_t head = 0; head < keys->heads; head++, query += queries * width, out += queries * length)
        over_steps(keys, head, keys->steps, query, queries, length, out, 0, codes, values);
}

/* out[head, r, c] = sum over l of weight[head, r, l] * value[head, l, c]. An output has padded(C) numbers. */
FOR_EACH_CPU void kvbench_kernels_weigh(const struct packed *packed, const float *weight, int64_t queries, float *out)
{
    uint8_t codes[MOST_CODES];
    float values[MOST_CODES];
    const int64_t width = padded(packed->channels), length = packed->steps * tokens_of_a_step(packed);
    clear(values, MOST_CODES);
    clear(out, packed->heads * queries * width);
    for (int64_t head = 0; head < packed->heads; head++, weight += queries * length, out += queries * width)
        over_steps(packed, head, packed->steps, weight, queries, length, 0, out, codes, values);
}

/* Tokens behind the packed ones lie in rings of exact numbers, token t in slot t mod slots. */
struct ring {
    const float *keys, *values; /* [heads, slots, C] */
    int64_t key_slots, value_slots;
    const int64_t *packed_keys, *packed_values, *tokens; /* of each head: how many are packed, and how many there are */
};

/* e^x for x <= 0 to a few units in the last place: 2^n times a polynomial in the rest, which is at most ln 2 / 2. */
INLINE floats exponential(floats x)
{
    /* below -87 the result would be no normal number */
    const floats limit = {-87, -87, -87, -87, -87, -87, -87, -87};
    const ints below = x < limit;
    x = (floats)(((ints)x & ~below) | ((ints)limit & below));
    /* x <= 0, so that cutting off the fraction of x / ln 2 - 1/2 rounds x / ln 2 */
    const ints n = __builtin_convertvector(x * 1.44269504f - 0.5f, ints);
    const floats whole = __builtin_convertvector(n, floats);
    const floats rest = (x - whole * 0.693359375f) + whole * 2.12194440e-4f; /* ln 2 in two parts */
    floats p = rest * (1.0f / 5040) + 1.0f / 720;
    p = p * rest + 1.0f / 120;
    p = p * rest + 1.0f / 24;
    p = p * rest + 1.0f / 6;
    p = p * rest + 0.5f;
    p = p * rest + 1.0f;
    p = p * rest + 1.0f;
    return p * (floats)((n + 127) << 23);
}

/* Replace `count` logits by their softmax. */
INLINE void softmax(float *logits, int64_t count)
{
    float most[LANES], top = logits[0];
    for (int lane = 0; lane < LANES; lane++)
        most[lane] = top;
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES)
        for (int lane = 0; lane < LANES; lane++)
            most[lane] = logits[i + lane] > most[lane] ? logits[i + lane] : most[lane];
    for (; i < count; i++)
        top = logits[i] > top ? logits[i] : top;
    for (int lane = 0; lane < LANES; lane++)
        top = most[lane] > top ? most[lane] : top;
    floats sums = {0};
    float sum = 0;
    for (i = 0; i + LANES <= count; i += LANES) {
        const floats weight = exponential(*(floats *)(logits + i) - top);
        *(floats *)(logits + i) = weight;
        sums += weight;
    }
    for (; i < count; i++) {
        const floats x = {logits[i] - top};
        logits[i] = exponential(x)[0];
        sum += logits[i];
    }
    for (int lane = 0; lane < LANES; lane++)
        sum += sums[lane];
    for (i = 0; i < count; i++)
        logits[i] /= sum;
}

/* Attention of one new token over the tokens of a row's heads.
 *
 * query: [heads, queries, channels], channels a multiple of WIDTH, meets exact keys. packed_query: the same in the basis
 * and the channels of the packed keys, [heads, queries, padded(C)]. out: the weighted exact values. packed_out: the
 * weighted packed values, in their basis and channels; it may be `out` itself, which then has the sum of both. scratch:
 * room for the logits of all queries of a head. */
FOR_EACH_CPU void kvbench_kernels_attend(const struct packed *keys, const struct packed *values, const struct ring *ring,
                                         const float *query, const float *packed_query, int64_t queries,
                                         int64_t channels, float *scratch, float *out, float *packed_out)
{
    uint8_t codes[MOST_CODES];
    float numbers[MOST_CODES];
    const int64_t key_width = padded(keys->channels), value_width = padded(values->channels);
    /* behind C channels a row has what was there before: a query has 0 there, and of an output nobody reads it */
    clear(numbers, MOST_CODES);
    clear(out, keys->heads * queries * channels);
    clear(packed_out, keys->heads * queries * value_width);
    for (int64_t head = 0; head < keys->heads; head++) {
        const int64_t length = ring->tokens[head], packed_keys = ring->packed_keys[head];
        over_steps(keys, head, packed_keys / tokens_of_a_step(keys), packed_query, queries, length, scratch, 0, codes,
                   numbers);
        const float *exact = ring->keys + head * ring->key_slots * channels;
        /* the exact tokens are at most two runs of slots: up to the ring's end, and from its beginning on */
        for (int64_t t = packed_keys; t < length;) {
            const int64_t slot = t % ring->key_slots, run = least(length - t, ring->key_slots - slot);
            multiply(query, queries, exact + slot * channels, channels, run, scratch + t, length, AHEAD);
            t += run;
        }
        for (int64_t r = 0; r < queries; r++)
            softmax(scratch + r * length, length);
        const int64_t packed_values = ring->packed_values[head];
        over_steps(values, head, packed_values / tokens_of_a_step(values), scratch, queries, length, 0, packed_out, codes,
                   numbers);
        exact = ring->values + head * ring->value_slots * channels;
        for (int64_t t = packed_values; t < length;) {
            const int64_t slot = t % ring->value_slots, run = least(length - t, ring->value_slots - slot);
            add_all(scratch + t, length, queries, exact + slot * channels, channels, run, out, AHEAD);
            t += run;
        }
        query += queries * channels;
        packed_query += queries * key_width;
        out += queries * channels;
        packed_out += queries * value_width;
    }
}

#define MOST_CHANNELS 512 /* of a thin key */

/* Exact tokens of one head that lie one after the other: keys [tokens, key_width] and values [tokens, channels]. */
struct run {
    const float *keys, *values;
    int64_t tokens, key_width;
    const int64_t *key_channels; /* the channels that thin keys kept; null: all */
};

/* A stored head of a row: the queries that read it, and the runs that are its tokens. */
struct head {
    int64_t first_query, queries, first_run, runs;
};

/* Write the logits of a run whose keys have some of the channels. thin_query: room for queries of padded(C) numbers. */
INLINE void multiply_thin(const float *query, int64_t queries, int64_t channels, const struct run *run, float *thin_query,
                          float *out, int64_t length)
{
    const int64_t kept = run->key_width, width = padded(kept);
    clear(thin_query, queries * width);
    for (int64_t r = 0; r < queries; r++)
        for (int64_t c = 0; c < kept; c++)
            thin_query[r * width + c] = query[r * channels + run->key_channels[c]];
    /* sixteen keys at a time in rows that zeros fill up, so that the products need no loop for the last channels */
    float rows[WIDTH * MOST_CHANNELS];
    clear(rows, WIDTH * width);
    for (int64_t first = 0; first < run->tokens; first += WIDTH) {
        const int64_t count = least(run->tokens - first, WIDTH);
        for (int64_t t = 0; t < count; t++)
            for (int64_t c = 0; c < kept; c++)
                rows[t * width + c] = run->keys[(first + t) * kept + c];
        multiply(thin_query, queries, rows, width, count, out + first, length, 0);
    }
}

/* Attention of one new token over exact tokens: out[q, c] for query[q, c] of all heads. channels: a multiple of WIDTH.
 * scratch: room for the logits of all queries of a head. thin_query: room for its queries of MOST_CHANNELS numbers. */
FOR_EACH_CPU void kvbench_kernels_exact(const struct head *heads, int64_t count, const struct run *runs,
                                        const float *query, int64_t channels, float *scratch, float *thin_query,
                                        float *out)
{
    for (const struct head *head = heads; head < heads + count; head++) {
        const float *head_query = query + head->first_query * channels;
        float *head_out = out + head->first_query * channels;
        const struct run *first = runs + head->first_run, *end = first + head->runs;
        int64_t length = 0;
        for (const struct run *run = first; run < end; run++)
            length += run->tokens;
        int64_t t = 0;
        for (const struct run *run = first; run < end; run++) {
            if (run->key_channels)
                multiply_thin(head_query, head->queries, channels, run, thin_query, scratch + t, length);
            else
                multiply(head_query, head->queries, run->keys, channels, run->tokens, scratch + t, length, AHEAD);
            t += run->tokens;
        }
        for (int64_t r = 0; r < head->queries; r++)
            softmax(scratch + r * length, length);
        clear(head_out, head->queries * channels);
        t = 0;
        for (const struct run *run = first; run < end; run++) {
            add_all(scratch + t, length, head->queries, run->values, channels, run->tokens, head_out, AHEAD);
            t += run->tokens;
        }
    }
}
