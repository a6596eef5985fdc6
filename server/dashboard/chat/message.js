// One message: what was said, its branches, and what the answer took.

import { count, percent, rate, seconds, whole } from "../parts/format.js";
import { Component, html } from "../parts/html.js";

export function Question({ message, siblings, isBusy, onChoose, onEdit }) {
  return html`
    <li class="message user">
      <${Editable} key=${message.id} message=${message} isBusy=${isBusy} onEdit=${onEdit}>
        <${Branches} message=${message} siblings=${siblings} onChoose=${onChoose} />
      <//>
    </li>`;
}

export function Answer({ message, siblings, onChoose }) {
  const isWriting = message.state === "writing";
  return html`
    <li class="message assistant" data-state=${message.state}>
      ${message.reasoning && html`
        <details class="reasoning"><summary>Reasoning</summary><p>${message.reasoning}</p></details>`}
      <p class="text">${message.text}${isWriting && html`<span class="caret"></span>`}</p>
      ${message.problem && html`<p class="problem" role="alert">${message.problem}</p>`}
      <footer>
        <${Branches} message=${message} siblings=${siblings} onChoose=${onChoose} />
        <${Figures} message=${message} />
      </footer>
    </li>`;
}

class Editable extends Component {
  state = { draft: null };

  render({ message, isBusy, children }, { draft }) {
    if (draft === null) {
      return html`
        <p class="text">${message.text}</p>
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
        <button class="primary" disabled=${isBusy || !draft.trim()}
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

/** What one request took; with several answers they are those of all together. */
function Figures({ message }) {
  if (message.state === "stopped") return html`<span class="figures">stopped</span>`;
  if (!message.figures) return null;
  const { prompt, cached, written, firstToken, perSecond } = message.figures;
  const share = prompt ? cached / prompt : 0;
  const all = message.together > 1 ? `, ${message.together} answers together` : "";
  return html`
    <span class="figures">
      <span class="share" role="img" aria-label="${percent(share)} of the prompt was cached">
        <span style=${{ width: percent(share) }}></span>
      </span>
      <span><b>${whole(cached)}</b> of ${count(prompt, "prompt token")} cached</span>
      <span>first after <b>${seconds(firstToken)}</b></span>
      <span><b>${rate(perSecond)}</b> tokens/s (${whole(written)}${all})</span>
      ${message.finish === "length" && html`<span>cut by length</span>`}
    </span>`;
}
