// The requests and the series of the last minutes, collected from the daemon's events.

export const SECONDS_SHOWN = 900;
const KEPT_REQUESTS = 300;
const COLUMNS = {
  time: "time",
  written: "generated_tokens_per_second",
  prompt: "prompt_tokens_per_second",
  computed: "computed_tokens_per_second",
  hitShare: "hit_share",
  firstToken: "first_token_seconds",
  running: "running",
  waiting: "waiting",
  evictions: "evicted_blocks_per_second",
};

/** `live`, `finished` (the latest first) and `series` are other objects when they have changed. */
export class Activity {
  constructor() {
    this.begin();
  }

  /** The stream has begun: its first event has all. */
  begin() {
    this.live = [];
    this.hidden = 0;
    this.finished = [];
    this.series = Object.fromEntries(Object.keys(COLUMNS).map((name) => [name, []]));
  }

  note({ requests, hidden_requests, finished, points }) {
    if (requests.length || this.live.length) this.live = requests;
    this.hidden = hidden_requests;
    if (finished.length) {
      this.finished = [...finished.reverse(), ...this.finished].slice(0, KEPT_REQUESTS);
    }
    if (points.length) this.add(points);
  }

  /** uPlot leaves a gap where a value is null. */
  add(points) {
    const from = points.at(-1).time - SECONDS_SHOWN;
    const old = this.series.time.findIndex((time) => time >= from);
    const kept = (column) => (old < 0 ? [] : column.slice(old));
    this.series = Object.fromEntries(Object.entries(COLUMNS).map(([name, field]) => [
      name, [...kept(this.series[name]), ...points.map((point) => point[field])],
    ]));
  }
}
