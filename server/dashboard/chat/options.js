// What goes with every message: a system prompt, how answers are drawn, a tool.

import { whole } from "../parts/format.js";
import { html } from "../parts/html.js";
import { TOOL } from "./tool.js";

export const NO_OPTIONS = { system: "", temperature: null, maxTokens: null, offersTool: false };

/** `model` as /v1/models lists it, or null: its defaults hold where nothing is set. */
export function Options({ options, model, onChange }) {
  const { system, offersTool } = options;
  const { sampling_defaults: defaults, max_model_len: most } = model ?? {}; // null before it was loaded
  const set = (changed) => onChange({ ...options, ...changed });
  return html`
    <details class="options">
      <summary>System prompt${system.trim() ? "" : " (none)"}</summary>
      <textarea rows="4" aria-label="System prompt" value=${system}
                placeholder="What every chat begins with, and so shares"
                onInput=${(event) => set({ system: event.target.value })}></textarea>
    </details>
    <details class="options">
      <summary>Sampling and a tool${told(options)}</summary>
      <div class="fields">
        <${Number_} label="Temperature" value=${options.temperature} min="0" max="2" step="0.1"
                    placeholder=${defaults ? `${defaults.temperature} by default` : ""}
                    onValue=${(temperature) => set({ temperature })} />
        <${Number_} label="Max tokens" value=${options.maxTokens} min="1" step="1"
                    placeholder=${most ? `up to ${whole(most)}` : ""}
                    onValue=${(maxTokens) => set({ maxTokens })} />
      </div>
      <label class="check">
        <input type="checkbox" checked=${offersTool}
               onChange=${(event) => set({ offersTool: event.target.checked })} />
        <span>Offer a tool, <code>${TOOL.function.name}</code>
          <small>This page answers its calls, and the model goes on.</small></span>
      </label>
    </details>`;
}

function Number_({ label, value, onValue, ...limits }) {
  const read = ({ target }) => onValue(target.value === "" ? null : Number(target.value));
  return html`
    <label>${label}<input type="number" inputmode="decimal" value=${value ?? ""} onInput=${read}
                          ...${limits} /></label>`;
}

/** So that what is set is seen while it is folded away. */
function told({ temperature, maxTokens, offersTool }) {
  const said = [
    temperature !== null && `temperature ${temperature}`,
    maxTokens !== null && `at most ${whole(maxTokens)} tokens`,
    offersTool && TOOL.function.name,
  ].filter(Boolean);
  return said.length ? `: ${said.join(", ")}` : "";
}
