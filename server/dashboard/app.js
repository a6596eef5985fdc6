// The page: watches the daemon, and passes its state to the parts.

import { Playground } from "./chat/playground.js";
import { questionsFor } from "./chat/questions.js";
import { Connect } from "./connect/connect.js";
import { Daemon } from "./daemon/panel.js";
import { Alarms } from "./models/alarms.js";
import { Choice } from "./models/choice.js";
import { Models } from "./models/panel.js";
import { Unloaded } from "./models/unloaded.js";
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
import { Acts, modelOf } from "./state/models.js";
import { Picture } from "./tree/picture.js";

const TICK_MS = 1000;
const NO_LAUNCH = { command: "rootstock", agents: [] };
const STATUS = {
  connecting: "connecting …",
  live: "live",
  lost: "the daemon does not answer; trying again …",
  refused: "no access",
  chatOnly: "signed in with a user key",
};

class App extends Component {
  state = {
    ...{ status: "connecting", refusal: null, now: 0 }, // of the daemon
    ...{ models: null, budget: null, memory: null }, // null with a user's key
    ...{ snapshot: null, received: 0, isPast: false }, // of the model's cache
    ...{ chosen: null, served: [], launch: NO_LAUNCH }, // what is served, also with a user's key
  };
  activity = new Activity();
  acts = new Acts(() => this.forceUpdate());
  tree = null; // the watch of the chosen model's cache, while there is one
  isBroken = false; // that watch has ended by itself, and no event has said yet whether the model has, too

  componentDidMount() {
    this.requests = new Watch(
      "admin/activity/stream",
      (event) => this.hear(event),
      (status, refusal = null) => this.note(status, refusal),
    );
    this.start();
    this.timer = setInterval(() => this.tick(), TICK_MS);
    document.addEventListener("visibilitychange", () => this.onVisibility());
  }

  render(_, { status, refusal, models, launch, served }) {
    if (refusal?.status === 401) {
      return html`<${KeyForm} isWrong=${hasKey()} onKey=${() => this.start()} />`;
    }
    const isChatOnly = refusal?.status === 403;
    const chosen = this.chosen();
    const model = served.find(({ id }) => id === chosen) ?? null;
    return html`
      <${Header} status=${isChatOnly ? "chatOnly" : status} hasModel=${model !== null}
                 onForget=${() => this.forget()}>
        <${Choice} names=${this.names()} chosen=${chosen} onChoose=${(name) => this.choose(name)} />
      <//>
      <main class=${isChatOnly ? "chat-only" : ""}>
        <div class="watching ${status}">${this.watching()}</div>
        <div class="side">
          <${Playground} model=${model} />
          ${model && html`<${Connect} model=${model} named=${this.named()} launch=${launch} />`}
          ${models && html`
            <${Daemon} key=${chosen} model=${this.model().id} isLive=${status === "live"} />`}
        </div>
        ${models && html`
          <section class="series ${status}" aria-labelledby="series">
            <h2 id="series">The last 15 minutes${this.whose()}</h2>
            <${Charts} series=${this.activity.series} />
          </section>`}
      </main>`;
  }

  watching() {
    const { activity, acts } = this;
    const { refusal, models, budget, memory } = this.state;
    if (refusal) return html`<p class="notice" role="alert">${refusalText(refusal)}</p>`;
    if (!models) return html`<p class="notice">Waiting for the daemon …</p>`;
    return html`
      <${Alarms} models=${models} memory=${memory} />
      <${Models} models=${models} budget=${budget} acts=${acts} />
      ${this.cache()}
      <${Requests} live=${activity.live} hidden=${activity.hidden}
                   finished=${activity.finished} ofSeveral=${this.names().length > 1} />`;
  }

  /** The picture of the chosen model's cache, or the reason why there is none. */
  cache() {
    const { snapshot, status, now, received } = this.state;
    const model = this.model();
    const [question] = questionsFor(this.state.served.find(({ id }) => id === this.chosen()));
    if (model.state !== "ready") return html`<${Unloaded} model=${model} acts=${this.acts} />`;
    if (snapshot?.model !== model.id) return html`<p class="notice">Waiting for the first picture …</p>`;
    const isPast = this.state.isPast || status === "lost";
    return html`
      ${isPast && html`<p class="notice">${pastText(snapshot, status)}</p>`}
      <section class="overview ${isPast ? "past" : ""}" aria-label="Right now">
        <${Numbers} snapshot=${snapshot} series=${this.activity.series} whose=${this.whose()} />
        <${Memory} arena=${snapshot.arena} groups=${snapshot.groups} disk=${snapshot.disk} />
      </section>
      <${Picture} key=${model.id} snapshot=${snapshot} isPast=${isPast} seconds=${(now - received) / 1000}
                  question=${question} named=${this.named()} clear=${(namespace) => this.clearButton(namespace)} />`;
  }

  /** A button that clears the namespace; without one, all of them. None for a namespace that is alone. */
  clearButton(namespace) {
    const { disk, model, namespaces } = this.state.snapshot;
    if (namespace && namespaces.length === 1) return null;
    return html`<${Clear} model=${model} namespace=${namespace} hasDisk=${disk !== null} />`;
  }

  /** What may be chosen: models and adapters, by the first of the names that mean the same. */
  names() {
    const { models, served } = this.state;
    const first = served.filter(({ id, root }) => id === root);
    return (first.length ? first : models ?? []).map(({ id }) => id);
  }

  /** The name that the page is about: the first, until somebody chooses. */
  chosen() {
    const [first, ...others] = this.names();
    return others.includes(this.state.chosen) ? this.state.chosen : first;
  }

  /** The model of that name: an adapter's is the one that it changes. */
  model() {
    const chosen = this.chosen();
    const parent = this.state.served.find(({ id }) => id === chosen)?.parent;
    return modelOf(this.state.models, parent ?? chosen);
  }

  /** What a line must say to mean the chosen name, where there are several. */
  named() {
    return this.names().length > 1 ? this.chosen() : undefined;
  }

  whose() {
    return this.state.models.length > 1 ? ", all models" : "";
  }

  note(status, refusal) {
    this.setState({ status, refusal });
    if (status === "live") this.activity.begin();
    if (status === "live" || refusal?.status === 403) this.learn();
  }

  /** Again whenever the daemon is there again, or a model is: what is served may have changed. */
  learn() {
    served().then((what) => this.setState(what), () => {}); // what was known before stays
  }

  hear(event) {
    const { models, budget_bytes: budget, memory_guard: memory } = event.models;
    if (this.state.models && states(models) !== states(this.state.models)) this.learn();
    this.activity.note(event);
    this.setState({ models, budget, memory }, () => this.follow());
  }

  choose(chosen) {
    this.isBroken = false;
    this.setState({ chosen, isPast: false }, () => this.follow());
  }

  /** Watch the chosen model's cache while the model is in memory; without it there is no picture. */
  follow() {
    if (!this.state.models) return;
    const { id, state } = this.model();
    if (state !== "ready") {
      this.leave();
      this.isBroken = false;
      this.setState({ snapshot: null, isPast: false });
      return;
    }
    if (this.followed === id) return;
    this.leave();
    this.followed = id;
    this.setState({ isPast: this.isBroken });
    this.isBroken = false;
    this.tree = new Watch(
      `admin/cache/tree/stream?${new URLSearchParams({ model: id })}`,
      (snapshot) => this.show(snapshot),
      (status) => this.noteTree(status),
    );
    this.tree.start();
  }

  leave() {
    this.tree?.stop();
    this.tree = this.followed = null;
  }

  /** The next event says whether the model was unloaded, or is ready and does not answer. */
  noteTree(status) {
    if (status !== "lost" && status !== "refused") return;
    this.leave();
    this.isBroken = true;
  }

  show(snapshot) {
    const now = performance.now();
    this.setState({ snapshot, received: now, now, isPast: false });
  }

  tick() {
    this.setState({ now: performance.now() });
  }

  start() {
    this.requests.start();
  }

  /** Nobody watches a hidden page, and a watcher costs the engine a little. */
  onVisibility() {
    if (!document.hidden) return this.start();
    this.requests.stop();
    this.leave();
    this.setState({ status: "connecting" });
  }

  forget() {
    forgetKey();
    this.leave();
    this.setState({ models: null, snapshot: null });
    this.start();
  }
}

function Header({ status, hasModel, onForget, children }) {
  return html`
    <header class="top">
      <h1><img src="dashboard/icon.svg" alt="" width="28" height="28" />Rootstock</h1>
      ${children}
      ${hasModel && html`
        <nav aria-label="On this page">
          <a class="narrow" href="#playground">Chat</a>
          <a href="#connect">Connect a client</a>
        </nav>`}
      <span class="status ${status}" role="status">${STATUS[status]}</span>
      ${hasKey() && html`<button class="quiet" onClick=${onForget}>Forget the key</button>`}
    </header>`;
}

/** To be compared: other text, where a model has come, has gone, or is in another state. */
function states(models) {
  return models.map(({ id, state }) => `${id} ${state}`).join("\n");
}

function pastText({ time }, status) {
  const seen = new Date(time * 1000).toLocaleTimeString();
  const silent = status === "lost" ? "daemon" : "model";
  return `The ${silent} does not answer. Below is its state at ${seen}.`;
}

function refusalText(refusal) {
  return refusal.status === 403
    ? "You are signed in with a user key: you can chat. The view of the cache needs an admin key."
    : refusal.message;
}

render(html`<${App} />`, document.getElementById("app"));
