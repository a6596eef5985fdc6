// What Metal has in place of C++, for `mx.fast.metal_kernel`.
#define IN(T) device const T*
#define OUT(T) device T*
#define SHARED(T) threadgroup T*
#define LOCAL thread
#define FUNCTION inline
#define UNROLL _Pragma("clang loop unroll(full)")
#define BARRIER threadgroup_barrier(mem_flags::mem_threadgroup)
typedef uint u32;
typedef ulong u64;
typedef ushort u16;

FUNCTION float as_float(u32 x) { return as_type<float>(x); }
FUNCTION u32 as_bits(float x) { return as_type<u32>(x); }
FUNCTION float half_to_float(u32 x) { return float(as_type<half>(u16(x))); }
FUNCTION u16 float_to_half(float x) { return as_type<u16>(half(x)); }
FUNCTION float xor_float(float x, int offset) { return simd_shuffle_xor(x, ushort(offset)); }
FUNCTION float exp2_fast(float x) { return metal::fast::exp2(x); }

// Loads 4, 8 or 16 bytes at once.
template <int N> struct Loader;
template <> struct Loader<1> {
  static FUNCTION void load(device const u32* from, thread u32* to) { to[0] = *from; }
};
template <> struct Loader<2> {
  static FUNCTION void load(device const u32* from, thread u32* to) {
    const uint2 words = *(device const uint2*)from;
    to[0] = words.x;
    to[1] = words.y;
  }
};
template <> struct Loader<4> {
  static FUNCTION void load(device const u32* from, thread u32* to) {
    const uint4 words = *(device const uint4*)from;
    to[0] = words.x;
    to[1] = words.y;
    to[2] = words.z;
    to[3] = words.w;
  }
};
template <int N> FUNCTION void load_words(device const u32* from, u64 at, thread u32* to) {
  Loader<N>::load(from + at, to);
}
