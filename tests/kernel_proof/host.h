// What stands for a device in a proof: paged.h as C++ of a CPU.
//
// The threads of a group are fibers. A fiber runs until a shuffle or a barrier, where it waits for
// the others, so SIMD groups advance in lockstep and every run is the same. These are faults, which
// end the program with a line:
// - a read or a write outside an array, or of a vector at an address that it is not aligned to;
// - a shuffle or a barrier that some threads do not reach, or reach in another order;
// - a number of shared memory that is read before it is written, or that two threads touch without
//   a barrier between them, one of them writing;
// - a number of an output that is written twice.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <unordered_map>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#define HAS_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define HAS_ASAN 1
#endif
#endif
#ifdef HAS_ASAN
#include <sanitizer/common_interface_defs.h>
#endif

#define IN(T) In<T>
#define OUT(T) Out<T>
#define SHARED(T) Shared<T>
#define LOCAL
#define FUNCTION inline
#define UNROLL
#define BARRIER barrier()
typedef uint32_t u32;
typedef uint64_t u64;
typedef uint16_t u16;

[[noreturn]] inline void fail(const char* what, long long at = -1, long long size = -1) {
  std::fprintf(stderr, "FAULT: %s (%lld of %lld)\n", what, at, size);
  std::exit(3);
}

// Stacks of fibers. `swapcontext` makes two system calls; switching by hand makes none.
#if defined(__x86_64__) && !defined(SWITCH_BY_UCONTEXT)
extern "C" void switch_stack(void** from, void* to) asm("switch_stack");
asm(R"(
.text
.globl switch_stack
switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");

struct Stack {
  void* pointer = nullptr;
  // Begins `entry`, which does not return, at the next switch to it.
  void prepare(std::vector<char>& memory, void (*entry)()) {
    u64* top = reinterpret_cast<u64*>(u64(memory.data() + memory.size()) & ~u64(63));
    *--top = 0;  // as if `entry` had been called
    *--top = reinterpret_cast<u64>(entry);
    for (int i = 0; i < 6; ++i) *--top = 0;  // registers
    pointer = top;
  }
  void switch_to(Stack& other) { switch_stack(&pointer, other.pointer); }
};
#else
#include <ucontext.h>

struct Stack {
  ucontext_t context;
  void prepare(std::vector<char>& memory, void (*entry)()) {
    getcontext(&context);
    context.uc_stack.ss_sp = memory.data();
    context.uc_stack.ss_size = memory.size();
    context.uc_link = nullptr;
    makecontext(&context, entry, 0);
  }
  void switch_to(Stack& other) { swapcontext(&context, &other.context); }
};
#endif

enum Wait { RUNNING, AT_SHUFFLE, AT_BARRIER, ENDED };

struct Fiber {
  Stack stack;
  std::vector<char> memory = std::vector<char>(256 << 10);
  Wait wait = ENDED;
  int offset = 0;
  u64 n_shuffles = 0;
  float values[2] = {0, 0};  // of this shuffle and of the one before
  void* fake_stack = nullptr;
};

struct Machine {
  std::vector<Fiber> fibers;
  Stack scheduler;
  int current = 0, epoch = 1, n_groups = 0;
  const void* scheduler_memory = nullptr;
  size_t scheduler_size = 0;
  void (*body)(int worker) = nullptr;
};
inline Machine machine;

inline void enter_fiber(Fiber& to) {
#ifdef HAS_ASAN
  void* fake;
  __sanitizer_start_switch_fiber(&fake, to.memory.data(), to.memory.size());
#endif
  machine.scheduler.switch_to(to.stack);
#ifdef HAS_ASAN
  __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#endif
}

inline void leave_fiber(Wait wait) {
  Fiber& own = machine.fibers[machine.current];
  own.wait = wait;
#ifdef HAS_ASAN
  __sanitizer_start_switch_fiber(
      wait == ENDED ? nullptr : &own.fake_stack, machine.scheduler_memory, machine.scheduler_size);
#endif
  own.stack.switch_to(machine.scheduler);
#ifdef HAS_ASAN
  __sanitizer_finish_switch_fiber(
      own.fake_stack, &machine.scheduler_memory, &machine.scheduler_size);
#endif
}

inline void fiber_main() {
#ifdef HAS_ASAN
  __sanitizer_finish_switch_fiber(nullptr, &machine.scheduler_memory, &machine.scheduler_size);
#endif
  machine.body(machine.current);
  leave_fiber(ENDED);
}

// The threads of a SIMD group wait for the same, and for the same shuffle.
inline Wait wait_of(int first) {
  const Fiber& one = machine.fibers[first];
  for (int i = first; i < first + 32; ++i) {
    const Fiber& other = machine.fibers[i];
    if (other.wait != one.wait) fail("threads of a SIMD group do not meet", i, other.wait);
    if (other.n_shuffles != one.n_shuffles) fail("a shuffle that some threads skip", i);
    if (other.wait == AT_SHUFFLE && other.offset != one.offset) fail("shuffles differ", i);
  }
  return one.wait;
}

// Runs `body` by all threads of one group.
inline void run_group(int threads, void (*body)(int)) {
  machine.fibers.resize(threads);
  machine.body = body;
  ++machine.epoch;
  ++machine.n_groups;
  for (Fiber& one : machine.fibers) {
    one.stack.prepare(one.memory, fiber_main);
    one.wait = RUNNING;
    one.n_shuffles = 0;
  }
  while (true) {
    int n_ended = 0, n_at_barrier = 0;
    for (int simd = 0; simd < threads; simd += 32) {
      if (machine.fibers[simd].wait == RUNNING) {
        do {
          for (machine.current = simd; machine.current < simd + 32; ++machine.current) {
            enter_fiber(machine.fibers[machine.current]);
          }
        } while (wait_of(simd) == AT_SHUFFLE);
      }
      (machine.fibers[simd].wait == ENDED ? n_ended : n_at_barrier) += 32;
    }
    if (n_ended == threads) return;
    if (n_ended) fail("a barrier that some threads do not reach");
    for (Fiber& one : machine.fibers) one.wait = RUNNING;
    ++machine.epoch;
  }
}

inline float xor_float(float x, int offset) {
  const int self = machine.current;
  Fiber& own = machine.fibers[self];
  const int turn = own.n_shuffles++ % 2;
  own.values[turn] = x;
  own.offset = offset;
  leave_fiber(AT_SHUFFLE);
  // The next shuffle uses the other place, and the one after it comes when all have read this one.
  return machine.fibers[self ^ offset].values[turn];
}

inline void barrier() { leave_fiber(AT_BARRIER); }

template <class T> struct In {
  const T* data;
  u64 size;
  const T& operator[](u64 at) const {
    if (at >= size) fail("a read outside an input", at, size);
    return data[at];
  }
};

template <class T> struct Out {
  T* data;
  u64 size;
  unsigned char* is_written;
  T& operator[](u64 at) const {
    if (at >= size) fail("a write outside an output", at, size);
    if (is_written[at]++) fail("a second write to an output", at, size);
    return data[at];
  }
};

template <class T> struct Shared {
  struct Number {
    T value;
    int epoch_written = 0, writer = 0, epoch_read = 0, reader = 0;
  };
  std::vector<Number>* numbers;

  struct Place {
    Number& own;
    operator T() const {
      if (!own.epoch_written) fail("shared memory is read before it is written");
      if (own.epoch_written == machine.epoch && own.writer != machine.current) {
        fail("shared memory is read without a barrier after its write");
      }
      const bool is_first = own.epoch_read != machine.epoch || own.reader == machine.current;
      own.reader = is_first ? machine.current : -1;  // -1: several
      own.epoch_read = machine.epoch;
      return own.value;
    }
    void operator=(T value) const {
      if (own.epoch_written == machine.epoch && own.writer != machine.current) {
        fail("shared memory is written twice without a barrier between");
      }
      if (own.epoch_read == machine.epoch && own.reader != machine.current) {
        fail("shared memory is written without a barrier after its read");
      }
      own.value = value;
      own.epoch_written = machine.epoch;
      own.writer = machine.current;
    }
  };

  Place operator[](u64 at) const {
    if (at >= numbers->size()) fail("outside shared memory", at, numbers->size());
    return Place{(*numbers)[at]};
  }
};

// Words of K and V that were read: by each thread group once; by any of them once.
struct Reads {
  u64 by_groups = 0, distinct = 0;
  std::unordered_map<const void*, std::vector<int>> groups;  // which has read each word last
};
inline Reads reads;

template <int N> inline void load_words(In<u32> from, u64 at, u32* to) {
  if (at % N) fail("a vector that is not aligned", at, N);
  if (at + N > from.size) fail("a read outside an input", at, from.size);
  std::memcpy(to, from.data + at, 4 * N);
  std::vector<int>& groups = reads.groups[from.data];
  groups.resize(from.size);
  for (u64 i = at; i < at + N; ++i) {
    reads.distinct += groups[i] == 0;
    reads.by_groups += groups[i] != machine.n_groups;
    groups[i] = machine.n_groups;
  }
}

inline float as_float(u32 x) {
  float y;
  std::memcpy(&y, &x, 4);
  return y;
}
inline u32 as_bits(float x) {
  u32 y;
  std::memcpy(&y, &x, 4);
  return y;
}
inline float half_to_float(u32 x) {
  const int exponent = x >> 10 & 31, fraction = x & 1023;
  float y = exponent == 31 ? (fraction ? NAN : INFINITY)
            : exponent     ? std::ldexp(float(1024 + fraction), exponent - 25)
                           : std::ldexp(float(fraction), -24);
  return x >> 15 ? -y : y;
}
inline u16 float_to_half(float x) {
  const u32 bits = as_bits(x), sign = bits >> 16 & 0x8000;
  if (std::isnan(x)) return u16(sign | 0x7e00);
  const float size = std::fabs(x);
  if (size >= 65520.0f) return u16(sign | 0x7c00);
  int exponent = size > 0 ? std::ilogb(size) : -14;
  if (exponent < -14) exponent = -14;
  const float scaled = std::nearbyint(std::ldexp(size, 10 - exponent));  // ties to even
  const u32 whole = u32(scaled);
  return u16(sign | (whole < 1024 ? whole : ((exponent + 15) << 10) + (whole - 1024)));
}
inline float exp2_fast(float x) { return std::exp2(x); }
