// Copies large runs of bytes past the processor's cache, and finds the elements that differ in two.
//
// A plain copy reads each line of its target before it overwrites it: three transfers a byte in
// place of two. Stores that go past the cache do not. The processor reads ahead within a page of
// 4 KiB only, so the copy goes through four pages at a time.

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

// A bit a byte that differs, of 64 bytes.
__attribute__((target("avx512bw"))) std::uint64_t unlike_512(const char* a, const char* b) {
  return _mm512_cmpneq_epi8_mask(_mm512_loadu_si512(a), _mm512_loadu_si512(b));
}

std::uint64_t unlike_128(const char* a, const char* b) {
  std::uint64_t alike = 0;
  for (int i = 0; i < 4; ++i) {
    const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(a) + i);
    const __m128i y = _mm_loadu_si128(reinterpret_cast<const __m128i*>(b) + i);
    const auto mask = static_cast<std::uint32_t>(_mm_movemask_epi8(_mm_cmpeq_epi8(x, y)));
    alike |= static_cast<std::uint64_t>(mask) << (16 * i);
  }
  return ~alike;
}

// Of elements of 1 << shift bytes; see `ckptd_differ`.
template <std::uint64_t (*unlike)(const char*, const char*), int shift>
inline __attribute__((always_inline)) std::int64_t differ(
    const char* a, const char* b, std::size_t size, std::uint32_t* gaps, char* planes,
    std::size_t most) {
  constexpr std::size_t width = std::size_t{1} << shift;
  constexpr std::uint64_t firsts = ~std::uint64_t{0} / ((std::uint64_t{1} << (width - 1) << 1) - 1);
  std::size_t found = 0, next = 0;
  for (std::size_t at = 0; at < size; at += kLine) {
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
      if (found == most) return -1;
      const std::size_t byte = at + __builtin_ctzll(bits);
      gaps[found] = static_cast<std::uint32_t>((byte >> shift) - next);
      next = (byte >> shift) + 1;
      for (std::size_t i = 0; i < width; ++i) {
        planes[i * most + found] = a[byte + i] ^ b[byte + i];
      }
      ++found;
    }
  }
  return static_cast<std::int64_t>(found);
}

template <std::uint64_t (*unlike)(const char*, const char*)>
inline __attribute__((always_inline)) std::int64_t differ_in(
    const char* a, const char* b, std::size_t size, int shift, std::uint32_t* gaps, char* planes,
    std::size_t most) {
  switch (shift) {
    case 0: return differ<unlike, 0>(a, b, size, gaps, planes, most);
    case 1: return differ<unlike, 1>(a, b, size, gaps, planes, most);
    case 2: return differ<unlike, 2>(a, b, size, gaps, planes, most);
    default: return differ<unlike, 3>(a, b, size, gaps, planes, most);
  }
}

__attribute__((target("avx512bw"))) std::int64_t differ_512(
    const char* a, const char* b, std::size_t size, int shift, std::uint32_t* gaps, char* planes,
    std::size_t most) {
  return differ_in<unlike_512>(a, b, size, shift, gaps, planes, most);
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

// Elements of 1 << shift bytes that differ in `size` bytes: how many lie between each and the one
// before it, and the bytes of both XORed, plane by plane, each of `most`. Returns how many there are;
// -1: more than `most`.
extern "C" std::int64_t ckptd_differ(
    const char* a, const char* b, std::size_t size, int shift, std::uint32_t* gaps, char* planes,
    std::size_t most) {
  static const bool wide = (__builtin_cpu_init(), __builtin_cpu_supports("avx512bw"));
  return wide ? differ_512(a, b, size, shift, gaps, planes, most)
              : differ_in<unlike_128>(a, b, size, shift, gaps, planes, most);
}

#else

extern "C" int ckptd_copier_gains() { return 0; }

extern "C" std::int64_t ckptd_differ(
    const char*, const char*, std::size_t, int, std::uint32_t*, char*, std::size_t) {
  return -1;
}

extern "C" void ckptd_copy(char* to, const char* from, std::size_t size) {
  std::memcpy(to, from, size);
}

#endif
