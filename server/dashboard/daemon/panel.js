// The daemon: its model, its memory, the settings it was started with.

import { ask } from "../net/api.js";
import { bytes, count, rate, whole } from "../parts/format.js";
import { Component, html } from "../parts/html.js";

const EVERY_MS = 5000;

/** The facts of `model`, read again every EVERY_MS while the daemon answers (`isLive`). */
export class Daemon extends Component {
  state = { daemon: null };

  componentDidMount() {
    this.read();
    this.timer = setInterval(() => this.props.isLive && this.read(), EVERY_MS);
  }

  componentWillUnmount() {
    clearInterval(this.timer);
  }

  render(_, { daemon }) {
    if (!daemon) return null;
    return html`
      <section class="card daemon" id="daemon" aria-labelledby="daemon-title">
        <h2 id="daemon-title">This daemon <span class="muted">Rootstock ${daemon.version}</span></h2>
        <dl class="facts">
          ${lines(daemon).map(([name, value, note, description]) => html`
            <div key=${name} title=${description}><dt>${name}</dt><dd>${value} <span class="muted">${note}</span></dd></div>`)}
        </dl>
        <${Settings} settings=${daemon.settings} />
      </section>`;
  }

  /** What cannot be read now is read the next time. */
  async read() {
    const query = new URLSearchParams({ model: this.props.model });
    const daemon = await ask(`admin/daemon?${query}`).then((answer) => answer.json()).catch(() => null);
    if (daemon) this.setState({ daemon });
  }
}

function lines({ names, model, facts, memory, decode, remembered }) {
  const aliases = names.slice(1);
  return [
    ["Model", names[0], aliases.length ? `also ${aliases.join(", ")}` : ""],
    ...(model ? loaded(names[0], model, facts, memory, decode) : [["In memory", "no", ""]]),
    ["Kept besides", count(remembered.replays, "answer"),
      `with tool calls, as tokens; ${count(remembered.responses, "stored response")}`],
  ];
}

function loaded(name, model, facts, memory, decode) {
  const { weights_bytes, kv_bytes, states_bytes, process_bytes, total_bytes } = memory.model;
  return [
    ...(model.name === name ? [] : [["From", model.name, ""]]),
    ["Context", count(model.max_sequence_tokens, "token"), context(model)],
    ["Weights", model.dtype, `${bytes(weights_bytes)} on ${model.device}`],
    ...(model.blas ? [["BLAS", model.blas, ""]] : []),
    ["KV", `${bytes(kv_bytes + states_bytes)}, ${model.kv_format}`, kv(model)],
    ["Memory", `${bytes(memory.active)} in use`,
      `${bytes(memory.peak)} at most, of ${bytes(total_bytes)} reserved`],
    ["Process", bytes(process_bytes), "resident"],
    ...facts.map(({ label, text, description }) =>
      [capitalized(label), ...halves(text, ", since "), description]),
    ...(decode ? [["Decode", ...halves(decode, ": ")]] : []),
    ["Sampling", `temperature ${rate(model.sampling.temperature)}`, sampling(model.sampling)],
  ];
}

function kv({ kv_bytes_per_token, kv_divergence }) {
  const changed = kv_divergence === null ? "" : `, KL ${kv_divergence.toPrecision(2)} from full`;
  return `${bytes(kv_bytes_per_token)} a token${changed}`;
}

function capitalized(label) {
  return label.charAt(0).toUpperCase() + label.slice(1);
}

/** The text with the separator's mark, and the rest after its space. */
function halves(text, separator) {
  const at = text.indexOf(separator);
  return at < 0 ? [text, ""] : [text.slice(0, at + 1), text.slice(at + 2)];
}

function context({ model_context_tokens, max_context_tokens, max_sequence_tokens }) {
  if (max_sequence_tokens >= model_context_tokens) {
    return "the model's own";
  }
  const limit = max_sequence_tokens < max_context_tokens
    ? "the KV cache" : "max_model_len or memory";
  return `of the model's ${whole(model_context_tokens)}, limited by ${limit}`;
}

function sampling({ top_p, top_k, min_p, repetition_penalty }) {
  const parts = [
    top_p < 1 && `top_p ${top_p}`,
    top_k > 0 && `top_k ${top_k}`,
    min_p > 0 && `min_p ${min_p}`,
    repetition_penalty !== 1 && `repetition_penalty ${repetition_penalty}`,
  ].filter(Boolean);
  return parts.length ? parts.join(", ") : "unless a request sets others";
}

function Settings({ settings }) {
  const [changed, others] = [false, true].map((isDefault) =>
    settings.filter((setting) => setting.is_default === isDefault));
  return html`
    <h3>Settings</h3>
    ${changed.length > 0 ? html`<${Table} settings=${changed} />` : html`
      <p class="muted">All have their default values.</p>`}
    <details>
      <summary>${whole(others.length)} at their default values</summary>
      <${Table} settings=${others} />
    </details>`;
}

function Table({ settings }) {
  return html`
    <table class="settings">
      ${settings.map((setting) => html`
        <tr key=${setting.name}>
          <th scope="row" title=${setting.description}><code>${setting.name}</code></th>
          <td>${textOf(setting)}</td>
        </tr>`)}
    </table>`;
}

function textOf({ name, value }) {
  if (value === null || value === "" || value?.length === 0) return "–";
  if (typeof value === "boolean") return value ? "on" : "off";
  if (typeof value === "number") return isBytes(name) ? bytes(value) : String(value);
  if (typeof value !== "object") return value;
  const parts = Array.isArray(value) ? value : Object.entries(value).map((pair) => pair.join("="));
  return parts.join(", ") || "–";
}

function isBytes(name) {
  return name.endsWith("_bytes") || name === "memory_budget";
}
