// The page: watches the daemon, and hands what it sees to the parts.

import { Playground } from "./chat/playground.js";
import { Connect } from "./connect/connect.js";
import { Daemon } from "./daemon/panel.js";
import { forgetKey, hasKey } from "./net/api.js";
import { served } from "./net/served.js";
import { Watch } from "./net/watch.js";
import { Charts } from "./overview/charts.js";
import { Memory, Numbers } from "./overview/numbers.js";
import { Clear } from "./parts/clear.js";
import { Component, html, render } from "./parts/html.js";
import { KeyForm } from "./parts/key.js";
import { Requests } from "./requests/requests.js";
import { Activity } from "./state/activity.js";
import { Picture } from "./tree/picture.js";

const TICK_MS = 1000;
const STATUS = {
  connecting: "connecting …",
  live: "live",
  lost: "the daemon does not answer; trying again …",
  refused: "no access",
};

class App extends Component {
  state = {
    ...{ snapshot: null, received: 0, now: 0, status: "connecting", refusal: null },
    ...{ model: null, agents: [] }, // what is served, for whoever may use it
  };
  activity = new Activity();

  componentDidMount() {
    this.tree = new Watch(
      "admin/cache/tree/stream",
      (snapshot) => this.show(snapshot),
      (status, refusal = null) => this.note(status, refusal),
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

  render(_, { snapshot, status, refusal, model, agents }) {
    if (refusal?.status === 401) return this.keyForm(refusal);
    return html`
      <${Header} snapshot=${snapshot} status=${status} model=${model}
                  onForget=${() => this.forget()} />
      <main>
        <div class="watching ${status}">${this.watching(snapshot, refusal)}</div>
        <${Playground} model=${model} />
        <div class="about">
          ${model && html`<${Connect} model=${model} agents=${agents} />`}
          ${snapshot && html`<${Daemon} isLive=${status === "live"} />`}
        </div>
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
    const { now, received, status } = this.state;
    const seconds = (now - received) / 1000;
    return html`
      ${status === "lost" && html`<p class="notice">${pastText(snapshot)}</p>`}
      <section class="overview" aria-label="Right now">
        <${Numbers} snapshot=${snapshot} series=${activity.series} />
        <${Memory} arena=${snapshot.arena} groups=${snapshot.groups} disk=${snapshot.disk} />
      </section>
      <${Picture} snapshot=${snapshot} seconds=${seconds}
                  clear=${(namespace) => this.clearButton(namespace)} />
      <${Requests} live=${activity.live} hidden=${activity.hidden}
                   finished=${activity.finished} />
      <section aria-labelledby="series">
        <h2 id="series">The last 15 minutes</h2>
        <${Charts} series=${activity.series} />
      </section>`;
  }

  /** Without a namespace, of everything. One that is alone is everything. */
  clearButton(namespace) {
    const { disk, namespaces } = this.state.snapshot;
    if (namespace && namespaces.length === 1) return null;
    return html`<${Clear} namespace=${namespace} hasDisk=${disk !== null} />`;
  }

  note(status, refusal) {
    this.setState({ status, refusal });
    if (status === "live" || refusal?.status === 403) this.learn();
  }

  /** Again whenever the daemon is there again: it may serve something else. */
  learn() {
    served().then((what) => this.setState(what), () => {}); // what was known before stays
  }

  show(snapshot) {
    const now = performance.now();
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

  forget() {
    forgetKey();
    this.setState({ snapshot: null });
    this.start();
  }
}

function Header({ snapshot, status, model, onForget }) {
  return html`
    <header class="top">
      <h1><img src="dashboard/icon.svg" alt="" width="28" height="28" />Rootstock</h1>
      <span class="model">${snapshot?.model}</span>
      ${model && html`
        <nav aria-label="Further down"><a href="#connect">Connect a client</a></nav>`}
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
