// How the daemon does right now, in four numbers, and whose the memory is.

import { bytes, percent, rate, short, whole } from "../parts/format.js";
import { html } from "../parts/html.js";
import { queue } from "../state/queue.js";

const SMOOTHED_SECONDS = 3;

export function Numbers({ snapshot, history }) {
  const { counters } = snapshot;
  const { running, waiting } = queue(snapshot);
  const share = counters.prompt_tokens ? counters.cached_tokens / counters.prompt_tokens : null;
  return html`
    <dl class="numbers">
      <${Number_} name="Tokens written a second"
                  value=${rate(history.recent("written", SMOOTHED_SECONDS) ?? 0)}
                  note="${short(counters.generated_tokens)} since the start" />
      <${Number_} name="Running" value=${whole(running)}
                  note="${short(counters.requests)} requests so far" />
      <${Number_} name="Waiting" value=${whole(waiting)} note="in the queue" />
      <${Number_} name="Found in the cache" value=${share === null ? "–" : percent(share)}
                  note="of ${short(counters.prompt_tokens)} prompt tokens" />
    </dl>`;
}

function Number_({ name, value, note }) {
  return html`<div><dt>${name}</dt><dd><b>${value}</b><span>${note}</span></dd></div>`;
}

/** The KV memory as one bar, and a thin one for each kind of layer with slots of its own. */
export function Memory({ arena, groups }) {
  const parts = [["held", arena.held], ["cached", arena.cached], ["free", arena.free]];
  const size = (blocks) => bytes(blocks * arena.block_bytes);
  return html`
    <div class="memory">
      <h2>Memory <span class="muted">${size(arena.blocks)} in ${whole(arena.blocks)} blocks</span></h2>
      <${Stack} parts=${parts} total=${arena.blocks} label="Blocks" />
      <ul>
        ${parts.map(([kind, blocks]) => html`
          <li key=${kind}><span class="swatch ${kind}"></span>
            ${kind} <b>${whole(blocks)}</b> <span class="muted">${size(blocks)}</span></li>`)}
      </ul>
      ${groups.map((group) => html`<${Group} key=${group.kind + group.tokens} group=${group} />`)}
    </div>`;
}

function Group({ group }) {
  const name = group.kind === "window"
    ? `Windows of ${whole(group.tokens)} tokens` : "Saved recurrent states";
  const parts = [["cached", group.used], ["free", group.slots - group.used]];
  return html`
    <div class="group">
      <span>${name} <span class="muted">${whole(group.used)} of ${whole(group.slots)}</span></span>
      <${Stack} parts=${parts} total=${group.slots} label=${name} />
    </div>`;
}

function Stack({ parts, total, label }) {
  const spoken = parts.map(([kind, number]) => `${whole(number)} ${kind}`).join(", ");
  return html`
    <div class="stack" role="img" aria-label="${label}: ${spoken}">
      ${parts.map(([kind, number]) => html`
        <span key=${kind} class=${kind} style=${{ flexGrow: total ? number / total : 0 }}></span>`)}
    </div>`;
}
