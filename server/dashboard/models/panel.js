// The models: their states, their memory, and buttons that load and unload them.

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

/** Bytes of the budget, and what they are for; before it is loaded those that loading takes. */
function Memory({ model: { needed_bytes, memory } }) {
  const needed = needed_bytes === null ? "–" : `${bytes(needed_bytes)} if loaded`;
  return html`
    <${Cell} kind="number parts" head="Memory">${memory ? bytes(memory.total_bytes) : needed}
      ${memory && html` <small>${partsOf(memory)}</small>`}<//>`;
}

/** "weights 1.1 GiB, KV 0.8 GiB, reserved for steps 0.3 GiB; the process has 1.4 GiB now" */
function partsOf({ weights_bytes, kv_bytes, states_bytes, workspace_bytes, events_bytes,
                   process_bytes }) {
  const parts = [["weights", weights_bytes], ["KV", kv_bytes], ["recurrent states", states_bytes],
                 ["reserved for steps", workspace_bytes], ["KV events", events_bytes]];
  const shown = parts.filter(([, size]) => size > 0).map(([name, size]) => `${name} ${bytes(size)}`);
  return `${shown.join(", ")}; the process has ${bytes(process_bytes)} now`;
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
