// A button and the dialog that says what is cleared.

import { ask, reason } from "../net/api.js";
import { count } from "./format.js";
import { Component, html } from "./html.js";

/** Clears the namespace of `model`; without one, all of them. Tool answers and stored responses have no namespace. */
export class Clear extends Component {
  state = { chosen: new Set(), remembered: null, problem: null };

  render({ namespace, hasDisk }, { chosen, remembered, problem }) {
    const label = namespace ? "Clear this namespace" : "Clear the cache";
    return html`
      <button class="quiet" onClick=${() => this.open()}>${label} …</button>
      <dialog class="clear" aria-label=${label} ref=${(dialog) => (this.dialog = dialog)}
              onKeyDown=${(event) => event.stopPropagation()}>
        <form onSubmit=${(event) => this.clear(event)}>
          <h2>${namespace ? `Clear “${namespace.name}”` : label}</h2>
          <p class="muted">What running requests use stays with them.</p>
          ${this.choice("memory", "KV in memory", "prompts that begin like it are computed again")}
          ${hasDisk && this.choice("disk", "KV on disk", "it is not found after a restart either")}
          ${!namespace && this.choice("replays", "Answers with tool calls", replays(remembered))}
          ${!namespace && this.choice("responses", "Stored responses", responses(remembered))}
          ${problem && html`<p class="problem" role="alert">${problem}</p>`}
          <footer class="row">
            <button type="button" onClick=${() => this.dialog.close()}>Cancel</button>
            <button class="primary danger" disabled=${chosen.size === 0}>Clear</button>
          </footer>
        </form>
      </dialog>`;
  }

  choice(name, label, note) {
    const { chosen } = this.state;
    const flip = () => this.setState({ chosen: new Set([...chosen].filter((other) => other !== name)
      .concat(chosen.has(name) ? [] : [name])) });
    return html`
      <label class="check">
        <input type="checkbox" checked=${chosen.has(name)} onChange=${flip} />
        <span>${label}<small>${note}</small></span>
      </label>`;
  }

  async open() {
    const tiers = this.props.hasDisk ? ["memory", "disk"] : ["memory"];
    this.setState({ chosen: new Set(tiers), remembered: null, problem: null });
    this.dialog.showModal();
    await this.attempt(async () => {
      const query = new URLSearchParams({ model: this.props.model });
      const { remembered } = await (await ask(`admin/daemon?${query}`)).json();
      this.setState({ remembered });
    });
  }

  async clear(event) {
    event.preventDefault();
    await this.attempt(async () => {
      await ask(`admin/cache/clear?${this.query()}`, { method: "POST" });
      this.dialog?.close();
    });
  }

  query() {
    const named = (names) => names.filter((name) => this.state.chosen.has(name));
    const tiers = named(["memory", "disk"]);
    const what = [...(tiers.length ? ["kv"] : []), ...named(["replays", "responses"])];
    const { model, namespace } = this.props;
    return new URLSearchParams({
      model,
      what,
      ...(tiers.length && { tiers }),
      ...(namespace && { namespace: namespace.id }),
    });
  }

  async attempt(act) {
    try {
      await act();
    } catch (error) {
      this.setState({ problem: reason(error) });
    }
  }
}

function replays(remembered) {
  return `${remembered ? count(remembered.replays, "answer") : "answers"} kept as tokens, so that the next turn finds them in the cache`;
}

function responses(remembered) {
  return `${remembered ? count(remembered.responses, "conversation") : "conversations"} of /v1/responses`;
}
