// One stream of events from the daemon, opened again whenever it breaks.

import { ask, Refused } from "./api.js";
import { events } from "./events.js";

const FIRST_WAIT_MS = 500;
const LONGEST_WAIT_MS = 5000;

/**
 * Passes on every event of the stream at `path`, and reports the state of the connection: "connecting", "live", "lost" (it is
 * tried again), or "refused" with the Refused, after which somebody must start it again.
 */
export class Watch {
  constructor(path, onEvent, onStatus) {
    this.path = path;
    this.onEvent = onEvent;
    this.onStatus = onStatus;
    this.ending = new AbortController();
  }

  start() {
    this.stop();
    this.ending = new AbortController();
    this.run(this.ending.signal);
  }

  stop() {
    this.ending.abort();
  }

  async run(signal) {
    let wait = FIRST_WAIT_MS;
    this.onStatus("connecting");
    while (!signal.aborted) {
      try {
        await this.follow(signal, () => (wait = FIRST_WAIT_MS));
      } catch (error) {
        if (signal.aborted) return;
        if (error instanceof Refused && error.status < 500) {
          this.onStatus("refused", error);
          return;
        }
      }
      if (signal.aborted) return;
      this.onStatus("lost");
      await new Promise((resolve) => setTimeout(resolve, wait));
      wait = Math.min(wait * 1.5, LONGEST_WAIT_MS);
    }
  }

  async follow(signal, onOpen) {
    const stream = await ask(this.path, { signal });
    onOpen();
    this.onStatus("live");
    for await (const data of events(stream)) this.onEvent(JSON.parse(data));
  }
}
