// Copies large runs of bytes past the processor's cache.
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

#else

extern "C" int ckptd_copier_gains() { return 0; }

extern "C" void ckptd_copy(char* to, const char* from, std::size_t size) {
  std::memcpy(to, from, size);
}

#endif
