// The options of every request: a system prompt, sampling, a tool.

import { whole } from "../parts/format.js";
import { html } from "../parts/html.js";
import { TOOL } from "./tool.js";

export const NO_OPTIONS = { system: "", temperature: null, maxTokens: null, offersTool: false };

/** `model` as /v1/models lists it, or null. Its defaults are shown in empty fields. */
export function Options({ options, model, onChange }) {
  const { system, offersTool } = options;
  const { sampling_defaults: defaults, max_model_len: most } = model ?? {}; // null before it was loaded
  const set = (changed) => onChange({ ...options, ...changed });
  return html`
    <details class="options">
      <summary>System prompt${system.trim() ? "" : " (none)"}</summary>
      <textarea rows="4" aria-label="System prompt" value=${system}
                placeholder="Optional instructions. Cached once, shared by every chat that starts with them."
                onInput=${(event) => set({ system: event.target.value })}></textarea>
    </details>
    <details class="options">
      <summary>Sampling and a tool${textOf(options)}</summary>
      <div class="fields">
        <${Number_} label="Temperature" value=${options.temperature} min="0" max="2" step="0.1"
                    placeholder=${defaults ? `${defaults.temperature} by default` : ""}
                    onValue=${(temperature) => set({ temperature })} />
        <${Number_} label="Max tokens" value=${options.maxTokens} min="1" max=${most} step="1"
                    placeholder=${most ? `up to ${whole(most)}` : ""}
                    onValue=${(maxTokens) => set({ maxTokens })} />
      </div>
      <label class="check">
        <input type="checkbox" checked=${offersTool}
               onChange=${(event) => set({ offersTool: event.target.checked })} />
        <span>Offer a tool, <code>${TOOL.function.name}</code>
          <small>This page answers its calls, then the model continues.</small></span>
      </label>
    </details>`;
}

/** A number out of its limits becomes the nearest limit when the field is left. */
function Number_({ label, value, onValue, ...limits }) {
  const read = ({ target }) => onValue(target.value === "" ? null : Number(target.value));
  const limit = () => value !== null &&
    onValue(Math.min(limits.max ?? Infinity, Math.max(limits.min, value)));
  return html`
    <label>${label}<input type="number" inputmode="decimal" value=${value ?? ""} onInput=${read}
                          onChange=${limit} ...${limits} /></label>`;
}

/** The set options in words, to be seen while they are folded. */
function textOf({ temperature, maxTokens, offersTool }) {
  const parts = [
    temperature !== null && `temperature ${temperature}`,
    maxTokens !== null && `at most ${whole(maxTokens)} tokens`,
    offersTool && TOOL.function.name,
  ].filter(Boolean);
  return parts.length ? `: ${parts.join(", ")}` : "";
}
