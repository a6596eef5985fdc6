// What the charts draw: a point a second, made of the differences between the daemon's counters.

import { queue } from "./queue.js";

export const SECONDS_SHOWN = 300;

const NOTHING = null; // uPlot leaves a gap there

/** The last minutes. `columns` are arrays of one length, oldest first; `time` in unix seconds. */
export class History {
  constructor() {
    this.last = null;
    this.columns = {
      ...{ time: [], written: [], prompt: [], computed: [], hitShare: [] },
      ...{ firstToken: [], running: [], waiting: [], evictions: [] },
    };
  }

  /** Note how things stand at `time`, which the caller does once a second. */
  sample(time, snapshot) {
    const { counters } = snapshot;
    if (this.last !== null && time > this.last.time) this.add(time, snapshot);
    this.last = { time, counters };
  }

  /** The mean of a column over its newest points that have a value, or null. */
  recent(column, points) {
    const values = this.columns[column].slice(-points).filter((value) => value !== NOTHING);
    return values.length ? values.reduce((sum, value) => sum + value) / values.length : null;
  }

  add(time, snapshot) {
    const { counters } = snapshot;
    const elapsed = time - this.last.time;
    const grown = (name) => growth(this.last.counters[name], counters[name]);
    const firstTokens = grown("first_tokens");
    const prompt = grown("prompt_tokens");
    const cached = Math.min(prompt, grown("cached_tokens"));
    this.push({
      time,
      written: grown("generated_tokens") / elapsed,
      prompt: prompt / elapsed,
      computed: (prompt - cached) / elapsed,
      hitShare: prompt ? cached / prompt : NOTHING,
      evictions: grown("evictions") / elapsed,
      ...queue(snapshot),
      firstToken: firstTokens ? grown("first_token_seconds") / firstTokens : NOTHING,
    });
  }

  push(point) {
    for (const [name, column] of Object.entries(this.columns)) {
      column.push(point[name]);
      if (column.length > SECONDS_SHOWN) column.shift();
    }
  }
}

/** A counter that is lower than before was begun anew: the daemon has restarted. */
function growth(before, now) {
  return now < before ? now : now - before;
}
