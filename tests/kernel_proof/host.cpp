// Runs both passes of paged.h for the cases of a file: `host CASES RESULTS`.
//
// A case is arrays in the order of `Array`, each as its number of bytes and the bytes. Its result is
// the output, in the same form; and a printed line of the bytes of K and V that thread groups have
// read, each group a byte once, and of how many different bytes these are.
#include "host.h"
#include "paged.h"

enum Array {
  SIZES, QUERIES, KEYS, KEY_SCALES, VALUES, VALUE_SCALES, PLACES, UNITS, ORDER, LAST_SEEN,
  FIRST_KEYS, FIRST_PARTS, PARTS, SINK_LOGITS, ARRAYS
};
enum Size { N_ROWS, N_PARTIALS, LIMITS };  // the limits follow

static std::vector<char> arrays[ARRAYS];

template <class T> static In<T> in(Array which) {
  return {reinterpret_cast<const T*>(arrays[which].data()), arrays[which].size() / sizeof(T)};
}

template <class T> struct Output {
  std::vector<T> data;
  std::vector<unsigned char> is_written;
  explicit Output(u64 size) : data(size), is_written(size) {
    if (size) std::memset(static_cast<void*>(data.data()), 0xff, size * sizeof(T));  // NaN
  }
  Out<T> out() { return {data.data(), data.size(), is_written.data()}; }
  In<T> in() { return {data.data(), data.size()}; }
};

static int unit, kv_head, query;
static Output<float>*weighted, *stats, *full_output;
static Output<u16>* output;
static std::vector<Shared<int>::Number>* held;
static std::vector<Shared<float>::Number>*exchange, *exchange_stats;

static In<int> limits() {
  const In<int> sizes = in<int>(SIZES);
  return {sizes.data + LIMITS, sizes.size - LIMITS};
}

static void partials(int worker) {
  paged_partials(
      unit, kv_head, worker, in<u32>(QUERIES), in<u32>(KEYS), in<float>(KEY_SCALES),
      in<u32>(VALUES), in<float>(VALUE_SCALES), in<u32>(PLACES), in<int>(UNITS), in<int>(ORDER),
      in<int>(LAST_SEEN), in<int>(FIRST_KEYS), limits(), weighted->out(), stats->out(),
      Shared<int>{held}, Shared<float>{exchange}, Shared<float>{exchange_stats});
}

static void merge(int worker) {
  paged_merge(
      query, worker, weighted->in(), stats->in(), in<int>(FIRST_PARTS), in<int>(PARTS),
      in<float>(SINK_LOGITS), limits(), output->out(), full_output->out());
}

static bool read_arrays(FILE* cases) {
  for (int i = 0; i < ARRAYS; ++i) {
    u64 n_bytes;
    if (std::fread(&n_bytes, 8, 1, cases) != 1) {
      if (i) fail("the file of cases ends too soon", i);
      return false;
    }
    arrays[i] = std::vector<char>(n_bytes);  // of its own size, so that a sanitizer sees its end
    if (std::fread(arrays[i].data(), 1, n_bytes, cases) != n_bytes) fail("too few bytes", i);
  }
  return true;
}

int main(int, char** names) {
  FILE *cases = std::fopen(names[1], "rb"), *results = std::fopen(names[2], "wb");
  while (read_arrays(cases)) {
    const int n_partials = in<int>(SIZES)[N_PARTIALS];
    const int n_queries = in<int>(SIZES)[N_ROWS] * KV_HEADS * GROUP * limits()[TOKENS];
    Output<float> of_values(u64(n_partials) * KV_HEADS * VALUE_DIM);
    Output<float> of_stats(u64(n_partials) * KV_HEADS * 2);
    Output<u16> in_half(QUERY_TYPE ? u64(n_queries) * VALUE_DIM : 0);
    Output<float> in_full(QUERY_TYPE ? 0 : u64(n_queries) * VALUE_DIM);
    weighted = &of_values, stats = &of_stats, output = &in_half, full_output = &in_full;
    for (unit = 0; unit < int(in<int>(UNITS).size) / UNIT_FIELDS; ++unit) {
      for (kv_head = 0; kv_head < KV_HEADS; ++kv_head) {
        std::vector<Shared<int>::Number> own_held(MOST_ENTRIES);
        std::vector<Shared<float>::Number> own_exchange(EXCHANGED * VALUE_DIM);
        std::vector<Shared<float>::Number> own_stats(EXCHANGED * 2);
        held = &own_held, exchange = &own_exchange, exchange_stats = &own_stats;
        run_group(SIMDS * 32, partials);
      }
    }
    std::printf(
        "%llu %llu\n", (unsigned long long)reads.by_groups * 4,
        (unsigned long long)reads.distinct * 4);
    reads = Reads();
    for (query = 0; query < n_queries; ++query) run_group(MERGE_THREADS, merge);
    for (unsigned char once : QUERY_TYPE ? in_half.is_written : in_full.is_written) {
      if (!once) fail("a number of the output is not written");
    }
    const u64 n_bytes = QUERY_TYPE ? in_half.data.size() * 2 : in_full.data.size() * 4;
    const void* data = QUERY_TYPE ? static_cast<void*>(in_half.data.data()) : in_full.data.data();
    std::fwrite(&n_bytes, 8, 1, results);
    std::fwrite(data, 1, n_bytes, results);
  }
  std::fclose(results);
  return 0;
}
