// Which bars light up: those that were there already, and that a request has now taken up again.

const LIT_MS = 2000;
const SLACK_SECONDS = 0.12; // snapshots round ages to tenths

/** Compares each snapshot with the one before. */
export class Adopted {
  constructor() {
    this.before = new Map();
    this.requests = new Set();
    this.until = new Map();
    this.time = 0;
  }

  /** Note a snapshot that came at `now`, in milliseconds. */
  note(snapshot, now) {
    const entered = enteredBy(snapshot, this.requests);
    for (const node of snapshot.nodes) {
      const known = this.before.get(node.id);
      const elapsed = snapshot.time - this.time;
      if (known && (entered.has(node.id) || wasTakenUp(known, node, elapsed))) {
        this.until.set(node.id, now + LIT_MS);
      }
    }
    this.requests = new Set(snapshot.requests.map((request) => request.id));
    this.before = new Map(snapshot.nodes.map((node) => [node.id, node]));
    this.time = snapshot.time;
    for (const [id, until] of this.until) {
      if (until <= now || !this.before.has(id)) this.until.delete(id);
    }
  }

  /** The ids of the nodes that are lit at `now`. */
  lit(now) {
    return new Set([...this.until].filter(([, until]) => until > now).map(([id]) => id));
  }
}

/** The nodes on the paths of requests that are new. */
function enteredBy(snapshot, known) {
  const parents = new Map(snapshot.nodes.map((node) => [node.id, node.parent]));
  const entered = new Set();
  for (const request of snapshot.requests) {
    let id = known.has(request.id) ? null : request.node;
    for (; id != null && !entered.has(id); id = parents.get(id)) entered.add(id);
  }
  return entered;
}

/** One more holds it; or somebody has held it and gone again between the snapshots. */
function wasTakenUp(before, node, elapsed) {
  if (node.holders > before.holders) return true;
  const expected = before.idle_seconds + elapsed;
  return before.holders === 0 && node.idle_seconds < expected - SLACK_SECONDS;
}
