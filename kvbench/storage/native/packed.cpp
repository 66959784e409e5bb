// Attention over packed keys and values (kvbench.cache.pack has their layout), for processors.
//
// Shapes: U rows, H stored heads, R query rows of one stored head (its query heads times T new tokens), L tokens,
// C channels. One row's stored head is one task: a block of tokens is unpacked into the first-level cache, in numbers
// exactly those of Packed.dequantise, and met by all of its query rows there. Sums are in fp32.

#include <cstdint>
#include <cstdlib>
#include <cstring>

extern "C" {

struct Coded {  // Packed [U, H, L, C]; strides in elements
    const uint8_t *codes;
    const uint16_t *scale, *low;  // fp16
    int64_t codes_row, codes_head, scale_row, scale_head;
    int64_t bits, group, size, channels, by_channel, zero_point;
};

struct Ring {  // exact tokens [U, H, slots, D], contiguous; token t in slot t mod slots
    const float *x;
    int64_t slots;
};
}

namespace {

#if defined(__AVX512F__)
constexpr int64_t W = 16;
#elif defined(__AVX__)
constexpr int64_t W = 8;
#else
constexpr int64_t W = 4;
#endif
typedef float Vec __attribute__((vector_size(4 * W)));
typedef int32_t Ints __attribute__((vector_size(4 * W)));
typedef float Half __attribute__((vector_size(2 * W)));
typedef float Four __attribute__((vector_size(16)));

constexpr int64_t SPAN = 32;             // tokens of a block, where a group of tokens does not set it
constexpr int64_t PARALLEL = 1 << 17;    // multiplications below which waking a second thread costs more

inline Vec load(const float *p) {
    Vec v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

inline void store(float *p, Vec v) { std::memcpy(p, &v, sizeof v); }

inline Vec all(float x) { return x - Vec{}; }

inline Four fold(Vec v) {  // four numbers with the same sum
    if constexpr (W == 4) {
        Four same;
        std::memcpy(&same, &v, sizeof same);
        return same;
    } else {
        Half a, b;
        std::memcpy(&a, &v, sizeof a);
        std::memcpy(&b, reinterpret_cast<const char *>(&v) + sizeof a, sizeof b);
        a += b;
        if constexpr (W == 8) {
            Four same;
            std::memcpy(&same, &a, sizeof same);
            return same;
        } else {
            Four c, d;
            std::memcpy(&c, &a, sizeof c);
            std::memcpy(&d, reinterpret_cast<const char *>(&a) + sizeof c, sizeof d);
            return c + d;
        }
    }
}

inline float sum(Vec v) {
    const Four x = fold(v);
    return (x[0] + x[2]) + (x[1] + x[3]);
}

inline Four sums(Vec a, Vec b, Vec c, Vec d) {  // of each its sum
    const Four p = fold(a), q = fold(b), r = fold(c), s = fold(d);
    const Four pq = Four{p[0], q[0], p[1], q[1]} + Four{p[2], q[2], p[3], q[3]};
    const Four rs = Four{r[0], s[0], r[1], s[1]} + Four{r[2], s[2], r[3], s[3]};
    return Four{pq[0], pq[1], rs[0], rs[1]} + Four{pq[2], pq[3], rs[2], rs[3]};
}

// The codes that W bytes hold from bit ``shift`` on.
inline Vec codes_of(const uint8_t *from, int shift, int mask) {
    float x[W];
    for (int64_t i = 0; i < W; i++) x[i] = float((from[i] >> shift) & mask);
    return load(x);
}

inline int64_t padded(int64_t n) { return (n + W - 1) / W * W; }

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

// fp16 as fp32; infinities do not occur, the quantisers refuse them
inline float single(uint16_t h) {
    uint32_t x = uint32_t(h & 0x7fff) << 13, normal = x + 0x38000000, tiny = x + 0x38800000;
    float a, b;
    std::memcpy(&a, &normal, 4);
    std::memcpy(&b, &tiny, 4);
    float r = x < 0x00800000 ? b - 6.103515625e-05f : a;
    return h & 0x8000 ? -r : r;
}

// e^x for x <= 0 to 2 units in the last place; NaN stays NaN
inline Vec exponential(Vec x) {
    const Vec round = all(12582912.0f);  // 1.5 * 2^23: what is added to it loses its fraction
    x = x < -87.0f ? all(-87.0f) : x;
    Vec n = (x * 1.44269504f + round) - round;
    Vec f = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    Vec p = all(1.9875691500e-4f);
    p = p * f + 1.3981999507e-3f;
    p = p * f + 8.3334519073e-3f;
    p = p * f + 4.1665795894e-2f;
    p = p * f + 1.6666665459e-1f;
    p = p * f + 5.0000001201e-1f;
    p = p * f * f + f + 1.0f;
    Ints power = (__builtin_convertvector(n, Ints) + 127) << 23;
    Vec scale;
    std::memcpy(&scale, &power, sizeof scale);
    return p * scale;
}

// Softmax over the first n of a row; what follows them is set to 0.
void softmax(float *x, int64_t n, int64_t length) {
    float top = x[0];
    int64_t i = 0;
    if (n >= W) {
        Vec tops = load(x);
        for (i = W; i + W <= n; i += W) tops = load(x + i) > tops ? load(x + i) : tops;
        for (int64_t j = 0; j < W; j++) top = tops[j] > top ? tops[j] : top;
    }
    for (; i < n; i++) top = x[i] > top ? x[i] : top;
    Vec total = {};
    i = 0;
    for (; i + W <= n; i += W) {
        Vec e = exponential(load(x + i) - top);
        store(x + i, e);
        total += e;
    }
    float rest[W] = {};
    if (i < n) {
        for (int64_t j = 0; j < W; j++) rest[j] = i + j < n ? x[i + j] - top : -INT32_MAX;
        store(rest, exponential(load(rest)));
        for (int64_t j = i; j < n; j++) x[j] = rest[j - i];
        for (int64_t j = n - i; j < W; j++) rest[j] = 0;
    }
    const float by = 1.0f / sum(total + load(rest));
    for (int64_t j = 0; j < n; j++) x[j] *= by;
    for (int64_t j = n; j < length; j++) x[j] = 0;
}

// Logits of A query rows and B tokens, both [., stride] padded with zeros on one side: out[a * ld + b].
template <int A, int B>
inline void dot_tile(const float *q, const float *x, int64_t stride, float *out, int64_t ld) {
    Vec found[A][B] = {};
    for (int64_t c = 0; c < stride; c += W) {
        Vec xs[B];
        for (int b = 0; b < B; b++) xs[b] = load(x + b * stride + c);
        for (int a = 0; a < A; a++) {
            const Vec qa = load(q + a * stride + c);
            for (int b = 0; b < B; b++) found[a][b] += qa * xs[b];
        }
    }
    for (int a = 0; a < A; a++) {
        if constexpr (B == 4) {
            const Four four = sums(found[a][0], found[a][1], found[a][2], found[a][3]);
            std::memcpy(out + a * ld, &four, sizeof four);
        } else {
            for (int b = 0; b < B; b++) out[a * ld + b] = sum(found[a][b]);
        }
    }
}

template <int A>
inline void dot_rows(const float *q, const float *x, int64_t n, int64_t stride, float *out, int64_t ld) {
    int64_t t = 0;
    for (; t + 4 <= n; t += 4) dot_tile<A, 4>(q, x + t * stride, stride, out + t, ld);
    for (; t < n; t++) dot_tile<A, 1>(q, x + t * stride, stride, out + t, ld);
}

// Logits of q [R, stride] with n tokens x [n, stride].
void dot(const float *q, int64_t rows, const float *x, int64_t n, int64_t stride, float *out, int64_t ld) {
    int64_t r = 0;
    for (; r + 4 <= rows; r += 4) dot_rows<4>(q + r * stride, x, n, stride, out + r * ld, ld);
    if (r + 2 <= rows) {
        dot_rows<2>(q + r * stride, x, n, stride, out + r * ld, ld);
        r += 2;
    }
    if (r < rows) dot_rows<1>(q + r * stride, x, n, stride, out + r * ld, ld);
}

template <int A, int B>
inline void add_tile(const float *p, int64_t ld, const float *x, int64_t n, int64_t stride, float *out) {
    Vec found[A][B];
    for (int a = 0; a < A; a++)
        for (int b = 0; b < B; b++) found[a][b] = load(out + a * stride + b * W);
    for (int64_t t = 0; t < n; t++) {
        Vec xs[B];
        for (int b = 0; b < B; b++) xs[b] = load(x + t * stride + b * W);
        for (int a = 0; a < A; a++)
            for (int b = 0; b < B; b++) found[a][b] += p[a * ld + t] * xs[b];
    }
    for (int a = 0; a < A; a++)
        for (int b = 0; b < B; b++) store(out + a * stride + b * W, found[a][b]);
}

template <int A>
inline void add_rows(const float *p, int64_t ld, const float *x, int64_t n, int64_t stride, float *out) {
    int64_t c = 0;
    for (; c + 4 * W <= stride; c += 4 * W) add_tile<A, 4>(p, ld, x + c, n, stride, out + c);
    for (; c < stride; c += W) add_tile<A, 1>(p, ld, x + c, n, stride, out + c);
}

// Add weighted values: p [R, ld] of n tokens x [n, stride] to out [R, stride].
void add(const float *p, int64_t rows, int64_t ld, const float *x, int64_t n, int64_t stride, float *out) {
    int64_t r = 0;
    for (; r + 4 <= rows; r += 4) add_rows<4>(p + r * ld, ld, x, n, stride, out + r * stride);
    if (r + 2 <= rows) {
        add_rows<2>(p + r * ld, ld, x, n, stride, out + r * stride);
        r += 2;
    }
    if (r < rows) add_rows<1>(p + r * ld, ld, x, n, stride, out + r * stride);
}

inline int64_t width(int64_t m, int64_t part) { return (m * part + 7) / 8; }

inline int64_t run_bytes(int64_t m, int64_t bits) { return bits == 3 ? width(m, 2) + width(m, 1) : width(m, bits); }

inline int64_t block(const Coded &f) { return f.by_channel ? f.group : SPAN; }

// Floats that scales and minima of a block need.
inline int64_t numbers_of(const Coded &f) {
    return 2 * padded(f.by_channel ? f.channels : SPAN * ((f.channels + f.group - 1) / f.group));
}

// The tokens of one row's head, fetched a block at a time.
struct Packed {
    const Coded &f;
    const uint8_t *codes;
    const uint16_t *scale, *low;
    float *steps, *lows;  // of the groups of a block

    Packed(const Coded &format, int64_t u, int64_t h, float *scratch)
        : f(format),
          codes(format.codes + u * format.codes_row + h * format.codes_head),
          scale(format.scale + u * format.scale_row + h * format.scale_head),
          low(format.low + u * format.scale_row + h * format.scale_head),
          steps(scratch),
          lows(scratch + numbers_of(format) / 2) {}

    int64_t span() const { return block(f); }

    // Tokens first to first + n as x [n, stride]; of keys by channel, first is where a group begins and n its size.
    void fetch(int64_t first, int64_t n, float *x, int64_t stride) const {
        if (f.by_channel)
            channels(first / f.group, x, stride);
        else
            tokens(first, n, x, stride);
    }

    void numbers(const uint16_t *s, const uint16_t *m, int64_t n) const {
        for (int64_t i = 0; i < n; i++) steps[i] = single(s[i]);
        for (int64_t i = 0; i < n; i++) lows[i] = f.zero_point ? -steps[i] * single(m[i]) : single(m[i]);
    }

    void channels(int64_t g, float *x, int64_t stride) const {
        const int64_t n = f.channels;
        numbers(scale + g * n, low + g * n, n);
        const float *__restrict s = steps, *__restrict m = lows;
        const uint8_t *row = codes + g * run_bytes(f.size, f.bits) * n;
        for (int below = 0, part; below < f.bits; below += part) {
            part = f.bits == 3 ? (below ? 1 : 2) : int(f.bits);
            const int64_t wide = width(f.size, part);
            const int mask = (1 << part) - 1;
            for (int64_t j = 0; j < wide; j++, row += n) {
                const uint8_t *__restrict from = row;
                int shift = 0;
                for (int64_t t = j; t < f.size; t += wide, shift += part) {
                    float *__restrict to = x + t * stride;
                    int64_t c = 0;
                    if (!below) {
                        for (; c + W <= n; c += W)
                            store(to + c, codes_of(from + c, shift, mask) * load(s + c) + load(m + c));
                        for (; c < n; c++) to[c] = float((from[c] >> shift) & mask) * s[c] + m[c];
                    } else {
                        const float up = float(1 << below);
                        for (; c + W <= n; c += W)
                            store(to + c, codes_of(from + c, shift, mask) * up * load(s + c) + load(to + c));
                        for (; c < n; c++) to[c] += float((from[c] >> shift) & mask) * up * s[c];
                    }
                }
            }
        }
    }

    void tokens(int64_t first, int64_t n, float *x, int64_t stride) const {
        const int64_t groups = (f.channels + f.group - 1) / f.group, bytes = run_bytes(f.channels, f.bits);
        numbers(scale + first * groups, low + first * groups, n * groups);
        for (int64_t t = 0; t < n; t++)
            token(codes + (first + t) * bytes, steps + t * groups, lows + t * groups, x + t * stride);
    }

    void token(const uint8_t *from, const float *s, const float *m, float *x) const {
        const int64_t n = f.channels;
        for (int below = 0, part; below < f.bits; below += part) {
            part = f.bits == 3 ? (below ? 1 : 2) : int(f.bits);
            const int64_t wide = width(n, part);
            const int mask = (1 << part) - 1;
            const float up = float(1 << below);
            int shift = 0;
            for (int64_t c = 0; c < n; c += wide, shift += part) {
                const int64_t run = smaller(wide, n - c);
                float *to = x + c;
                int64_t j = 0;
                for (; j + W <= run; j += W) {
                    const Vec codes = codes_of(from + j, shift, mask);
                    store(to + j, below ? codes * up + load(to + j) : codes);
                }
                for (; j < run; j++) to[j] = float((from[j] >> shift) & mask) * up + (below ? to[j] : 0.0f);
            }
            from += wide;
        }
        for (int64_t start = 0; start < n; start += f.group, s++, m++) {
            float *to = x + start;
            const int64_t run = smaller(f.group, n - start);
            int64_t c = 0;
            for (; c + W <= run; c += W) store(to + c, load(to + c) * *s + *m);
            for (; c < run; c++) to[c] = to[c] * *s + *m;
        }
    }
};

struct Exact {
    const float *x;
    int64_t slots, channels;

    int64_t span() const { return SPAN; }

    void fetch(int64_t first, int64_t n, float *to, int64_t stride) const {
        for (int64_t t = 0; t < n; t++)
            std::memcpy(to + t * stride, x + (first + t) % slots * channels, channels * sizeof(float));
    }
};

// Logits of q [R, stride] with tokens first to last, to out[r * ld + token].
template <class Tokens>
void logits(const Tokens &tokens, const float *q, int64_t rows, int64_t stride, int64_t first, int64_t last, float *x,
            float *out, int64_t ld) {
    for (int64_t t = first; t < last; t += tokens.span()) {
        const int64_t n = smaller(tokens.span(), last - t);
        tokens.fetch(t, n, x, stride);
        dot(q, rows, x, n, stride, out + t, ld);
    }
}

// Weights p[r * ld + token] of tokens first to last, added up to out [R, stride].
template <class Tokens>
void weigh(const Tokens &tokens, const float *p, int64_t rows, int64_t ld, int64_t first, int64_t last, float *x,
           int64_t stride, float *out) {
    for (int64_t t = first; t < last; t += tokens.span()) {
        const int64_t n = smaller(tokens.span(), last - t);
        tokens.fetch(t, n, x, stride);
        add(p + t, rows, ld, x, n, stride, out);
    }
}

// Zeroed scratch of one thread.
struct Scratch {
    float *start, *next;

    explicit Scratch(int64_t floats)
        : start(static_cast<float *>(std::calloc(size_t(floats) + 16, sizeof(float)))),
          next(start ? start + (64 - uintptr_t(start) % 64) / 4 : nullptr) {}
    ~Scratch() { std::free(start); }
    float *take(int64_t floats) {
        float *taken = next;
        next += padded(floats);
        return taken;
    }
};

// Run task(i, scratch) for every i; false if there was no memory.
template <class Task>
bool each(int64_t tasks, int64_t floats, int64_t work, int threads, const Task &task) {
    const int team = tasks * work < PARALLEL ? 1 : int(smaller(threads, tasks));
    int failed = 0;
#pragma omp parallel num_threads(team) if (team > 1) reduction(+ : failed)
    {
        Scratch scratch(floats);
        failed = scratch.start == nullptr;
        float *const begin = scratch.next;
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < tasks; i++) {
            if (failed) continue;
            scratch.next = begin;
            task(i, scratch);
        }
    }
    return !failed;
}

void pad_rows(const float *from, int64_t rows, int64_t n, float *to, int64_t stride) {
    for (int64_t r = 0; r < rows; r++) {
        std::memcpy(to + r * stride, from + r * n, n * sizeof(float));
        std::memset(to + r * stride + n, 0, (stride - n) * sizeof(float));
    }
}

}  // namespace

extern "C" {

// Logits of q [U, H, R, C] with packed keys, out [U, H, R, L]. Returns 0, or 1 if there was no memory.
int packed_logits(const Coded *keys, const float *q, int64_t rows, int64_t heads, int64_t per, int64_t length,
                  float *out, int threads) {
    const int64_t n = keys->channels, stride = padded(n);
    const int64_t floats = (per + block(*keys)) * stride + numbers_of(*keys);
    return !each(rows * heads, floats, per * length * n, threads, [&](int64_t i, Scratch &scratch) {
        float *mine = scratch.take(per * stride), *x = scratch.take(block(*keys) * stride);
        pad_rows(q + i * per * n, per, n, mine, stride);
        const Packed tokens(*keys, i / heads, i % heads, scratch.take(numbers_of(*keys)));
        logits(tokens, mine, per, stride, 0, length, x, out + i * per * length, length);
    });
}

// Weighted packed values of p [U, H, R, L], out [U, H, R, C]. Returns 0, or 1 if there was no memory.
int packed_weigh(const Coded *values, const float *p, int64_t rows, int64_t heads, int64_t per, int64_t length,
                 float *out, int threads) {
    const int64_t n = values->channels, stride = padded(n);
    const int64_t floats = (per + block(*values)) * stride + numbers_of(*values);
    return !each(rows * heads, floats, per * length * n, threads, [&](int64_t i, Scratch &scratch) {
        float *sums = scratch.take(per * stride), *x = scratch.take(block(*values) * stride);
        std::memset(sums, 0, per * stride * sizeof(float));
        const Packed tokens(*values, i / heads, i % heads, scratch.take(numbers_of(*values)));
        weigh(tokens, p + i * per * length, per, length, 0, length, x, stride, sums);
        for (int64_t r = 0; r < per; r++)
            std::memcpy(out + (i * per + r) * n, sums + r * stride, n * sizeof(float));
    });
}

// Attention of q [U, H, R, D], R = query heads of a stored head x T new tokens, over packed tokens and a ring of exact
// ones. counts [3, U]: tokens in all, packed as keys, packed as values. Channels [U, H, C], or null where packed keys
// (values) are not thin. out [U, H, R, D]. Returns 0, or 1 if there was no memory.
int packed_attend(const Coded *keys, const Coded *values, const Ring *exact_k, const Ring *exact_v, const float *q,
                  int64_t rows, int64_t heads, int64_t per, int64_t fresh, int64_t dim, float scale,
                  const int64_t *counts, const int64_t *key_channels, const int64_t *value_channels, float *out,
                  int threads) {
    const int64_t thin_k = keys->channels, thin_v = values->channels;
    const int64_t stride = padded(dim), stride_k = padded(thin_k), stride_v = padded(thin_v);
    const int64_t widest = larger(stride, larger(stride_k, stride_v));
    const int64_t most = larger(SPAN, larger(block(*keys), block(*values)));
    int64_t longest = 0;
    for (int64_t u = 0; u < rows; u++) longest = larger(longest, counts[u]);
    const int64_t paired = larger(numbers_of(*keys), numbers_of(*values));
    const int64_t floats = (3 * per + most) * widest + paired + per * longest + 6 * W;
    return !each(rows * heads, floats, 2 * per * longest * dim, threads, [&](int64_t i, Scratch &scratch) {
        const int64_t u = i / heads, total = counts[u], old_k = counts[rows + u], old_v = counts[2 * rows + u];
        float *mine = scratch.take(per * stride), *thin = scratch.take(per * widest), *x = scratch.take(most * widest);
        float *pairs = scratch.take(paired), *p = scratch.take(per * longest), *sums = scratch.take(per * stride);
        pad_rows(q + i * per * dim, per, dim, mine, stride);
        for (int64_t j = 0; j < per * stride; j++) mine[j] *= scale;
        const float *asked = mine;
        if (key_channels) {
            const int64_t *at = key_channels + i * thin_k;
            std::memset(thin, 0, per * stride_k * sizeof(float));
            for (int64_t r = 0; r < per; r++)
                for (int64_t c = 0; c < thin_k; c++) thin[r * stride_k + c] = mine[r * stride + at[c]];
            asked = thin;
        }
        logits(Packed(*keys, u, i % heads, pairs), asked, per, stride_k, 0, old_k, x, p, total);
        const Exact ring_k{exact_k->x + i * exact_k->slots * dim, exact_k->slots, dim};
        logits(ring_k, mine, per, stride, old_k, total, x, p, total);
        // rows of a query head are its new tokens in order; each sees those before it and itself
        for (int64_t r = 0; r < per; r++) softmax(p + r * total, total - fresh + r % fresh + 1, total);

        std::memset(sums, 0, per * stride * sizeof(float));
        const Exact ring_v{exact_v->x + i * exact_v->slots * dim, exact_v->slots, dim};
        weigh(ring_v, p, per, total, old_v, total, x, stride, sums);
        float *kept = value_channels ? thin : sums;
        if (value_channels) std::memset(thin, 0, per * stride_v * sizeof(float));
        weigh(Packed(*values, u, i % heads, pairs), p, per, total, 0, old_v, x, stride_v, kept);
        if (value_channels) {
            const int64_t *at = value_channels + i * thin_v;
            for (int64_t r = 0; r < per; r++)
                for (int64_t c = 0; c < thin_v; c++) sums[r * stride + at[c]] += thin[r * stride_v + c];
        }
        for (int64_t r = 0; r < per; r++)
            std::memcpy(out + (i * per + r) * dim, sums + r * stride, dim * sizeof(float));
    });
}
}
