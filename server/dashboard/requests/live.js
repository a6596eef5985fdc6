// The requests that are being answered, with why one waits and a button that ends it.

import { Confirm } from "../parts/confirm.js";
import { clock, percent } from "../parts/format.js";
import { Component, html } from "../parts/html.js";
import { Cached, Cell, Prompt, Table, Who, Written } from "./cells.js";

const HEADS = [
  ["Request"], ["State"], ["Age", "number"], ["Prompt", "number"], ["Written", "number"],
  [html`<span class="unseen">End it</span>`, "act"],
];
const WAITS = {
  slots: ["waits for a slot", "as many run as may"],
  memory: ["waits for memory", "others hold the blocks"],
  twin: ["waits for its twin", "whose prompt is the same"],
  disk: ["waits for the disk", "a prompt is being loaded"],
  turn: ["waits for its turn", "this step is full"],
};

export class Live extends Component {
  shouldComponentUpdate({ requests, ofSeveral }) {
    return requests !== this.props.requests || ofSeveral !== this.props.ofSeveral;
  }

  render({ requests, ofSeveral, onEnd }) {
    if (requests.length === 0) return null;
    return html`
      <div class="scroll" tabindex="0" role="region" aria-label="Live requests">
        <${Table} name="live" caption="Requests that are being answered" heads=${HEADS}>
          ${requests.map((request) => html`
            <${Row} key=${request.id} request=${request} ofSeveral=${ofSeveral} onEnd=${onEnd} />`)}
        <//>
      </div>`;
  }
}

function Row({ request, ofSeveral, onEnd }) {
  const [state, note] = stateOf(request);
  const hasBegun = request.computed_tokens > 0 || request.output_tokens > 0;
  return html`
    <tr role="row" data-status=${request.status} data-waits-for=${request.waits_for}>
      <${Who} request=${request} ofSeveral=${ofSeveral} />
      <${Cell} kind="state"><span class="dot"></span>${state}
        ${note && html` <small>${note}</small>`}<//>
      <${Cell} kind="number" head="Age">${clock(request.age_seconds)}<//>
      <${Prompt} request=${request}>${hasBegun && html`<${Progress} request=${request} />`}<//>
      <${Written} request=${request} />
      <${Cell} kind="act">
        <${Confirm} label="End" question="Really?" onAnswer=${() => onEnd(request.id)} />
      <//>
    </tr>`;
}

/** What of its prompt was cached and what has been computed, in words and as a bar. */
function Progress({ request }) {
  const { prompt_tokens, cached_tokens, computed_tokens } = request;
  const parts = [["cached", cached_tokens], ["done", computed_tokens - cached_tokens]];
  return html`
    <${Cached} request=${request} />
    <span class="progress" aria-hidden="true">
      ${parts.map(([kind, tokens]) => html`
        <span key=${kind} class=${kind}
              style=${{ width: percent(Math.max(0, tokens) / prompt_tokens) }}></span>`)}
    </span>`;
}

/** What it does, and a word about that. */
function stateOf({ status, waits_for, output_tokens, computed_tokens, prompt_tokens }) {
  switch (status) {
    case "waiting":
      return WAITS[waits_for];
    case "preparing":
      return ["is being prepared", ""];
    case "sending":
      return ["is being sent", "its client reads slowly"];
    default:
      return output_tokens > 0 ? ["writes", ""]
        : ["reads its prompt", `${percent(computed_tokens / prompt_tokens)} computed`];
  }
}
