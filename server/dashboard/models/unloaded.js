// What is seen of a model that is not in memory: how it stands, and a button.

import { html } from "../parts/html.js";
import { canLoad, wordsOf } from "../state/models.js";
import { Progress } from "./progress.js";

export function Unloaded({ model, acts }) {
  const { id } = model;
  const problem = acts.problem(model);
  return html`
    <section class="card unloaded" aria-labelledby="unloaded">
      <h2 id="unloaded">${id} ${canLoad(model) ? "is not in memory" : wordsOf(model)}</h2>
      ${canLoad(model) && html`
        <p class="muted">Load the model, or send it a request, to see its cache.</p>`}
      ${problem && html`<p class="problem">${problem}</p>`}
      <${Progress} model=${model} />
      <button class="primary" disabled=${acts.pending.has(id) || !canLoad(model)}
              onClick=${() => acts.act("load", id)}>Load ${id}</button>
    </section>`;
}
