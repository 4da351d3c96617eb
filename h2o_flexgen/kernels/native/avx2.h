/* AVX2: vectors of 512 bits are pairs of its own, or of NEON's (neon.h), under the names that AVX-512 has for them (Intel's
   Intrinsics Guide), as far as the kernels here need them. Only these differ: bfloat16 products keep denormal numbers, and
   a sum of two products is rounded after each. */
#ifndef AVX2_H
#define AVX2_H

#define IS_WIDE 0
enum { REGISTERS = 16 };

typedef struct {
    __m256 a, b;
} f512;
typedef struct {
    __m256i a, b;
} i512;
typedef uint16_t m16;
typedef uint32_t m32;

#define __m512 f512
#define __m512i i512
#define __m512d f512
#define __m512bh i512
#define __mmask16 m16
#define __mmask32 m32

#define F2(x, y) ((f512){x, y})
#define I2(x, y) ((i512){x, y})
/* An operation on both halves of one vector, of two or of three; its result is like the first one. */
#define EACH(op, x) ({ __auto_type x_ = (x); (__typeof__(x_)){op(x_.a), op(x_.b)}; })
#define EACH2(op, x, y) \
    ({ __auto_type x_ = (x); __auto_type y_ = (y); (__typeof__(x_)){op(x_.a, y_.a), op(x_.b, y_.b)}; })
#define EACH3(op, x, y, z) \
    ({ __auto_type x_ = (x); __auto_type y_ = (y); __auto_type z_ = (z); \
       (__typeof__(x_)){op(x_.a, y_.a, z_.a), op(x_.b, y_.b, z_.b)}; })
/* The numbers of half a vector, made twice as wide. */
#define WIDER(op, x) ({ const __m256i x_ = (x); I2(op(_mm256_castsi256_si128(x_)), op(_mm256_extracti128_si256(x_, 1))); })

/* ---- between kinds */
INLINE __m256 as_f(__m256i x) { return _mm256_castsi256_ps(x); }
INLINE __m256i as_i(__m256 x) { return _mm256_castps_si256(x); }
INLINE f512 v_as_f(i512 x) { return F2(as_f(x.a), as_f(x.b)); }
INLINE i512 v_as_i(f512 x) { return I2(as_i(x.a), as_i(x.b)); }

/* ---- masks: one bit a number becomes a vector of ones or zeros */
INLINE __m256i wide8(unsigned bits) {
    const __m256i each = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    return _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32((int)bits), each), each);
}
INLINE i512 wide16(m16 bits) { return I2(wide8(bits & 255), wide8(bits >> 8)); }
INLINE m16 bits16(i512 x) {
    return (m16)(_mm256_movemask_ps(as_f(x.a)) | _mm256_movemask_ps(as_f(x.b)) << 8);
}
/* Bytes of the first numbers in a mask without holes, of `size` bytes each. */
INLINE size_t first_bytes(uint64_t mask, size_t size) { return (size_t)__builtin_popcountll(mask) * size; }

/* ---- memory */
INLINE f512 v_loadu(const void *at) {
    return F2(_mm256_loadu_ps((const float *)at), _mm256_loadu_ps((const float *)at + 8));
}
INLINE void v_storeu(void *at, f512 x) {
    _mm256_storeu_ps((float *)at, x.a), _mm256_storeu_ps((float *)at + 8, x.b);
}
/* Loads and stores with masks are of the first numbers: memory behind them is not touched. */
INLINE i512 load_some(const void *at, size_t bytes) {
    if (bytes == 64) return v_as_i(v_loadu(at));
    i512 x = I2(_mm256_setzero_si256(), _mm256_setzero_si256());
    memcpy(&x, at, bytes);
    return x;
}
INLINE __m256i load_half(const void *at, size_t bytes) {
    __m256i x = _mm256_setzero_si256();
    if (bytes == 32) return _mm256_loadu_si256((const __m256i *)at);
    memcpy(&x, at, bytes);
    return x;
}
INLINE __m128i load_quarter(const void *at, size_t bytes) {
    __m128i x = _mm_setzero_si128();
    int32_t four;
    if (bytes == 16) return _mm_loadu_si128((const __m128i *)at);
    if (bytes == 8) return _mm_loadl_epi64((const __m128i *)at);
    if (bytes == 4) return memcpy(&four, at, 4), _mm_cvtsi32_si128(four);
    memcpy(&x, at, bytes);
    return x;
}
#define STORE(at, bytes, x) \
    ({ __auto_type x_ = (x); const size_t n_ = (bytes); memcpy(at, &x_, n_ == sizeof x_ ? sizeof x_ : n_); })
#define _mm512_loadu_ps v_loadu
#define _mm512_load_ps v_loadu
#define _mm512_storeu_ps v_storeu
#define _mm512_store_ps v_storeu
#define _mm512_load_si512(at) v_as_i(v_loadu(at))
#define _mm512_loadu_si512(at) v_as_i(v_loadu(at))
#define _mm512_storeu_si512(at, x) v_storeu(at, v_as_f(x))
#define _mm512_store_si512(at, x) v_storeu(at, v_as_f(x))
#define _mm_maskz_loadu_epi8(mask, at) load_quarter(at, first_bytes((m16)(mask), 1))
#define _mm512_maskz_loadu_epi32(mask, at) load_some(at, first_bytes((m16)(mask), 4))
#define _mm512_maskz_loadu_ps(mask, at) v_as_f(load_some(at, first_bytes((m16)(mask), 4)))
#define _mm512_maskz_loadu_epi8(mask, at) load_some(at, first_bytes(mask, 1))
#define _mm512_maskz_loadu_epi16(mask, at) load_some(at, first_bytes((m32)(mask), 2))
#define _mm256_maskz_loadu_epi16(mask, at) load_half(at, first_bytes((m16)(mask), 2))
#define _mm512_mask_storeu_ps(at, mask, x) STORE(at, first_bytes((m16)(mask), 4), x)
#define _mm512_mask_storeu_epi16(at, mask, x) STORE(at, first_bytes((m32)(mask), 2), x)
#define _mm256_mask_storeu_epi16(at, mask, x) STORE(at, first_bytes((m16)(mask), 2), x)

/* ---- constants */
#define TWICE(type, half) ({ __auto_type x_ = (half); (type){x_, x_}; })
#define _mm512_set1_ps(x) TWICE(f512, _mm256_set1_ps(x))
#define _mm512_set1_epi32(x) TWICE(i512, _mm256_set1_epi32(x))
#define _mm512_set1_epi64(x) TWICE(i512, _mm256_set1_epi64x(x))
#define _mm512_setzero_ps() _mm512_set1_ps(0)
#define _mm512_setzero_si512() _mm512_set1_epi32(0)
#undef _mm512_setr_epi32
#undef _mm512_set_epi32
#define _mm512_setr_epi32(a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p) \
    I2(_mm256_setr_epi32(a, b, c, d, e, f, g, h), _mm256_setr_epi32(i, j, k, l, m, n, o, p))
#define _mm512_set_epi32(p, o, n, m, l, k, j, i, h, g, f, e, d, c, b, a) \
    _mm512_setr_epi32(a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p)

/* ---- arithmetic */
#define _mm512_castsi512_ps v_as_f
#define _mm512_castps_si512 v_as_i
#define _mm512_castps_pd(x) (x)
#define _mm512_castpd_ps(x) (x)
#define _mm512_add_ps(x, y) EACH2(_mm256_add_ps, x, y)
#define _mm512_sub_ps(x, y) EACH2(_mm256_sub_ps, x, y)
#define _mm512_mul_ps(x, y) EACH2(_mm256_mul_ps, x, y)
#define _mm512_div_ps(x, y) EACH2(_mm256_div_ps, x, y)
#define _mm512_max_ps(x, y) EACH2(_mm256_max_ps, x, y)
#define _mm512_min_ps(x, y) EACH2(_mm256_min_ps, x, y)
#define _mm512_sqrt_ps(x) EACH(_mm256_sqrt_ps, x)
#define _mm512_add_epi32(x, y) EACH2(_mm256_add_epi32, x, y)
#define _mm512_sub_epi32(x, y) EACH2(_mm256_sub_epi32, x, y)
#define _mm512_max_epi32(x, y) EACH2(_mm256_max_epi32, x, y)
#define _mm512_and_si512(x, y) EACH2(_mm256_and_si256, x, y)
#define _mm512_or_si512(x, y) EACH2(_mm256_or_si256, x, y)
#define _mm512_srli_epi32(x, n) I2(_mm256_srli_epi32((x).a, n), _mm256_srli_epi32((x).b, n))
#define _mm512_cvttps_epi32(x) I2(_mm256_cvttps_epi32((x).a), _mm256_cvttps_epi32((x).b))
INLINE __m256i low_words(__m512i x) {
    const __m256i low = _mm256_set1_epi32(0xFFFF);
    return _mm256_permute4x64_epi64(_mm256_packus_epi32(_mm256_and_si256(x.a, low), _mm256_and_si256(x.b, low)), 0xD8);
}
#define _mm512_cvtepi32_epi16 low_words
#define _mm512_cvtph_ps(x) F2(_mm256_cvtph_ps(_mm256_castsi256_si128(x)), _mm256_cvtph_ps(_mm256_extracti128_si256(x, 1)))
#define _mm512_cvtepi32_ps(x) F2(_mm256_cvtepi32_ps((x).a), _mm256_cvtepi32_ps((x).b))
#define _mm512_srai_epi32(x, n) I2(_mm256_srai_epi32((x).a, n), _mm256_srai_epi32((x).b, n))
#define _mm512_slli_epi32(x, n) I2(_mm256_slli_epi32((x).a, n), _mm256_slli_epi32((x).b, n))
#define _mm512_fmadd_ps(x, y, z) EACH3(_mm256_fmadd_ps, x, y, z)
#define _mm512_fnmadd_ps(x, y, z) EACH3(_mm256_fnmadd_ps, x, y, z)
#define _mm512_maskz_sub_ps(mask, x, y) v_as_f(_mm512_and_si512(wide16(mask), v_as_i(_mm512_sub_ps(x, y))))
INLINE __m256 round8(__m256 x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE __m256 fraction8(__m256 x) { /* 0 of infinity */
    __m256 finite = _mm256_max_ps(_mm256_set1_ps(-0x1p24f), x);
    return _mm256_sub_ps(finite, _mm256_floor_ps(finite));
}
#define _mm512_roundscale_ps(x, how) EACH(round8, x) /* `how` is 8 everywhere: to the nearest whole number */
#define _mm512_reduce_ps(x, how) EACH(fraction8, x)  /* of x <= 0, towards minus infinity everywhere */
INLINE __m256 scaled8(__m256 x, __m256 n) {
    __m256i whole = _mm256_cvtps_epi32(_mm256_floor_ps(_mm256_max_ps(_mm256_set1_ps(-126.0f), n)));
    __m256 power = as_f(_mm256_slli_epi32(_mm256_add_epi32(whole, _mm256_set1_epi32(126)), 23)); /* 0 of -126 */
    return _mm256_mul_ps(_mm256_add_ps(x, x), power);
}
#define scaled(x, n) EACH2(scaled8, x, n)

/* ---- bfloat16 */
INLINE __m256 even8(__m256i x) { return as_f(_mm256_slli_epi32(x, 16)); }
INLINE __m256 odd8(__m256i x) { return as_f(_mm256_and_si256(x, _mm256_set1_epi32((int)0xFFFF0000))); }
INLINE __m256 dot8(__m256 sum, __m256i x, __m256i y) {
    return _mm256_fmadd_ps(even8(x), even8(y), _mm256_fmadd_ps(odd8(x), odd8(y), sum));
}
INLINE __m256i rounded8(__m256 x) { /* to nearest even, in the low halves; NaN stays NaN */
    __m256i bits = as_i(x), high = _mm256_srli_epi32(bits, 16);
    __m256i odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
    __m256i near = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF))), 16);
    __m256i quiet = _mm256_or_si256(high, _mm256_set1_epi32(0x40)), nan = as_i(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(near, quiet, nan);
}
INLINE __m256i v_rounded(f512 x) {
    return _mm256_permute4x64_epi64(_mm256_packus_epi32(rounded8(x.a), rounded8(x.b)), 0xD8);
}
#define _mm512_dpbf16_ps(sum, x, y) EACH3(dot8, sum, x, y)
#define _mm512_cvtneps_pbh v_rounded
#define _mm512_cvtepu16_epi32(x) WIDER(_mm256_cvtepu16_epi32, x)
#define _mm512_cvtepi16_epi32(x) WIDER(_mm256_cvtepi16_epi32, x)
#define _mm512_cvtne2ps_pbh(y, x) I2(v_rounded(x), v_rounded(y))

/* ---- choices and comparisons */
#define _mm512_mask_mov_epi32(no, mask, yes) EACH3(_mm256_blendv_epi8, no, yes, wide16(mask))
#define _mm512_mask_mov_ps(no, mask, yes) v_as_f(_mm512_mask_mov_epi32(v_as_i(no), mask, v_as_i(yes)))
#define _mm512_mask_blend_epi16(mask, no, yes) I2((no).a, (yes).b) /* the mask is 0xFFFF0000 everywhere */
#define _mm512_mask_blend_ps(mask, no, yes) _mm512_mask_mov_ps(no, mask, yes)
#define _mm512_cmpgt_epi32_mask(x, y) bits16(EACH2(_mm256_cmpgt_epi32, x, y))
#define _mm512_cmpeq_epi32_mask(x, y) bits16(EACH2(_mm256_cmpeq_epi32, x, y))
#define _mm512_cmplt_epi32_mask(x, y) _mm512_cmpgt_epi32_mask(y, x)
#define _mm512_cmple_epi32_mask(x, y) ((m16)~_mm512_cmpgt_epi32_mask(x, y))
#define _mm512_mask_cmpge_epi32_mask(mask, x, y) ((m16)((mask) & ~_mm512_cmpgt_epi32_mask(y, x)))

/* ---- bytes, and whole numbers from and to them */
INLINE __m128i upper_8(__m128i x) { return _mm_unpackhi_epi64(x, x); }
#define _mm512_xor_si512(x, y) EACH2(_mm256_xor_si256, x, y)
#define _mm512_shuffle_epi8(x, y) EACH2(_mm256_shuffle_epi8, x, y)
#define _mm512_set1_epi8(x) TWICE(i512, _mm256_set1_epi8(x))
#define _mm512_broadcast_i32x4(x) TWICE(i512, _mm256_broadcastsi128_si256(x))
#define _mm512_srai_epi16(x, n) I2(_mm256_srai_epi16((x).a, n), _mm256_srai_epi16((x).b, n))
#define _mm512_srli_epi16(x, n) I2(_mm256_srli_epi16((x).a, n), _mm256_srli_epi16((x).b, n))
#define _mm512_cvtps_epi32(x) I2(_mm256_cvtps_epi32((x).a), _mm256_cvtps_epi32((x).b))
INLINE i512 v_unsigned_8(__m128i x) { return I2(_mm256_cvtepu8_epi32(x), _mm256_cvtepu8_epi32(upper_8(x))); }
INLINE i512 v_signed_8(__m128i x) { return I2(_mm256_cvtepi8_epi32(x), _mm256_cvtepi8_epi32(upper_8(x))); }
#define _mm512_cvtepu8_epi32 v_unsigned_8
#define _mm512_cvtepi8_epi32 v_signed_8
INLINE __m128i v_bytes(i512 x) { /* saturated */
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xD8);
    return _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
}
#define _mm512_cvtsepi32_epi8 v_bytes
INLINE int v_sum_i(i512 x) {
    const __m256i both = _mm256_add_epi32(x.a, x.b);
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1));
    s = _mm_add_epi32(s, upper_8(s));
    return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_srli_si128(s, 4)));
}
#define _mm512_reduce_add_epi32 v_sum_i

/* ---- reductions */
INLINE float sum8(__m256 x) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
INLINE float v_sum(f512 x) { return sum8(_mm256_add_ps(x.a, x.b)); }
INLINE float v_largest(f512 x) {
    float all[8], top;
    _mm256_storeu_ps(all, _mm256_max_ps(x.a, x.b));
    top = all[0];
    for (int i = 1; i < 8; i++) top = all[i] > top ? all[i] : top;
    return top;
}
INLINE int v_extreme(m16 mask, i512 x, int sign) { /* the least, or with sign -1 the greatest, of those in the mask */
    int all[16], found = sign < 0 ? INT32_MIN : INT32_MAX;
    memcpy(all, &x, sizeof all);
    for (int i = 0; i < 16; i++)
        if (mask >> i & 1 && (sign < 0 ? all[i] > found : all[i] < found)) found = all[i];
    return found;
}
#define _mm512_reduce_add_ps v_sum
#define _mm512_reduce_max_ps v_largest
#define _mm512_reduce_min_epi32(x) v_extreme(0xFFFF, x, 1)
#define _mm512_mask_reduce_min_epi32(mask, x) v_extreme(mask, x, 1)
#define _mm512_mask_reduce_max_epi32(mask, x) v_extreme(mask, x, -1)

/* ---- orders. Within lanes of 128 bits AVX2 has the same; between lanes only what is used */
#define _mm512_unpacklo_epi8(x, y) EACH2(_mm256_unpacklo_epi8, x, y)
#define _mm512_unpackhi_epi8(x, y) EACH2(_mm256_unpackhi_epi8, x, y)
#define _mm512_unpacklo_epi16(x, y) EACH2(_mm256_unpacklo_epi16, x, y)
#define _mm512_unpackhi_epi16(x, y) EACH2(_mm256_unpackhi_epi16, x, y)
#define _mm512_unpacklo_ps(x, y) EACH2(_mm256_unpacklo_ps, x, y)
#define _mm512_unpackhi_ps(x, y) EACH2(_mm256_unpackhi_ps, x, y)
#define _mm512_unpacklo_pd(x, y) v_as_f(_mm512_unpacklo_epi64(v_as_i(x), v_as_i(y)))
#define _mm512_unpackhi_pd(x, y) v_as_f(_mm512_unpackhi_epi64(v_as_i(x), v_as_i(y)))
#define _mm512_unpacklo_epi32(x, y) EACH2(_mm256_unpacklo_epi32, x, y)
#define _mm512_unpackhi_epi32(x, y) EACH2(_mm256_unpackhi_epi32, x, y)
#define _mm512_unpacklo_epi64(x, y) EACH2(_mm256_unpacklo_epi64, x, y)
#define _mm512_unpackhi_epi64(x, y) EACH2(_mm256_unpackhi_epi64, x, y)
#define _mm512_shuffle_ps(x, y, how) F2(_mm256_shuffle_ps((x).a, (y).a, how), _mm256_shuffle_ps((x).b, (y).b, how))
INLINE __m128i lane(i512 x, int i) {
    __m256i half = i & 2 ? x.b : x.a;
    return i & 1 ? _mm256_extracti128_si256(half, 1) : _mm256_castsi256_si128(half);
}
INLINE i512 v_lanes(i512 x, i512 y, const int how) { /* two lanes of x, then two of y */
    return I2(_mm256_set_m128i(lane(x, how >> 2 & 3), lane(x, how & 3)),
              _mm256_set_m128i(lane(y, how >> 6 & 3), lane(y, how >> 4 & 3)));
}
#define _mm512_shuffle_i32x4 v_lanes
#define _mm512_shuffle_f32x4(x, y, how) v_as_f(v_lanes(v_as_i(x), v_as_i(y), how))
INLINE f512 joined(__m256 x, __m256 y) { return F2(x, y); }
INLINE i512 joined_i(__m256i x, __m256i y) { return I2(x, y); }
INLINE __m256 halved(f512 x) { return _mm256_add_ps(x.a, x.b); }
INLINE f512 spread_four(const float *four, i512 which) {
    const __m256 twice = _mm256_broadcast_ps((const __m128 *)four);
    return F2(_mm256_permutevar_ps(twice, which.a), _mm256_permutevar_ps(twice, which.b));
}
INLINE f512 spread_eight(__m256 eight, i512 which) {
    return F2(_mm256_permutevar8x32_ps(eight, which.a), _mm256_permutevar8x32_ps(eight, which.b));
}

/* Of 8 rows of four numbers of 32 bits, `apart` bytes apart, the columns. Halves that are loaded into their places take no
   instruction that moves them between lanes. */
INLINE void four_columns(const void *rows, int64_t apart, __m256i column[4]) {
    __m256i row[4], pair[4];
    UNROLL for (int i = 0; i < 4; i++) {
        const uint8_t *at = (const uint8_t *)rows + i * apart;
        row[i] = _mm256_loadu2_m128i((const __m128i *)(at + 4 * apart), (const __m128i *)at);
    }
    UNROLL for (int i = 0; i < 2; i++) {
        pair[i] = _mm256_unpacklo_epi32(row[2 * i], row[2 * i + 1]);
        pair[2 + i] = _mm256_unpackhi_epi32(row[2 * i], row[2 * i + 1]);
    }
    UNROLL for (int i = 0; i < 2; i++) {
        column[2 * i] = _mm256_unpacklo_epi64(pair[2 * i], pair[2 * i + 1]);
        column[2 * i + 1] = _mm256_unpackhi_epi64(pair[2 * i], pair[2 * i + 1]);
    }
}

/* ---- codes of 4 bits */
/* Of 32 codes in 16 bytes those of the first and of the last 8 bytes, in their order. */
INLINE void apart_nibbles(const uint8_t *codes, __m128i which[2]) {
    const __m128i bytes = _mm_loadu_si128((const __m128i *)codes), low = _mm_set1_epi8(15);
    const __m128i even = _mm_and_si128(bytes, low), odd = _mm_and_si128(_mm_srli_epi16(bytes, 4), low);
    which[0] = _mm_unpacklo_epi8(even, odd), which[1] = _mm_unpackhi_epi8(even, odd);
}
INLINE i512 picked(const uint8_t *codes, __m256i values) { /* the lower bytes of values are looked up, then the upper ones */
    const __m256i bytes = _mm256_permute4x64_epi64(
        _mm256_shuffle_epi8(values, _mm256_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15, 0, 2, 4, 6, 8, 10, 12,
                                                     14, 1, 3, 5, 7, 9, 11, 13, 15)), 0xD8);
    const __m128i lower = _mm256_castsi256_si128(bytes), upper = _mm256_extracti128_si256(bytes, 1);
    __m128i which[2];
    __m256i half[2];
    apart_nibbles(codes, which);
    UNROLL for (int j = 0; j < 2; j++) {
        const __m128i a = _mm_shuffle_epi8(lower, which[j]), b = _mm_shuffle_epi8(upper, which[j]);
        half[j] = _mm256_set_m128i(_mm_unpackhi_epi8(a, b), _mm_unpacklo_epi8(a, b));
    }
    return I2(half[0], half[1]);
}
INLINE __m256 looked_up(f512 values, __m128i which) {
    const __m256i at = _mm256_cvtepu8_epi32(which);
    return _mm256_blendv_ps(_mm256_permutevar8x32_ps(values.a, at), _mm256_permutevar8x32_ps(values.b, at),
                            as_f(_mm256_slli_epi32(at, 28)));
}
INLINE void picked_wide(const uint8_t *codes, f512 values, f512 part[2]) {
    __m128i which[2];
    apart_nibbles(codes, which);
    UNROLL for (int j = 0; j < 2; j++) part[j] = F2(looked_up(values, which[j]), looked_up(values, upper_8(which[j])));
}

/* ---- registers */
#ifdef NEON_H
typedef __m128 reg;
#define REG 4
#define REGS 32
#define reg_load _mm_loadu_ps
#define reg_first(at, count) ((reg)load_quarter(at, (size_t)(count) * sizeof(float)))
#define reg_set1 vdupq_n_f32
#define reg_fma(x, y, sum) vfmaq_f32(sum, x, y)
#define reg_halved(x) F8(x, vdupq_n_f32(0))
INLINE reg reg_terms(i512 pairs, const int part) {
    const uint32x4_t four = (uint32x4_t)lane(pairs, part % 4);
    return (reg)(part < 4 ? four << 16 : four & 0xFFFF0000);
}
#else
typedef __m256 reg;
#define REG 8
#define REGS 16
#define reg_load _mm256_loadu_ps
#define reg_first(at, count) as_f(load_half(at, (size_t)(count) * sizeof(float)))
#define reg_set1 _mm256_set1_ps
#define reg_fma _mm256_fmadd_ps
#define reg_halved(x) (x)
INLINE reg reg_terms(i512 pairs, const int part) {
    return part < 2 ? even8(part % 2 ? pairs.b : pairs.a) : odd8(part % 2 ? pairs.b : pairs.a);
}
#endif

/* ---- products of bytes: by an instruction of AVX-VNNI's that adds them up by fours. Without it they are
   added up by twos, in 16 bits, where signed codes of 8 bits are too large by nothing, as no sum of two products of 255
   fits. */
#if defined NEON_H
#define BY_FOURS 1
enum { BYTE_OFFSET = 0 };
#define dot_bytes dot_halves
#elif defined __AVXVNNI__ || defined EMULATED_VNNI
#define BY_FOURS 1
enum { BYTE_OFFSET = 128 };
#ifdef EMULATED_VNNI
INLINE __m256i dot_bytes(__m256i sum, __m256i w, __m256i x) {
    const __m256i even = _mm256_and_si256(w, _mm256_set1_epi16(255)), signs = _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8);
    const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(w, 8), _mm256_srai_epi16(x, 8));
    return _mm256_add_epi32(sum, _mm256_add_epi32(_mm256_madd_epi16(even, signs), odd));
}
#else
#define dot_bytes _mm256_dpbusd_avx_epi32
#endif
#else
#define BY_FOURS 0
enum { BYTE_OFFSET = 0 };
#endif

/* Sums by fours of w, unsigned bytes of at most 30, times x, signed ones, and of another vector of each, times `by`, which is
   twice in each lane of 32 bits; and of w that is signed: of its size times x with its sign. x is never -128. */
INLINE __m256i two_by(__m256i w, __m256i x, __m256i w2, __m256i x2, __m256i by) {
    return _mm256_madd_epi16(_mm256_add_epi16(_mm256_maddubs_epi16(w, x), _mm256_maddubs_epi16(w2, x2)), by);
}
INLINE __m256i signed_by(__m256i w, __m256i x, __m256i by) {
    return _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w)), by);
}
#if BY_FOURS
#define dot_bytes_512(sum, w, x) EACH3(dot_bytes, sum, w, x)
#define dot_nibbles_512(sum, w, x, w2, x2) dot_bytes_512(dot_bytes_512(sum, w, x), w2, x2)
#else
INLINE i512 dot_nibbles_512(i512 sum, i512 w, i512 x, i512 w2, i512 x2) {
    const __m256i one = _mm256_set1_epi16(1);
    return _mm512_add_epi32(sum, I2(two_by(w.a, x.a, w2.a, x2.a, one), two_by(w.b, x.b, w2.b, x2.b, one)));
}
#endif

#endif
