// Attention of queries to the K and V in an arena's blocks, in place: decodes, with drafts too.
//
// One text for Metal, CUDA and a CPU's C++ compiler. metal.h, cuda.h and the proof's host.h define
// what differs: IN, OUT and SHARED (types of pointers), LOCAL (the address space of a thread's own
// variables), FUNCTION, UNROLL, BARRIER, load_words, xor_float, exp2_fast, as_float, as_bits,
// half_to_float and float_to_half. `Kind.defines` has the constants.
//
// There are two passes. `paged_partials`: a thread group attends to one run of blocks for a tile of
// queries of one KV head, and writes for each query the largest score, the sum of weights and the
// weighted sum of values. `paged_merge` makes an output of the partial results of each query.
//
// A vector of K or V is read by LANES threads, each up to 16 bytes at a time, neighbours next to
// each other. A SIMD group (a warp) reads 32 / LANES vectors at a time, BATCH times, before it uses
// the first. Each group of lanes has a softmax of its own, so that the loop has no barrier. K and V
// are read once for the TILE queries of a SIMD group, which are grouped heads, the tokens of a draft
// and the rows of a shared prefix.

#define HIDDEN (-1e30f)  // a score that no key has; finite, so that differences are numbers
#define LOG2E 1.44269504089f
#define WARP 32

#define UNIT_FIELDS 8
enum UnitField { ROW, ROWS, ENTRY, ENTRIES, BASE, FIRST_QUERY, QUERY_SIMDS };
enum Limit { TABLE_WIDTH, VALUES_AT, TOKENS };

FUNCTION int least(int a, int b) { return a < b ? a : b; }
FUNCTION int most(int a, int b) { return a > b ? a : b; }
FUNCTION float most(float a, float b) { return a > b ? a : b; }
FUNCTION int clip(int x, int low, int high) { return most(low, least(x, high)); }

// The nearest bfloat16; ties to even.
FUNCTION u16 float_to_bfloat(float x) {
  const u32 bits = as_bits(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return u16((bits >> 16) | 64u);  // NaN stays NaN
  return u16((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// How the numbers of a word are stored: the values of `Stored` in kind.py.
template <int TYPE> struct Stored;

template <> struct Stored<0> {
  enum { per_word = 1, is_coded = 0 };
  static FUNCTION void unpack(u32 word, LOCAL float* out) { out[0] = as_float(word); }
};

template <> struct Stored<1> {
  enum { per_word = 2, is_coded = 0 };
  static FUNCTION void unpack(u32 word, LOCAL float* out) {
    out[0] = half_to_float(word & 0xffffu);
    out[1] = half_to_float(word >> 16);
  }
};

template <> struct Stored<2> {
  enum { per_word = 2, is_coded = 0 };
  static FUNCTION void unpack(u32 word, LOCAL float* out) {
    out[0] = as_float(word << 16);
    out[1] = as_float(word & 0xffff0000u);
  }
};

template <> struct Stored<3> {
  enum { per_word = 4, is_coded = 1 };
  static FUNCTION void unpack(u32 word, LOCAL float* out) {
    UNROLL for (int i = 0; i < 4; ++i) out[i] = float(int((word >> (8 * i)) & 255u) - 128);
  }
};

template <> struct Stored<4> {
  enum { per_word = 8, is_coded = 1 };
  static FUNCTION void unpack(u32 word, LOCAL float* out) {
    UNROLL for (int i = 0; i < 8; ++i) out[i] = float(int((word >> (4 * i)) & 15u) - 8);
  }
};

// One lane's part of a vector of DIM numbers, read WORDS words at a time. SCALE_GROUP numbers share
// a scale, where they are codes.
template <int TYPE, int DIM, int WORDS, int SCALE_GROUP> struct Part {
  enum {
    per_load = WORDS * Stored<TYPE>::per_word,
    loads = DIM / (LANES * per_load),
    numbers = loads * per_load,
    words = loads * WORDS,
    row_words = DIM / Stored<TYPE>::per_word,
    scales = Stored<TYPE>::is_coded ? loads : 1,  // an array of none is not C++
    row_scales = DIM / SCALE_GROUP,
  };

  // Which number of the vector the lane's i-th is.
  static FUNCTION int index(int lane, int i) {
    return (i / per_load * LANES + lane) * per_load + i % per_load;
  }

  static FUNCTION void load(
      IN(u32) plane, IN(float) plane_scales, u64 row, int lane, LOCAL u32* to,
      LOCAL float* to_scales) {
    UNROLL for (int i = 0; i < loads; ++i) {
      load_words<WORDS>(plane, row * row_words + (i * LANES + lane) * WORDS, to + i * WORDS);
      if (Stored<TYPE>::is_coded) {
        to_scales[i] = plane_scales[row * row_scales + index(lane, i * per_load) / SCALE_GROUP];
      }
    }
  }

  static FUNCTION void unpack(LOCAL const u32* from, LOCAL const float* scales, LOCAL float* to) {
    UNROLL for (int w = 0; w < words; ++w) {
      Stored<TYPE>::unpack(from[w], to + w * Stored<TYPE>::per_word);
    }
    if (Stored<TYPE>::is_coded) {
      UNROLL for (int i = 0; i < numbers; ++i) to[i] *= scales[i / per_load];
    }
  }
};

typedef Part<KEY_TYPE, KEY_DIM, KEY_WORDS, KEY_SCALE_GROUP> Key;
typedef Part<VALUE_TYPE, VALUE_DIM, VALUE_WORDS, VALUE_SCALE_GROUP> Value;

// A number of the queries.
FUNCTION float number(IN(u32) words, u64 at) {
  float in_word[Stored<QUERY_TYPE>::per_word];
  Stored<QUERY_TYPE>::unpack(words[at / Stored<QUERY_TYPE>::per_word], in_word);
  return in_word[at % Stored<QUERY_TYPE>::per_word];
}

// The sum over a group of lanes.
FUNCTION float sum_lanes(float x) {
  UNROLL for (int offset = LANES / 2; offset > 0; offset /= 2) x += xor_float(x, offset);
  return x;
}

// The softmax of one query over some of its keys.
struct Softmax {
  float peak, total;
  float weighted[Value::numbers];
};

FUNCTION void clear(LOCAL Softmax& one) {
  one.peak = HIDDEN;
  one.total = 0;
  UNROLL for (int e = 0; e < Value::numbers; ++e) one.weighted[e] = 0;
}

// First pass, of `unit` and `kv_head`, by thread `worker` of a group of SIMDS * 32.
//
// `queries`: [rows, KV_HEADS, GROUP, tokens, KEY_DIM]. `places`: [rows, table width], where each
// block is in the planes. `units`: [units, UNIT_FIELDS], see work_units.py. `order`: the row of the
// step that is each row of the list. `last_seen`: [rows, tokens], the last position that each token
// sees. `first_keys`: [rows], the position of the first key of each row's table. `limits`: the table's
// width, the vectors of K before those of V in V's plane, and the tokens of a row.
//
// The partial result of query q of a unit is at BASE + q of `weighted`, [partials, KV_HEADS,
// VALUE_DIM], and of `stats`, [partials, KV_HEADS, 2].
FUNCTION void paged_partials(
    int unit, int kv_head, int worker, IN(u32) queries, IN(u32) keys, IN(float) key_scales,
    IN(u32) values, IN(float) value_scales, IN(u32) places, IN(int) units, IN(int) order,
    IN(int) last_seen, IN(int) first_keys, IN(int) limits, OUT(float) weighted, OUT(float) stats,
    SHARED(int) held, SHARED(float) exchange, SHARED(float) exchange_stats) {
  const int simd = worker / WARP, lane_in_simd = worker % WARP;
  const int lane = lane_in_simd % LANES, sub = lane_in_simd / LANES;

  const int row = units[unit * UNIT_FIELDS + ROW];
  const int n_rows = units[unit * UNIT_FIELDS + ROWS];
  const int entry = units[unit * UNIT_FIELDS + ENTRY];
  const int n_entries = units[unit * UNIT_FIELDS + ENTRIES];
  const int query_simds = units[unit * UNIT_FIELDS + QUERY_SIMDS];
  if (n_rows == 0) return;

  // Some SIMD groups share the unit's queries, the others share its keys.
  const int key_simds = SIMDS / query_simds, key_simd = simd / query_simds;
  const int first = units[unit * UNIT_FIELDS + FIRST_QUERY] + simd % query_simds * TILE;
  const int tokens = limits[TOKENS], of_row = GROUP * tokens, n_queries = n_rows * of_row;

  // The table of any of the rows: in these entries they are equal.
  const int table_row = order[row];
  for (int i = worker; i < n_entries; i += SIMDS * WARP) {
    held[i] = int(places[u64(table_row) * limits[TABLE_WIDTH] + entry + i]);
  }
  BARRIER;

  float query[TILE][Key::numbers];
  int first_seen[TILE], stop_seen[TILE];  // the keys that each query sees, counted in the unit
  Softmax found[TILE];
  int start = n_entries * BLOCK, stop = 0;
  const int before = first_keys[table_row] + entry * BLOCK;  // the position of the unit's first key
  UNROLL for (int t = 0; t < TILE; ++t) {
    const int q = first + t, own = q % of_row;
    clear(found[t]);
    first_seen[t] = 0;
    stop_seen[t] = 0;
    if (q < n_queries) {
      const int own_row = order[row + q / of_row];
      const int last = last_seen[own_row * tokens + own % tokens];
      first_seen[t] = WINDOW ? clip(last - WINDOW + 1 - before, 0, n_entries * BLOCK) : 0;
      stop_seen[t] = clip(last + 1 - before, 0, n_entries * BLOCK);
      start = least(start, first_seen[t]);
      stop = most(stop, stop_seen[t]);
      const u64 at = (u64(own_row * KV_HEADS + kv_head) * of_row + own) * KEY_DIM;
      UNROLL for (int e = 0; e < Key::numbers; ++e) {
        query[t][e] = number(queries, at + Key::index(lane, e)) * float(SCALE);
      }
    } else {
      UNROLL for (int e = 0; e < Key::numbers; ++e) query[t][e] = 0;
    }
  }

  const int side_by_side = WARP / LANES * BATCH, stride = key_simds * side_by_side;
  for (int from = start / BATCH * BATCH + key_simd * side_by_side; from < stop; from += stride) {
    u32 key_words[BATCH][Key::words], value_words[BATCH][Value::words];
    float of_keys[BATCH][Key::scales], of_values[BATCH][Value::scales];
    // All reads are begun before any is used. A key outside what these queries see is not read: the
    // nearest one within stands in for it, and has no weight.
    UNROLL for (int b = 0; b < BATCH; ++b) {
      const int key = clip(from + sub * BATCH + b, start, stop - 1);
      const u64 at = (u64(held[key / BLOCK]) * KV_HEADS + kv_head) * BLOCK + key % BLOCK;
      Key::load(keys, key_scales, at, lane, key_words[b], of_keys[b]);
      Value::load(values, value_scales, at + limits[VALUES_AT], lane, value_words[b], of_values[b]);
    }
    float scores[TILE][BATCH];
    UNROLL for (int b = 0; b < BATCH; ++b) {
      float key_numbers[Key::numbers];
      Key::unpack(key_words[b], of_keys[b], key_numbers);
      const int key = from + sub * BATCH + b;
      UNROLL for (int t = 0; t < TILE; ++t) {
        float product = 0;
        UNROLL for (int e = 0; e < Key::numbers; ++e) product += query[t][e] * key_numbers[e];
        product = sum_lanes(product);
        const bool is_seen = key >= first_seen[t] && key < stop_seen[t];
        scores[t][b] = is_seen ? product * LOG2E : HIDDEN;
      }
    }
    UNROLL for (int t = 0; t < TILE; ++t) {
      float peak = found[t].peak;
      UNROLL for (int b = 0; b < BATCH; ++b) peak = most(peak, scores[t][b]);
      const float kept = exp2_fast(found[t].peak - peak);
      found[t].peak = peak;
      found[t].total *= kept;
      UNROLL for (int e = 0; e < Value::numbers; ++e) found[t].weighted[e] *= kept;
      UNROLL for (int b = 0; b < BATCH; ++b) {
        // While a query has seen no key, its peak is HIDDEN and hidden keys have weight. They lose it
        // with the first key that is seen, here or where partial results are merged.
        scores[t][b] = exp2_fast(scores[t][b] - peak);
        found[t].total += scores[t][b];
      }
    }
    UNROLL for (int b = 0; b < BATCH; ++b) {
      float value_numbers[Value::numbers];
      Value::unpack(value_words[b], of_values[b], value_numbers);
      UNROLL for (int t = 0; t < TILE; ++t) {
        UNROLL for (int e = 0; e < Value::numbers; ++e) {
          found[t].weighted[e] += scores[t][b] * value_numbers[e];
        }
      }
    }
  }

  // The groups of lanes of a SIMD group have seen different keys.
  UNROLL for (int offset = LANES; offset < WARP; offset *= 2) {
    UNROLL for (int t = 0; t < TILE; ++t) {
      const float other_peak = xor_float(found[t].peak, offset);
      const float peak = most(found[t].peak, other_peak);
      const float kept = exp2_fast(found[t].peak - peak);
      found[t].peak = peak;
      found[t].total *= kept;
      found[t].total += xor_float(found[t].total, offset);
      UNROLL for (int e = 0; e < Value::numbers; ++e) {
        found[t].weighted[e] *= kept;
        found[t].weighted[e] += xor_float(found[t].weighted[e], offset);
      }
    }
  }

  // The SIMD groups that share the keys have, too: half of them hand over what they have found.
  for (int step = key_simds / 2; step > 0; step /= 2) {
    const bool gives = key_simd >= step && key_simd < 2 * step, takes = key_simd < step;
    const int slot = (gives ? simd - step * query_simds : simd) * TILE;
    if (gives && sub == 0) {
      UNROLL for (int t = 0; t < TILE; ++t) {
        if (lane == 0) {
          exchange_stats[(slot + t) * 2] = found[t].peak;
          exchange_stats[(slot + t) * 2 + 1] = found[t].total;
        }
        UNROLL for (int e = 0; e < Value::numbers; ++e) {
          exchange[(slot + t) * VALUE_DIM + Value::index(lane, e)] = found[t].weighted[e];
        }
      }
    }
    BARRIER;
    if (takes) {
      UNROLL for (int t = 0; t < TILE; ++t) {
        const float other_peak = exchange_stats[(slot + t) * 2];
        const float peak = most(found[t].peak, other_peak);
        const float kept = exp2_fast(found[t].peak - peak), added = exp2_fast(other_peak - peak);
        found[t].peak = peak;
        found[t].total = found[t].total * kept + exchange_stats[(slot + t) * 2 + 1] * added;
        UNROLL for (int e = 0; e < Value::numbers; ++e) {
          const float other = exchange[(slot + t) * VALUE_DIM + Value::index(lane, e)];
          found[t].weighted[e] = found[t].weighted[e] * kept + other * added;
        }
      }
    }
    BARRIER;
  }

  if (key_simd == 0 && sub == 0) {
    UNROLL for (int t = 0; t < TILE; ++t) {
      const int q = first + t;
      if (q < n_queries) {
        const u64 to = u64(units[unit * UNIT_FIELDS + BASE] + q) * KV_HEADS + kv_head;
        if (lane == 0) {
          stats[to * 2] = found[t].peak;
          stats[to * 2 + 1] = found[t].total;
        }
        UNROLL for (int e = 0; e < Value::numbers; ++e) {
          weighted[to * VALUE_DIM + Value::index(lane, e)] = found[t].weighted[e];
        }
      }
    }
  }
}

// Second pass, of one query of the output, [rows, KV_HEADS, GROUP, tokens, VALUE_DIM]: thread
// `worker` of MERGE_THREADS computes every MERGE_THREADS-th number.
//
// The partial results of a row are `parts[i]` from `first_parts[row]` to below `first_parts[row +
// 1]`: where the one of the row's first query is. `sinks`: [KV_HEADS * GROUP], a score of each head
// that adds to the sum of weights. `output` and `full_output` are one array, in two types.
FUNCTION void paged_merge(
    int query, int worker, IN(float) weighted, IN(float) stats, IN(int) first_parts, IN(int) parts,
    IN(float) sinks, IN(int) limits, OUT(u16) output, OUT(float) full_output) {
  const int tokens = limits[TOKENS], of_row = GROUP * tokens;
  const int own = query % of_row, kv_head = query / of_row % KV_HEADS;
  const int row = query / (of_row * KV_HEADS);
  const int begin = first_parts[row], end = first_parts[row + 1];
  float peak = HIDDEN, total = 0;
#if SINKS
  const float sink = sinks[kv_head * GROUP + own / tokens] * LOG2E;
  peak = sink;
#endif
  for (int i = begin; i < end; ++i) {
    peak = most(peak, stats[(u64(parts[i] + own) * KV_HEADS + kv_head) * 2]);
  }
#if SINKS
  total = exp2_fast(sink - peak);
#endif
  for (int i = begin; i < end; ++i) {
    const u64 at = u64(parts[i] + own) * KV_HEADS + kv_head;
    total += stats[at * 2 + 1] * exp2_fast(stats[at * 2] - peak);
  }
  const float share = total > 0 ? 1 / total : 0.0f;  // a row of padding has no keys
  for (int d = worker; d < VALUE_DIM; d += MERGE_THREADS) {
    float sum = 0;
    for (int i = begin; i < end; ++i) {
      const u64 at = u64(parts[i] + own) * KV_HEADS + kv_head;
      sum += weighted[at * VALUE_DIM + d] * exp2_fast(stats[at * 2] - peak);
    }
    const u64 to = u64(query) * VALUE_DIM + d;
    if (QUERY_TYPE == 0) {
      full_output[to] = sum * share;
    } else {
      output[to] = QUERY_TYPE == 1 ? float_to_half(sum * share) : float_to_bfloat(sum * share);
    }
  }
}
