// The requests that are being answered, and below them the last finished ones.

import { ask, reason } from "../net/api.js";
import { count } from "../parts/format.js";
import { Component, html } from "../parts/html.js";
import { Finished } from "./finished.js";
import { Live } from "./live.js";

export class Requests extends Component {
  state = { problem: null };

  render({ live, hidden, finished, ofSeveral }, { problem }) {
    return html`
      <section class="requests" aria-labelledby="requests">
        <h2 id="requests">Requests <span class="muted">${summary(live, hidden)}</span></h2>
        ${problem && html`<p class="problem" role="alert">${problem}</p>`}
        <${Live} requests=${live} ofSeveral=${ofSeveral} onEnd=${(id) => this.end(id)} />
        ${hidden > 0 && html`<p class="muted">and ${count(hidden, "younger request")}</p>`}
        <${Finished} requests=${finished} ofSeveral=${ofSeveral} />
      </section>`;
  }

  async end(id) {
    try {
      await ask(`admin/requests/${id}/cancel`, { method: "POST" });
      this.setState({ problem: null });
    } catch (error) {
      this.setState({ problem: reason(error) });
    }
  }
}

function summary(live, hidden) {
  const total = live.length + hidden;
  return total ? `${count(total, "request")} being answered` : "none is being answered";
}
