// The requests that are being answered, with why one waits and a button that ends it.

import { Confirm } from "../parts/confirm.js";
import { clock, percent, whole } from "../parts/format.js";
import { Component, html } from "../parts/html.js";
import { Cached, Cell, Output, Prompt, Table, Who } from "./cells.js";

const HEADS = [
  ["Request"], ["State"], ["Age", "number"], ["Prompt", "number"], ["Output", "number"],
  [html`<span class="unseen">End it</span>`, "act"],
];
const SHOWN_WAITING = 2; // queued requests that are listed; the others are only counted
const WAITS = {
  slots: ["waits for a slot", "max_running are running"],
  memory: ["waits for memory", "no blocks are free"],
  twin: ["waits for its twin", "which computes the same prompt"],
  disk: ["waits for the disk", "its prompt is being loaded"],
  turn: ["waits for its turn", "this step is full"],
};

export class Live extends Component {
  state = { showsAll: false };

  shouldComponentUpdate({ requests, ofSeveral }, { showsAll }) {
    const { props, state } = this;
    return requests !== props.requests || ofSeveral !== props.ofSeveral || showsAll !== state.showsAll;
  }

  render({ requests, ofSeveral, onEnd }, { showsAll }) {
    if (requests.length === 0) return null;
    const queued = requests.filter(({ status }) => status === "waiting");
    const folded = queued.slice(SHOWN_WAITING);
    const shown = showsAll ? requests : requests.filter((request) => !folded.includes(request));
    return html`
      <div class="scroll" tabindex="0" role="region" aria-label="Live requests">
        <${Table} name="live" caption="Requests that are being answered" heads=${HEADS}>
          ${shown.map((request) => html`
            <${Row} key=${request.id} request=${request} ofSeveral=${ofSeveral} onEnd=${onEnd} />`)}
        <//>
      </div>
      ${folded.length > 0 && html`
        <button class="fold" aria-expanded=${showsAll}
                onClick=${() => this.setState({ showsAll: !showsAll })}>
          ${showsAll ? "Fold the queue" : queueText(folded)}</button>`}`;
  }
}

/** "+17 queued: 12 for a slot, 5 for memory" */
function queueText(queued) {
  const counts = Object.keys(WAITS)
    .map((reason) => [reason, queued.filter(({ waits_for }) => waits_for === reason).length])
    .filter(([, number]) => number > 0)
    .map(([reason, number]) => `${whole(number)} ${WAITS[reason][0].replace("waits ", "")}`);
  return `+${whole(queued.length)} queued: ${counts.join(", ")}`;
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
      <${Output} request=${request} />
      <${Cell} kind="act">
        <${Confirm} label="End" question="Really?" onAnswer=${() => onEnd(request.id)} />
      <//>
    </tr>`;
}

/** The cached and the computed share of the prompt, in words and as a bar. */
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

/** The state and a note on it. */
function stateOf({ status, waits_for, output_tokens, computed_tokens, prompt_tokens }) {
  switch (status) {
    case "waiting":
      return WAITS[waits_for];
    case "preparing":
      return ["preparing", ""];
    case "sending":
      return ["sending", "its client reads slowly"];
    default:
      return output_tokens > 0 ? ["generating", ""]
        : ["prefill", `${percent(computed_tokens / prompt_tokens)} computed`];
  }
}
