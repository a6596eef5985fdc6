// The page: watches the daemon, and hands what it sees to the parts.

import { Playground } from "./chat/playground.js";
import { ask, forgetKey, hasKey, reason } from "./net/api.js";
import { Watch } from "./net/watch.js";
import { Charts } from "./overview/charts.js";
import { Memory, Numbers } from "./overview/numbers.js";
import { Confirm } from "./parts/confirm.js";
import { Component, html, render } from "./parts/html.js";
import { KeyForm } from "./parts/key.js";
import { History } from "./state/history.js";
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
  history = new History();

  componentDidMount() {
    this.watch = new Watch(
      (snapshot) => this.show(snapshot),
      (status, refusal = null) => this.setState({ status, refusal }),
    );
    this.watch.start();
    this.timer = setInterval(() => this.tick(), TICK_MS);
    document.addEventListener("visibilitychange", () => this.onVisibility());
  }

  render(_, { snapshot, status, refusal }) {
    if (refusal?.status === 401) return this.keyForm(refusal);
    return html`
      <${Header} snapshot=${snapshot} status=${status} onForget=${() => this.forget()} />
      <main>
        <div class="watching ${status}">${this.watching(snapshot, refusal)}</div>
        <${Playground} />
      </main>`;
  }

  keyForm(refusal) {
    const problem = hasKey() ? refusal.message : null;
    return html`<${KeyForm} problem=${problem} onKey=${() => this.watch.start()} />`;
  }

  watching(snapshot, refusal) {
    if (refusal) return html`<p class="notice" role="alert">${refusalText(refusal)}</p>`;
    if (!snapshot) return html`<p class="notice">Waiting for the first picture …</p>`;
    const { now, received, problem, status } = this.state;
    const seconds = (now - received) / 1000;
    return html`
      ${status === "lost" && html`<p class="notice">${pastText(snapshot)}</p>`}
      <section class="overview" aria-label="Right now">
        <${Numbers} snapshot=${snapshot} history=${this.history} />
        <${Memory} arena=${snapshot.arena} groups=${snapshot.groups} disk=${snapshot.disk} />
      </section>
      ${problem && html`<p class="problem" role="alert">${problem}</p>`}
      <${Picture} snapshot=${snapshot} seconds=${seconds}
                  clear=${(namespace) => this.clearButton(namespace)} />
      <section aria-labelledby="history">
        <h2 id="history">The last minutes</h2>
        <${Charts} history=${this.history} time=${snapshot.time + seconds} />
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
    this.setState({ snapshot, received: now, now });
  }

  tick() {
    const now = performance.now();
    const { snapshot, received, status } = this.state;
    if (snapshot && status === "live") {
      this.history.sample(snapshot.time + (now - received) / 1000, snapshot);
    }
    this.setState({ now });
  }

  /** Nobody watches a hidden page, and a watcher costs the engine a little. */
  onVisibility() {
    if (!document.hidden) return this.watch.start();
    this.watch.stop();
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
    this.watch.start();
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

function pastText({ time }) {
  const seen = new Date(time * 1000).toLocaleTimeString();
  return `The daemon does not answer. Below is how things stood at ${seen}.`;
}

function refusalText(refusal) {
  return refusal.status === 403
    ? `The picture of the cache is not for this key: ${refusal.message} The playground may still work.`
    : refusal.message;
}

render(html`<${App} />`, document.getElementById("app"));
