// The log of the last finished requests, refused ones included.

import { dayTime, seconds } from "../parts/format.js";
import { Component, html } from "../parts/html.js";
import { Cached, Cell, Prompt, Table, Who, Output } from "./cells.js";

const HEADS = [
  ["Time"], ["Request"], ["Status"], ["Prompt", "number"], ["Output", "number"],
  ["First token", "number"],
];
const NO_FAILURES = [200, 499]; // a client may leave

export class Finished extends Component {
  shouldComponentUpdate({ requests, ofSeveral }) {
    return requests !== this.props.requests || ofSeveral !== this.props.ofSeveral;
  }

  render({ requests, ofSeveral }) {
    return html`
      <h3>Finished <span class="muted">${requests.length ? "the latest first" : "none yet"}</span></h3>
      ${requests.length > 0 && html`
        <div class="scroll" tabindex="0" role="region" aria-label="Finished requests">
          <${Table} name="finished" caption="Requests that are over" heads=${HEADS}>
            ${requests.map((request) => html`
              <${Row} key=${request.number} request=${request} ofSeveral=${ofSeveral} />`)}
          <//>
        </div>`}`;
  }
}

function Row({ request, ofSeveral }) {
  const first = request.first_token_seconds;
  const hasFailed = !NO_FAILURES.includes(request.status);
  return html`
    <tr role="row" data-status=${request.status}>
      <${Cell} kind="time">${dayTime(request.time)}<//>
      <${Who} request=${request} ofSeveral=${ofSeveral} />
      <${Cell} kind=${hasFailed ? "outcome failed" : "outcome"}>${statusOf(request)}<//>
      <${Prompt} request=${request}><${Cached} request=${request} /><//>
      <${Output} request=${request} />
      <${Cell} kind="number" head="First token">
        ${first === null ? "–" : seconds(first)} <small>of ${seconds(request.seconds)}</small>
      <//>
    </tr>`;
}

/** "200", "499 client left" */
function statusOf({ status, code }) {
  return code ? html`${status} <small>${code.replaceAll("_", " ")}</small>` : status;
}
