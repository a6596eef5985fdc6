// The page: watches the daemon, and hands what it sees to the parts.

import { Playground } from "./chat/playground.js";
import { ask, forgetKey, hasKey, reason } from "./net/api.js";
import { Watch } from "./net/watch.js";
import { Charts } from "./overview/charts.js";
import { Memory, Numbers } from "./overview/numbers.js";
import { Confirm } from "./parts/confirm.js";
import { Component, html, render } from "./parts/html.js";
import { KeyForm } from "./parts/key.js";
import { Requests } from "./requests/requests.js";
import { Activity } from "./state/activity.js";
import { Adopted } from "./state/adopted.js";
import { Picture } from "./tree/picture.js";

const TICK_MS = 1000;
const TIERS = [
  ["Clear memory?", "memory"],
  ["Clear the disk?", "disk"],
  ["Clear both?", "memory,disk"],
];
const STATUS = {
  connecting: "connecting …",
  live: "live",
  lost: "the daemon does not answer; trying again …",
  refused: "no access",
};

class App extends Component {
  state = { snapshot: null, received: 0, now: 0, status: "connecting", refusal: null, problem: null };
  activity = new Activity();
  adopted = new Adopted();

  componentDidMount() {
    this.tree = new Watch(
      "admin/cache/tree/stream",
      (snapshot) => this.show(snapshot),
      (status, refusal = null) => this.setState({ status, refusal }),
    );
    this.requests = new Watch(
      "admin/activity/stream",
      (event) => this.activity.note(event),
      (status) => status === "live" && this.activity.begin(),
    );
    this.start();
    this.timer = setInterval(() => this.tick(), TICK_MS);
    document.addEventListener("visibilitychange", () => this.onVisibility());
  }

  render(_, { snapshot, status, refusal }) {
    if (refusal?.status === 401) return this.keyForm(refusal);
    return html`
      <${Header} snapshot=${snapshot} status=${status} onForget=${() => this.forget()} />
      <main>
        <div class="watching">${this.watching(snapshot, refusal)}</div>
        <${Playground} />
      </main>`;
  }

  keyForm(refusal) {
    const problem = hasKey() ? refusal.message : null;
    return html`<${KeyForm} problem=${problem} onKey=${() => this.start()} />`;
  }

  watching(snapshot, refusal) {
    if (refusal) return html`<p class="notice" role="alert">${refusalText(refusal)}</p>`;
    if (!snapshot) return html`<p class="notice">Waiting for the first picture …</p>`;
    const { activity } = this;
    const { now, received, problem } = this.state;
    const seconds = (now - received) / 1000;
    return html`
      <section class="overview" aria-label="Right now">
        <${Numbers} snapshot=${snapshot} series=${activity.series} />
        <${Memory} arena=${snapshot.arena} groups=${snapshot.groups} disk=${snapshot.disk} />
      </section>
      ${problem && html`<p class="problem" role="alert">${problem}</p>`}
      <${Picture} snapshot=${snapshot} lit=${this.adopted.lit(now)} seconds=${seconds}
                  clear=${(namespace) => this.clearButton(namespace)} />
      <${Requests} live=${activity.live} hidden=${activity.hidden}
                   finished=${activity.finished} />
      <section aria-labelledby="series">
        <h2 id="series">The last 15 minutes</h2>
        <${Charts} series=${activity.series} />
      </section>`;
  }

  /** Without a namespace, of everything. */
  clearButton(namespace) {
    const what = namespace ? `“${namespace.name}”` : "the cache";
    const choices = this.state.snapshot.disk ? TIERS : [[`Really clear ${what}?`, "memory"]];
    const answers = choices.map(([text, tiers]) => [text, () => this.clear(namespace, tiers)]);
    return html`
      <${Confirm} label=${namespace ? "Clear this namespace" : "Clear the cache"}
                  answers=${answers} />`;
  }

  show(snapshot) {
    const now = performance.now();
    this.adopted.note(snapshot, now);
    this.setState({ snapshot, received: now, now });
  }

  tick() {
    this.setState({ now: performance.now() });
  }

  start() {
    this.tree.start();
    this.requests.start();
  }

  /** Nobody watches a hidden page, and a watcher costs the engine a little. */
  onVisibility() {
    if (!document.hidden) return this.start();
    this.tree.stop();
    this.requests.stop();
    this.setState({ status: "connecting" });
  }

  async clear(namespace, tiers) {
    const query = new URLSearchParams({ tiers, ...(namespace && { namespace: namespace.id }) });
    try {
      await ask(`admin/cache/clear?${query}`, { method: "POST" });
      this.setState({ problem: null });
    } catch (error) {
      this.setState({ problem: reason(error) });
    }
  }

  forget() {
    forgetKey();
    this.setState({ snapshot: null });
    this.start();
  }
}

function Header({ snapshot, status, onForget }) {
  return html`
    <header class="top">
      <h1><img src="dashboard/icon.svg" alt="" width="28" height="28" />Rootstock</h1>
      <span class="model">${snapshot?.model}</span>
      <span class="status ${status}" role="status">${STATUS[status]}</span>
      ${hasKey() && html`<button class="quiet" onClick=${onForget}>Forget the key</button>`}
    </header>`;
}

function refusalText(refusal) {
  return refusal.status === 403
    ? `The picture of the cache is not for this key: ${refusal.message} The playground may still work.`
    : refusal.message;
}

render(html`<${App} />`, document.getElementById("app"));
