// What CUDA C++ has in addition to C++, for `mx.fast.cuda_kernel`.
#define IN(T) const T*
#define OUT(T) T*
#define SHARED(T) T*
#define LOCAL
#define FUNCTION __device__ __forceinline__
#define UNROLL _Pragma("unroll")
#define BARRIER __syncthreads()
typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

FUNCTION float as_float(u32 x) { return __uint_as_float(x); }
FUNCTION u32 as_bits(float x) { return __float_as_uint(x); }
FUNCTION float half_to_float(u32 x) { return __half2float(__ushort_as_half(u16(x))); }
FUNCTION u16 float_to_half(float x) { return __half_as_ushort(__float2half_rn(x)); }
FUNCTION float xor_float(float x, int offset) { return __shfl_xor_sync(0xffffffffu, x, offset); }
FUNCTION float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Loads 4, 8 or 16 bytes at once.
template <int N> struct alignas(4 * N) Words { u32 word[N]; };
template <int N> FUNCTION void load_words(const u32* from, u64 at, u32* to) {
  const Words<N> words = *reinterpret_cast<const Words<N>*>(from + at);
  UNROLL for (int i = 0; i < N; ++i) to[i] = words.word[i];
}
