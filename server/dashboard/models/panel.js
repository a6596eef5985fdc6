// The models: which are in memory, what they take of it, and buttons that load and unload them.

import { Confirm } from "../parts/confirm.js";
import { bytes, clock, whole } from "../parts/format.js";
import { html } from "../parts/html.js";
import { Cell, Table } from "../requests/cells.js";
import { canLoad, wordsOf } from "../state/models.js";
import { Budget, part } from "./budget.js";
import { Progress } from "./progress.js";

const HEADS = [
  ["Model"], ["State"], ["Memory", "number"], ["Requests", "number"],
  [html`<span class="unseen">Load or unload it</span>`, "act"],
];

/** `models` and `budget` as /admin/models has them. One without a budget is a line. */
export function Models({ models, budget, acts }) {
  return html`
    <section class="card models ${models.length > 1 ? "" : "alone"}" aria-labelledby="models">
      <h2 id="models">${models.length > 1 ? "Models" : "Model"}</h2>
      ${budget !== null && html`<${Budget} models=${models} budget=${budget} />`}
      <${Table} name="each" caption="Models" heads=${HEADS}>
        ${models.map((model, index) => html`
          <${Row} key=${model.id} model=${model} acts=${acts}
                  swatch=${budget === null ? null : part(index)} />`)}
      <//>
    </section>`;
}

function Row({ model, acts, swatch }) {
  const { id, aliases, adapters, state, pinned } = model;
  const problem = acts.problem(model);
  const about = [
    aliases.length > 0 && `also ${aliases.join(", ")}`,
    adapters.length > 0 && `with ${adapters.join(", ")}`,
    pinned && "pinned",
  ].filter(Boolean);
  return html`
    <tr role="row" data-state=${state}>
      <${Cell} kind="who" title=${model.source}>
        ${swatch && html`<span class="swatch ${swatch}"></span>`}${id}
        ${about.length > 0 && html`<small>${about.join("; ")}</small>`}
      <//>
      <${Cell} kind="state"><span class="dot"></span>${wordsOf(model)}
        ${noteOf(model) && html` <small>${noteOf(model)}</small>`}
        <${Progress} model=${model} />
        ${problem && html` <small class="problem" role="alert">${problem}</small>`}
      <//>
      <${Memory} model=${model} />
      <${Cell} kind="number" head="Requests">${whole(model.requests)}
        ${model.waiting > 0 && html` <small>${whole(model.waiting)} waiting</small>`}<//>
      <${Cell} kind="act"><${Act} model=${model} acts=${acts} /><//>
    </tr>`;
}

function noteOf({ state, idle_seconds, seconds_left, retry_seconds }) {
  if (state === "draining") return "when its requests have ended";
  if (retry_seconds) return `not tried again for ${clock(retry_seconds)}`;
  if (idle_seconds === null) return "";
  return seconds_left === null ? `unused for ${clock(idle_seconds)}`
    : `unused for ${clock(idle_seconds)}, unloaded in ${clock(seconds_left)}`;
}

/** What it takes of the budget; below that what its process has. */
function Memory({ model: { needed_bytes, memory } }) {
  const [first, ...others] = [
    memory !== null && bytes(memory.total_bytes),
    memory !== null && `${bytes(memory.process_bytes)} resident`,
    memory === null && needed_bytes !== null && `${bytes(needed_bytes)} if loaded`,
  ].filter(Boolean);
  return html`
    <${Cell} kind="number" head="Memory">${first ?? "–"}
      ${others.map((other) => html` <small key=${other}>${other}</small>`)}<//>`;
}

function Act({ model, acts }) {
  const { id, state } = model;
  const isBusy = acts.pending.has(id);
  if (state === "ready") {
    return html`
      <${Confirm} label="Unload" question="Really?" isBusy=${isBusy}
                  onAnswer=${() => acts.act("unload", id)} />`;
  }
  return html`
    <button class="quiet" disabled=${isBusy || !canLoad(model)}
            onClick=${() => acts.act("load", id)}>Load</button>`;
}
