// One message with its branches, and the figures of an answer.

import { Markdown } from "../markdown/markdown.js";
import { Drafted } from "../parts/drafted.js";
import { clock, count, percent, rate, seconds, whole } from "../parts/format.js";
import { Component, html } from "../parts/html.js";
import { Images } from "./images.js";

const SHOWN_AFTER_MS = 2000; // of reading: before, a bar would only flicker

export function Question({ message, siblings, isBusy, onChoose, onEdit }) {
  return html`
    <li class="message user">
      <${Images} images=${message.images} />
      <${Editable} key=${message.id} message=${message} isBusy=${isBusy} onEdit=${onEdit}>
        <${Branches} message=${message} siblings=${siblings} onChoose=${onChoose} />
      <//>
    </li>`;
}

export function Answer({ message, siblings, isBusy, onChoose, onRetry }) {
  const isOver = message.state === "failed" || message.state === "stopped";
  return html`
    <li class="message assistant" data-state=${message.state}>
      ${message.reasoning && html`
        <details class="reasoning"><summary>Reasoning</summary><p>${message.reasoning}</p></details>`}
      ${message.progress && html`<${Reading} ...${message.progress} />`}
      <${Markdown} key=${message.id} text=${message.text} />
      ${message.calls.map((call) => html`<${Call} key=${call.id} call=${call} />`)}
      ${message.problem && html`<p class="problem" role="alert">${message.problem}</p>`}
      <footer>
        <${Branches} message=${message} siblings=${siblings} onChoose=${onChoose} />
        <${Figures} message=${message} />
        ${isOver && html`
          <button class="quiet" disabled=${isBusy} onClick=${onRetry}>Retry</button>`}
      </footer>
    </li>`;
}

/** How much of a long prompt is read, and how long the rest takes at the pace so far. */
function Reading({ total, cache, processed, time_ms: milliseconds }) {
  if (milliseconds < SHOWN_AFTER_MS || processed >= total) return null;
  const left = (milliseconds / 1000) * (total - processed) / (processed - cache);
  return html`
    <p class="reading">
      <progress aria-label="The part of the prompt that is read" max=${total} value=${processed}></progress>
      <span>reading the prompt: <b>${whole(processed)}</b> of ${count(total, "token")}</span>
      ${processed > cache && html`<span>${clock(Math.ceil(left))} left</span>`}
    </p>`;
}

function Call({ call }) {
  return html`
    <p class="call"><span>calls</span> <code>${call.name}(${call.arguments})</code></p>`;
}

/** The page's answer to a call. */
export function ToolResult({ message }) {
  return html`
    <li class="message tool">
      <p class="call"><span>${message.call.name} says</span> <code>${message.text}</code></p>
    </li>`;
}

class Editable extends Component {
  state = { draft: null };

  render({ message, isBusy, children }, { draft }) {
    if (draft === null) {
      return html`
        ${message.text && html`<p class="text">${message.text}</p>`}
        <footer>
          ${children}
          <button class="quiet" disabled=${isBusy}
                  onClick=${() => this.setState({ draft: message.text })}>Edit</button>
        </footer>`;
    }
    return html`
      <textarea aria-label="Edit the message" rows="3" value=${draft}
                onInput=${(event) => this.setState({ draft: event.target.value })}></textarea>
      <footer>
        <button class="quiet" onClick=${() => this.setState({ draft: null })}>Cancel</button>
        <button class="primary" disabled=${isBusy || !(draft.trim() || message.images.length)}
                onClick=${() => this.submit()}>Send as a new branch</button>
      </footer>`;
  }

  submit() {
    const { draft } = this.state;
    this.setState({ draft: null });
    this.props.onEdit(draft.trim());
  }
}

function Branches({ message, siblings, onChoose }) {
  if (siblings.length < 2) return null;
  const at = siblings.indexOf(message);
  const step = (label, sign, target) => html`
    <button class="quiet" aria-label=${label} disabled=${!target}
            onClick=${() => onChoose(target)}>${sign}</button>`;
  return html`
    <span class="branches">
      ${step("Previous branch", "‹", siblings[at - 1])}
      <span>${at + 1} of ${siblings.length}</span>
      ${step("Next branch", "›", siblings[at + 1])}
    </span>`;
}

/** The figures of one request: of all its answers together. */
function Figures({ message }) {
  if (message.state === "stopped") return html`<span class="figures">stopped</span>`;
  if (!message.figures) return null;
  const { prompt, cached, written, drafted, firstToken, perSecond } = message.figures;
  const share = prompt ? cached / prompt : 0;
  const answers = message.together.length;
  const all = answers > 1 ? ` in ${answers} answers together` : "";
  return html`
    <span class="figures">
      <span class="share" role="img" aria-label="${percent(share)} of the prompt was cached">
        <span style=${{ width: percent(share) }}></span>
      </span>
      <span><b>${whole(cached)}</b> of ${count(prompt, "prompt token")} cached</span>
      <span>first token after <b>${seconds(firstToken)}</b></span>
      <span><b>${whole(written)}</b> ${written === 1 ? "token" : "tokens"} generated${all}</span>
      <${Drafted} tokens=${drafted} />
      ${perSecond !== null && html`<span><b>${rate(perSecond)}</b> tokens/s</span>`}
      ${message.finish === "length" && html`<span>stopped at max tokens</span>`}
    </span>`;
}
