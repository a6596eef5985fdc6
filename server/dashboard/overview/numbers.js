// The present rates of the daemon in four numbers, the use of the KV memory, and the disk cache.

import { bytes, count, percent, rate, short, whole } from "../parts/format.js";
import { html } from "../parts/html.js";
import { Stack } from "../parts/stack.js";
import { queue } from "../state/queue.js";

/** `series` is of all models, `whose` says so if there are several; the rest is of the snapshot's model. */
export function Numbers({ snapshot, series, whose }) {
  const { counters } = snapshot;
  const { running, waiting, loading } = queue(snapshot);
  const share = counters.prompt_tokens ? counters.cached_tokens / counters.prompt_tokens : null;
  return html`
    <dl class="numbers">
      <${Number_} name="Tokens a second${whose}"
                  value=${rate(series.written.at(-1) ?? 0)}
                  note="${short(counters.generated_tokens)} since the model was loaded" />
      <${Number_} name="Running" value=${whole(running)}
                  note="${short(counters.requests)} requests since the model was loaded" />
      <${Number_} name="Waiting" value=${whole(waiting)}
                  note=${loading ? `${whole(loading)} of them loading from disk` : "queued"} />
      <${Number_} name="Cached" value=${share === null ? "–" : percent(share)}
                  note="of ${short(counters.prompt_tokens)} prompt tokens${lately(snapshot)}" />
    </dl>`;
}

/** The share in the shortest recent time with any prompt. */
function lately({ recent_hits }) {
  const hits = recent_hits.find(({ queried_tokens }) => queried_tokens);
  return hits
    ? `; ${percent(hits.hit_tokens / hits.queried_tokens)} in ${hits.seconds / 60} min` : "";
}

function Number_({ name, value, note }) {
  return html`<div><dt>${name}</dt><dd><b>${value}</b><span>${note}</span></dd></div>`;
}

const WORDS = { held: "in use", cached: "cached", free: "free" };

/** The KV memory as one bar, and a thin one for each kind of layer with slots of its own. */
export function Memory({ arena, groups, disk }) {
  const parts = [["held", arena.held], ["cached", arena.cached], ["free", arena.free]];
  const size = (blocks) => bytes(blocks * arena.block_bytes);
  return html`
    <div class="memory">
      <h2>KV cache <span class="muted">${size(arena.blocks)} in ${whole(arena.blocks)} blocks</span></h2>
      <${Stack} parts=${parts} total=${arena.blocks} label=${spoken("Blocks", parts)} />
      <ul>
        ${parts.map(([kind, blocks]) => html`
          <li key=${kind}><span class="swatch ${kind}"></span>
            ${WORDS[kind]} <b>${whole(blocks)}</b> <span class="muted">${size(blocks)}</span></li>`)}
        <li title="Additional memory that would be needed if each request had copies of its own">
          saved by sharing <b>${bytes(arena.saved_bytes)}</b></li>
      </ul>
      ${groups.map((group) => html`<${Group} key=${group.kind + group.tokens} group=${group} />`)}
      ${disk && html`<${Disk} disk=${disk} />`}
    </div>`;
}

/** Of other models on disk: less is what the folder takes itself. */
const SHOWN_BYTES = 2 ** 20;

function Disk({ disk }) {
  const { used_bytes, shared_bytes, limit_bytes, hits, loaded_tokens } = disk;
  const others = Math.max(0, shared_bytes - used_bytes);
  const free = Math.max(0, limit_bytes - shared_bytes);
  const parts = [["disk", used_bytes], ["others", others], ["free", free]];
  const beside = others < SHOWN_BYTES ? "" : `, other models ${bytes(others)}`;
  const fullness = `${bytes(used_bytes)} of ${bytes(limit_bytes)}${beside}`;
  const loaded = hits ? `${count(loaded_tokens, "token")} loaded for ${count(hits, "prompt")}`
    : "nothing loaded";
  return html`
    <div class="group disk">
      <span>Disk <span class="muted">${fullness}</span></span>
      <${Stack} parts=${parts} total=${limit_bytes} label="Disk: ${fullness}" />
      <p class="muted">Since the model was loaded: ${loaded} from disk, ${bytes(disk.read_bytes)} read,${" "}
        ${bytes(disk.written_bytes)} written</p>
    </div>`;
}

function Group({ group }) {
  const name = group.kind === "window"
    ? `Windows of ${whole(group.tokens)} tokens` : "Saved recurrent states";
  const parts = [["cached", group.used], ["free", group.slots - group.used]];
  return html`
    <div class="group">
      <span>${name} <span class="muted">${whole(group.used)} of ${whole(group.slots)}</span></span>
      <${Stack} parts=${parts} total=${group.slots} label=${spoken(name, parts)} />
    </div>`;
}

function spoken(name, parts) {
  return `${name}: ${parts.map(([kind, number]) => `${whole(number)} ${kind}`).join(", ")}`;
}
