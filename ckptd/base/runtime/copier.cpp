// Copies large runs of bytes past the processor's cache, and says how two runs of elements differ.
//
// A plain copy reads each line of its target before it overwrites it: three transfers a byte in
// place of two. Stores that go past the cache do not. The processor reads ahead within a page of
// 4 KiB only, so the copy goes through four pages at a time.
//
// The comparison digests the newer run as it goes (XXH3-128), so that it is read once.

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>

namespace {

constexpr std::size_t kPage = 4096;
constexpr std::size_t kPages = 4;
constexpr std::size_t kLine = 64;

using Copy = void (*)(char*, const char*, std::size_t);

// `to` is aligned to a line, and `size` a multiple of kPages * kPage.
__attribute__((target("avx512f"))) void copy_pages_512(
    char* to, const char* from, std::size_t size) {
  for (std::size_t base = 0; base < size; base += kPages * kPage) {
    for (std::size_t line = 0; line < kPage; line += 2 * kLine) {
      for (std::size_t page = 0; page < kPages; ++page) {
        const std::size_t at = base + page * kPage + line;
        const __m512i first = _mm512_loadu_si512(from + at);
        const __m512i second = _mm512_loadu_si512(from + at + kLine);
        _mm512_stream_si512(reinterpret_cast<__m512i*>(to + at), first);
        _mm512_stream_si512(reinterpret_cast<__m512i*>(to + at + kLine), second);
      }
    }
  }
}

void copy_pages_128(char* to, const char* from, std::size_t size) {
  for (std::size_t base = 0; base < size; base += kPages * kPage) {
    for (std::size_t line = 0; line < kPage; line += kLine) {
      for (std::size_t page = 0; page < kPages; ++page) {
        const std::size_t at = base + page * kPage + line;
        __m128i part[4];
        for (int i = 0; i < 4; ++i) {
          part[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + at) + i);
        }
        for (int i = 0; i < 4; ++i) {
          _mm_stream_si128(reinterpret_cast<__m128i*>(to + at) + i, part[i]);
        }
      }
    }
  }
}

Copy chosen() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx512f") ? copy_pages_512 : copy_pages_128;
}

// --- which elements differ ----------------------------------------------------------------------

constexpr std::size_t kChunk = std::size_t{1} << 16;
constexpr std::size_t kPiece = 16;  // lines that XXH3 takes between two scrambles

// Where the next one is noted. It is passed by value, so that no byte written is taken for a part of it.
struct Next {
  std::uint16_t* at;
  std::uint8_t* planes;
  std::size_t stride;
};

// Of two runs of elements of 1 << shift bytes.
struct Found {
  std::uint8_t* bits;     // one an element
  std::uint16_t* at;      // where those that differ lie, without the bits above 16
  std::uint32_t* chunks;  // of each 1 << 16 elements, how many there are up to its end
  std::uint8_t* planes;   // what differs, XORed, byte plane by byte plane
  std::size_t stride;     // of planes; a whole line may be written behind the last one
  std::size_t most;       // no more are noted
  std::size_t count = 0;
  Next begin() const { return {at, planes, stride}; }
};

template <int shift>
inline __attribute__((always_inline)) Next note(
    Next to, const char* a, const char* b, std::size_t element) {
  constexpr std::size_t width = std::size_t{1} << shift;
  *to.at = static_cast<std::uint16_t>(element);
  for (std::size_t i = 0; i < width; ++i) {
    to.planes[i * to.stride] =
        static_cast<std::uint8_t>(a[(element << shift) + i] ^ b[(element << shift) + i]);
  }
  return {to.at + 1, to.planes + 1, to.stride};
}

// A bit a byte that differs, of 64 bytes.
std::uint64_t unlike(const char* a, const char* b) {
  std::uint64_t alike = 0;
  for (int i = 0; i < 4; ++i) {
    const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(a) + i);
    const __m128i y = _mm_loadu_si128(reinterpret_cast<const __m128i*>(b) + i);
    const auto mask = static_cast<std::uint32_t>(_mm_movemask_epi8(_mm_cmpeq_epi8(x, y)));
    alike |= static_cast<std::uint64_t>(mask) << (16 * i);
  }
  return ~alike;
}

// Returns false where more than `found.most` differ.
template <int shift>
bool compare(const char* a, const char* b, std::size_t size, Found& found) {
  constexpr std::size_t width = std::size_t{1} << shift;
  constexpr std::uint64_t firsts = ~std::uint64_t{0} / ((std::uint64_t{1} << (width - 1) << 1) - 1);
  std::memset(found.bits, 0, size / width / 8 + 1);
  Next next = found.begin();
  for (std::size_t at = 0; at < size; at += kLine) {
    if (at && at % (kChunk << shift) == 0) {
      found.chunks[at / (kChunk << shift) - 1] = static_cast<std::uint32_t>(next.at - found.at);
    }
    std::uint64_t bits = 0;
    if (size - at >= kLine) {
      bits = unlike(a + at, b + at);
    } else {
      for (std::size_t i = 0; at + i < size; ++i) {
        bits |= static_cast<std::uint64_t>(a[at + i] != b[at + i]) << i;
      }
    }
    for (int i = 1; i < static_cast<int>(width); i *= 2) bits |= bits >> i;
    for (bits &= firsts; bits; bits &= bits - 1) {
      if (static_cast<std::size_t>(next.at - found.at) == found.most) return false;
      const std::size_t element = (at + static_cast<std::size_t>(__builtin_ctzll(bits))) >> shift;
      found.bits[element / 8] |= static_cast<std::uint8_t>(1 << element % 8);
      next = note<shift>(next, a, b, element);
    }
  }
  found.count = static_cast<std::size_t>(next.at - found.at);
  return true;
}

#define WIDE                                                                                   \
  __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi2,bmi,bmi2,popcnt")))

// The numbers of XXH3 (https://github.com/Cyan4973/xxHash, doc/xxhash_spec.md).
alignas(64) constexpr std::uint8_t kSecret[192] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e};
constexpr std::uint64_t kPrime1 = 0x9E3779B185EBCA87, kPrime2 = 0xC2B2AE3D27D4EB4F;
constexpr std::uint64_t kPrime3 = 0x165667B19E3779F9, kPrime4 = 0x85EBCA77C2B2AE63;
constexpr std::uint64_t kPrime5 = 0x27D4EB2F165667C5;
constexpr std::uint32_t kShort1 = 0x9E3779B1, kShort2 = 0x85EBCA77, kShort3 = 0xC2B2AE3D;
constexpr std::size_t kLeastHashed = 241;  // shorter ones have another form

WIDE inline __attribute__((always_inline)) __m512i add_line(__m512i sums, const char* line, const std::uint8_t* secret) {
  const __m512i data = _mm512_loadu_si512(line);
  const __m512i key = _mm512_xor_si512(data, _mm512_loadu_si512(secret));
  const __m512i product = _mm512_mul_epu32(key, _mm512_srli_epi64(key, 32));
  const __m512i swapped = _mm512_shuffle_epi32(data, static_cast<_MM_PERM_ENUM>(0x4E));
  return _mm512_add_epi64(sums, _mm512_add_epi64(product, swapped));
}

WIDE inline __m512i scramble(__m512i sums) {
  const __m512i mixed = _mm512_xor_si512(
      _mm512_xor_si512(sums, _mm512_srli_epi64(sums, 47)), _mm512_loadu_si512(kSecret + 128));
  const __m512i prime = _mm512_set1_epi64(kShort1);
  const __m512i high = _mm512_mul_epu32(_mm512_srli_epi64(mixed, 32), prime);
  return _mm512_add_epi64(_mm512_mul_epu32(mixed, prime), _mm512_slli_epi64(high, 32));
}

inline void put_half(const std::uint64_t* sums, int secret, std::uint64_t start, std::uint8_t* to) {
  for (int i = 0; i < 8; i += 2) {
    std::uint64_t keys[2];
    std::memcpy(keys, kSecret + secret + 8 * i, sizeof keys);
    const auto product = static_cast<unsigned __int128>(sums[i] ^ keys[0]) * (sums[i + 1] ^ keys[1]);
    start += static_cast<std::uint64_t>(product) ^ static_cast<std::uint64_t>(product >> 64);
  }
  start = (start ^ start >> 37) * 0x165667919E3779F9;
  start = __builtin_bswap64(start ^ start >> 32);
  std::memcpy(to, &start, sizeof start);
}

WIDE inline void put_digest(__m512i sums, const char* data, std::size_t size, std::uint8_t* to) {
  alignas(64) std::uint64_t all[8];
  _mm512_store_si512(all, add_line(sums, data + size - kLine, kSecret + 121));
  put_half(all, 11, size * kPrime1, to + 8);
  put_half(all, 117, ~(size * kPrime2), to);
}

// The elements of a line that differ, a bit each.
template <int shift>
WIDE inline __attribute__((always_inline)) std::uint64_t unlike_in(__m512i x, __m512i y) {
  if constexpr (shift == 0) return _mm512_cmpneq_epi8_mask(x, y);
  if constexpr (shift == 1) return _mm512_cmpneq_epi16_mask(x, y);
  if constexpr (shift == 2) return _mm512_cmpneq_epi32_mask(x, y);
  return _mm512_cmpneq_epi64_mask(x, y);
}

// Notes those elements of a line whose bits are set, with no branch for each.
template <int shift>
WIDE inline __attribute__((always_inline)) Next note_line(
    Next next, __m512i x, std::uint64_t bits, std::size_t element) {
  alignas(64) static constexpr std::uint16_t kUp[32] = {
      0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15,
      16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31};
  const __m512i up = _mm512_load_si512(kUp);
  auto [at, to, stride] = next;
  const __m512i first = _mm512_set1_epi16(static_cast<short>(element));
  const auto low = static_cast<__mmask32>(bits);
  _mm512_storeu_si512(at, _mm512_maskz_compress_epi16(low, _mm512_add_epi16(first, up)));
  if constexpr (shift == 0) {
    const __m512i more = _mm512_set1_epi16(static_cast<short>(element + 32));
    _mm512_storeu_si512(
        at + __builtin_popcount(low),
        _mm512_maskz_compress_epi16(
            static_cast<__mmask32>(bits >> 32), _mm512_add_epi16(more, up)));
    _mm512_storeu_si512(to, _mm512_maskz_compress_epi8(bits, x));
  } else if constexpr (shift == 1) {
    const __m512i values = _mm512_maskz_compress_epi16(low, x);
    for (int i = 0; i < 2; ++i) {
      _mm256_storeu_si256(
          reinterpret_cast<__m256i*>(to + i * stride),
          _mm512_cvtepi16_epi8(_mm512_srli_epi16(values, 8 * i)));
    }
  } else if constexpr (shift == 2) {
    const __m512i values = _mm512_maskz_compress_epi32(static_cast<__mmask16>(bits), x);
    for (int i = 0; i < 4; ++i) {
      _mm_storeu_si128(
          reinterpret_cast<__m128i*>(to + i * stride),
          _mm512_cvtepi32_epi8(_mm512_srli_epi32(values, 8 * i)));
    }
  } else {
    const __m512i values = _mm512_maskz_compress_epi64(static_cast<__mmask8>(bits), x);
    for (int i = 0; i < 8; ++i) {
      _mm_storel_epi64(
          reinterpret_cast<__m128i*>(to + i * stride),
          _mm512_cvtepi64_epi8(_mm512_srli_epi64(values, 8 * i)));
    }
  }
  const auto count = static_cast<std::size_t>(__builtin_popcountll(bits));
  return {at + count, to + count, stride};
}

// Which of some lines, at most 64, have an element that differs, by the bits of all their elements.
template <int shift>
WIDE inline std::uint64_t lines_with(const std::uint8_t* bits, std::size_t lines) {
  constexpr std::size_t per = 1 << shift;  // registers that the bits of 64 lines take: 8 >> shift
  std::uint64_t out = 0;
  for (std::size_t i = 0; i < 8 / per; ++i) {
    const __m512i part = _mm512_loadu_si512(bits + i * kLine);
    std::uint64_t some = 0;
    if constexpr (shift == 0) some = _mm512_test_epi64_mask(part, part);
    if constexpr (shift == 1) some = _mm512_test_epi32_mask(part, part);
    if constexpr (shift == 2) some = _mm512_test_epi16_mask(part, part);
    if constexpr (shift == 3) some = _mm512_test_epi8_mask(part, part);
    out |= some << (i * 8 * per);
  }
  return lines < 64 ? out & ((std::uint64_t{1} << lines) - 1) : out;
}

constexpr std::size_t kGroup = 64;  // lines that are compared, and then noted

// Notes what differs in a group of lines, by the bits of their elements.
template <int shift>
WIDE inline Next note_group(
    Next next, const char* a, const char* b, std::size_t base, std::size_t end, const Found& found) {
  constexpr std::size_t per = kLine >> shift;
  if (base && base * per % kChunk == 0) {
    found.chunks[base * per / kChunk - 1] = static_cast<std::uint32_t>(next.at - found.at);
  }
  const std::uint8_t* const masks = found.bits;
  std::uint64_t some = lines_with<shift>(masks + base * per / 8, end - base);
  for (; some; some &= some - 1) {
    const std::size_t line = base + static_cast<std::size_t>(__builtin_ctzll(some));
    std::uint64_t mask = 0;
    std::memcpy(&mask, masks + line * per / 8, per / 8);
    const __m512i x = _mm512_loadu_si512(a + line * kLine);
    const __m512i y = _mm512_loadu_si512(b + line * kLine);
    next = note_line<shift>(next, _mm512_xor_si512(x, y), mask, line * per);
  }
  return next;
}

// As `compare`, and digests `b` as it goes.
template <int shift>
WIDE bool compare_wide(
    const char* a, const char* b, std::size_t size, Found& found, std::uint8_t* digest) {
  constexpr std::size_t per = kLine >> shift;
  alignas(64) const std::uint64_t begin[8] = {
      kShort3, kPrime1, kPrime2, kPrime3, kPrime4, kShort2, kPrime5, kShort1};
  __m512i sums = _mm512_load_si512(begin);
  const std::size_t lines = size / kLine, hashed = (size - 1) / kLine;
  std::uint8_t* const masks = found.bits;
  Next next = found.begin();
  std::size_t count = 0, noted = 0;
  // Fetched early: lines of both in turn displace each other, where their addresses are alike.
  for (std::size_t i = 0; i < lines && i < kGroup; ++i) _mm_prefetch(a + i * kLine, _MM_HINT_T0);
  for (std::size_t base = 0, end = 0; base < lines; base = end) {
    end = lines - base < kGroup ? lines : base + kGroup;
    for (std::size_t piece = base; piece < end; piece += kPiece) {
      const std::size_t stop = end - piece < kPiece ? end - piece : kPiece;
      const char *was = a + piece * kLine, *is = b + piece * kLine;
#pragma GCC unroll 4
      for (std::size_t i = 0; i < stop; ++i) {
        const __m512i y = _mm512_loadu_si512(is + i * kLine);
        std::uint64_t mask = unlike_in<shift>(_mm512_loadu_si512(was + i * kLine), y);
        if (piece + i < hashed) sums = add_line(sums, is + i * kLine, kSecret + 8 * i);
        asm volatile("" : "+v"(sums), "+r"(mask));  // one line after the other
        std::memcpy(masks + (piece + i) * per / 8, &mask, per / 8);
        count += static_cast<std::size_t>(__builtin_popcountll(mask));
      }
      if (piece + kPiece <= hashed) sums = scramble(sums);
    }
    // Memory brings these while the group is noted.
    for (std::size_t i = end; i < lines && i < end + kGroup; ++i) {
      _mm_prefetch(a + i * kLine, _MM_HINT_T0);
    }
    // Where they will be too many, going by those so far, noting waits for the count of all.
    if (noted < base || count * lines > found.most * end) continue;
    next = note_group<shift>(next, a, b, base, end, found);
    noted = end;
  }
  for (std::size_t base = noted; base < lines && count <= found.most; base += kGroup) {
    const std::size_t end = lines - base < kGroup ? lines : base + kGroup;
    next = note_group<shift>(next, a, b, base, end, found);
  }
  std::uint64_t rest = 0;
  for (std::size_t e = lines * per; e << shift < size; ++e) {
    if (std::memcmp(a + (e << shift), b + (e << shift), std::size_t{1} << shift) != 0) {
      rest |= std::uint64_t{1} << (e - lines * per);
      if (++count <= found.most) next = note<shift>(next, a, b, e);
    }
  }
  std::memcpy(masks + lines * per / 8, &rest, sizeof rest);
  found.count = count;
  if (size >= kLeastHashed) put_digest(sums, b, size, digest);
  return count <= found.most;
}

// Puts the XOR of all elements, byte plane by byte plane.
template <int shift>
WIDE void split_wide(const char* a, const char* b, std::size_t size, Next planes) {
  constexpr std::size_t per = kLine >> shift;
  std::uint16_t places[kLine + 32];  // not asked for
  std::size_t at = 0;
  for (; size - at >= kLine; at += kLine) {
    planes.at = places;
    const __m512i x = _mm512_loadu_si512(a + at), y = _mm512_loadu_si512(b + at);
    planes = note_line<shift>(planes, _mm512_xor_si512(x, y), ~std::uint64_t{0} >> (64 - per), 0);
  }
  for (; at < size; at += std::size_t{1} << shift) {
    planes.at = places;
    planes = note<shift>(planes, a, b, at >> shift);
  }
}

template <int shift>
void split(const char* a, const char* b, std::size_t size, Next planes) {
  std::uint16_t place = 0;  // not asked for
  for (std::size_t at = 0; at < size; at += std::size_t{1} << shift) {
    planes.at = &place;
    planes = note<shift>(planes, a, b, at >> shift);
  }
}

// --- as bytes -----------------------------------------------------------------------------------

constexpr std::uint8_t kBits = 255;  // in place of a number of low bits: a bit an element
constexpr std::uint32_t kSame = std::uint32_t{1} << 30;
constexpr std::size_t kSample = 256, kLeastPacked = 64;

// How often two of some bytes, drawn one by one, are the same: packing pays from 2.5 times chance on.
struct Sample {
  std::uint16_t counts[256] = {};
  std::size_t pairs = 0, drawn = 0;
  void draw(std::uint8_t value) { pairs += counts[value]++, ++drawn; }
  bool packs() const { return pairs * 1024 > 5 * drawn * (drawn - 1); }
};

// Puts the low bits of all places one after the other.
void put_low(const Found& found, std::size_t low, std::uint8_t* to) {
  const std::size_t count = found.count;
  const std::uint16_t* const at = found.at;
  std::uint64_t word = 0;
  std::size_t fill = 0;
  const std::uint32_t mask = (std::uint32_t{1} << low) - 1;
  for (std::size_t i = 0; i < count && low; i += 2) {  // two at once: at most 30 bits
    std::uint64_t bits = at[i] & mask;
    if (i + 1 < count) bits |= static_cast<std::uint64_t>(at[i + 1] & mask) << low;
    word |= bits << fill;
    fill += 2 * low;
    if (fill >= 32) {
      std::memcpy(to, &word, 4);
      to += 4;
      word >>= 32;
      fill -= 32;
    }
  }
  std::memcpy(to, &word, sizeof word);
}

// As `put_low`, four at once: at most 60 bits.
WIDE void put_low_wide(const Found& found, std::size_t low, std::uint8_t* to) {
  const std::uint64_t mask = ((std::uint64_t{1} << low) - 1) * 0x0001000100010001;
  std::uint64_t word = 0;
  std::size_t fill = 0;
  for (std::size_t i = 0; i < found.count && low; i += 4) {
    std::uint64_t four = 0;
    std::memcpy(&four, found.at + i, sizeof four);
    if (found.count - i < 4) four &= (std::uint64_t{1} << 16 * (found.count - i)) - 1;
    four = _pext_u64(four, mask);
    word |= four << fill;
    fill += 4 * low;
    if (fill < 64) continue;
    std::memcpy(to, &word, sizeof word);
    to += 8;
    fill -= 64;
    word = fill ? four >> (4 * low - fill) : 0;
  }
  std::memcpy(to, &word, sizeof word);
}

// Sets a bit for each place, as far behind the one before as it is above that, and one.
void put_high(const Found& found, std::size_t elements, std::size_t low, std::uint8_t* out) {
  std::size_t i = 0;
  for (std::size_t chunk = 0; i < found.count; ++chunk) {
    const std::size_t end = chunk < (elements - 1) / kChunk ? found.chunks[chunk] : found.count;
    for (; i < end; ++i) {
      const std::size_t bit = ((chunk * kChunk + found.at[i]) >> low) + i;
      out[bit / 8] |= static_cast<std::uint8_t>(1 << bit % 8);
    }
  }
}

// As `put_high`, eight at once; they mostly are in one word of 64 bits, which stays in a register.
WIDE void put_high_wide(
    const Found& found, std::size_t elements, std::size_t low, std::uint8_t* out) {
  const __m512i one = _mm512_set1_epi64(1), up = _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7);
  std::uint64_t word = 0;
  std::size_t i = 0, number = 0;  // of the word
  for (std::size_t chunk = 0; i < found.count; ++chunk) {
    const std::size_t end = chunk < (elements - 1) / kChunk ? found.chunks[chunk] : found.count;
    const std::size_t first = chunk * kChunk;
    for (std::size_t n = 0; i < end; i += n) {
      n = end - i < 8 ? end - i : 8;
      const auto which = static_cast<__mmask8>((1U << n) - 1);
      const __m128i at = _mm_loadu_si128(reinterpret_cast<const __m128i*>(found.at + i));
      const __m512i base = _mm512_set1_epi64(static_cast<long long>(first));
      const __m512i above = _mm512_srli_epi64(
          _mm512_add_epi64(_mm512_cvtepu16_epi64(at), base), static_cast<unsigned>(low));
      const auto begin = static_cast<long long>(i) - static_cast<long long>(64 * number);
      const __m512i bits = _mm512_add_epi64(_mm512_add_epi64(above, up), _mm512_set1_epi64(begin));
      const std::size_t last =
          ((first + found.at[i + n - 1]) >> low) + i + n - 1 - 64 * number;
      // A shift by 64 or more, or by less than none, gives no bit.
      word |= static_cast<std::uint64_t>(
          _mm512_mask_reduce_or_epi64(which, _mm512_sllv_epi64(one, bits)));
      if (last < 64) continue;
      std::memcpy(out + 8 * number, &word, sizeof word);
      if (last < 128) {
        ++number;
        const __m512i rest = _mm512_sub_epi64(bits, _mm512_set1_epi64(64));
        word = static_cast<std::uint64_t>(
            _mm512_mask_reduce_or_epi64(which, _mm512_sllv_epi64(one, rest)));
        continue;
      }
      for (std::size_t k = i; k < i + n; ++k) {
        const std::size_t bit = ((first + found.at[k]) >> low) + k;
        out[bit / 8] |= static_cast<std::uint8_t>(1 << bit % 8);
      }
      number += last / 64;
      std::memcpy(&word, out + 8 * number, sizeof word);
    }
  }
  std::memcpy(out + 8 * number, &word, sizeof word);
}

// Returns behind the last byte written; up to 8 more are spoiled.
std::uint8_t* put_places(
    const Found& found, std::size_t elements, std::uint8_t* out, bool wide) {
  const std::size_t count = found.count;
  std::size_t low = 0, least = ~std::size_t{0};
  for (std::size_t i = 0; i < 16; ++i) {
    const std::size_t bits = count * (i + 1) + ((elements - 1) >> i);
    if (bits < least) low = i, least = bits;
  }
  out[1] = least < elements ? static_cast<std::uint8_t>(low) : kBits;
  const auto number = static_cast<std::uint32_t>(count);
  std::memcpy(out + 2, &number, sizeof number);
  out += 6;
  if (least >= elements) {
    std::memcpy(out, found.bits, (elements + 7) / 8);
    return out + (elements + 7) / 8;
  }
  (wide ? put_low_wide : put_low)(found, low, out);
  out += (count * low + 7) / 8;
  const std::size_t high = (count + ((elements - 1) >> low) + 7) / 8;
  std::memset(out, 0, high + 8);
  (wide ? put_high_wide : put_high)(found, elements, low, out);
  return out + high;
}

std::uint8_t* put_plane(
    const std::uint8_t* plane, std::size_t count, std::uint8_t* out, bool& packs) {
  const bool same = count > 1 && std::memcmp(plane, plane + 1, count - 1) == 0;
  const auto number = static_cast<std::uint32_t>(same ? kSame | 1 : count);
  std::memcpy(out, &number, sizeof number);
  std::memcpy(out + 4, plane, same ? 1 : count);
  Sample sample;
  const std::size_t step = count < 2 * kSample ? 1 : count / kSample;
  for (std::size_t i = 0; i < count && sample.drawn < kSample; i += step) sample.draw(plane[i]);
  packs = !same && count >= kLeastPacked && sample.packs();
  return out + 4 + (same ? 1 : count);
}

}  // namespace

extern "C" int ckptd_copier_gains() { return 1; }

extern "C" void ckptd_copy(char* to, const char* from, std::size_t size) {
  static const Copy copy_pages = chosen();
  std::size_t head = (kLine - reinterpret_cast<std::uintptr_t>(to) % kLine) % kLine;
  head = head < size ? head : size;
  std::memcpy(to, from, head);
  const std::size_t whole = (size - head) / (kPages * kPage) * (kPages * kPage);
  copy_pages(to + head, from + head, whole);
  _mm_sfence();  // such stores are not ordered: a lock that is released next must not pass them
  std::memcpy(to + head + whole, from + head + whole, size - head - whole);
}

namespace {

template <int shift>
std::int64_t change(
    const char* a, const char* b, std::size_t size, Found& found, std::uint8_t* out,
    std::uint8_t* told, bool wide) {
  constexpr std::size_t width = std::size_t{1} << shift;
  const std::size_t elements = size >> shift;
  const bool fits = wide ? compare_wide<shift>(a, b, size, found, told) : compare<shift>(a, b, size, found);
  told[16] = wide && size >= kLeastHashed;
  told[17] = 0;
  if (fits && !found.count) return 0;
  std::uint8_t* end = out;
  if (fits) {
    out[0] = 1;
    end = put_places(found, elements, out, wide);
    for (std::size_t plane = 0; plane < width; ++plane) {
      bool packs = false;
      end = put_plane(found.planes + plane * found.stride, found.count, end, packs);
      told[17] |= static_cast<std::uint8_t>(packs << plane);
    }
    if (2 * found.count <= elements || !told[17]) return end - out;
  } else {
    const std::size_t step = elements < 2 * kSample ? 1 : elements / kSample;
    for (std::size_t plane = 0; plane < width; ++plane) {
      Sample sample;
      for (std::size_t i = 0; i < elements && sample.drawn < kSample; i += step) {
        const std::size_t at = (i << shift) + plane;
        sample.draw(static_cast<std::uint8_t>(a[at] ^ b[at]));
      }
      told[17] |= static_cast<std::uint8_t>(sample.packs() << plane);
    }
  }
  if (told[17]) {
    (wide ? split_wide<shift> : split<shift>)(a, b, size, {nullptr, out, elements + kLine});
  }
  return -1;
}

}  // namespace

// How `size` bytes of elements of 1 << shift bytes have changed, in the sparse form of
// `ckptd/publish/deltas.py`, none of its streams packed. Returns its length; 0: no element has;
// -1: more than `most` have, or more than half, some of whose planes would be smaller after packing:
// then `out` has the XOR of all elements, each byte plane 64 bytes behind the one before.
//
// told: 16 bytes of the digest of the new ones; whether it is there; which planes would be smaller
// after packing, of the elements that have changed, or of all where these are too many.
extern "C" std::int64_t ckptd_change(
    const char* a, const char* b, std::size_t size, int shift, std::size_t most,
    std::uint8_t* room, std::uint8_t* out, std::uint8_t* told) {
  static const bool wide = (__builtin_cpu_init(), __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vbmi2"));
  const std::size_t elements = size >> shift, width = std::size_t{1} << shift;
  Found found;
  found.most = most;
  found.stride = most + kLine;
  found.chunks = reinterpret_cast<std::uint32_t*>(room);
  found.at = reinterpret_cast<std::uint16_t*>(found.chunks + elements / kChunk + 1);
  found.planes = reinterpret_cast<std::uint8_t*>(found.at + found.stride);
  found.bits = found.planes + width * found.stride;
  switch (shift) {
    case 0: return change<0>(a, b, size, found, out, told, wide);
    case 1: return change<1>(a, b, size, found, out, told, wide);
    case 2: return change<2>(a, b, size, found, out, told, wide);
    default: return change<3>(a, b, size, found, out, told, wide);
  }
}

#else

extern "C" int ckptd_copier_gains() { return 0; }

extern "C" std::int64_t ckptd_change(
    const char*, const char*, std::size_t, int, std::size_t, std::uint8_t*, std::uint8_t*,
    std::uint8_t*) {
  return -1;
}

extern "C" void ckptd_copy(char* to, const char* from, std::size_t size) {
  std::memcpy(to, from, size);
}

#endif
