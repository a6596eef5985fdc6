// The daemon asks for a key, and so does the page.

import { keepKey } from "../net/api.js";
import { Component, html } from "./html.js";

export class KeyForm extends Component {
  render({ problem }) {
    return html`
      <form class="key" onSubmit=${(event) => this.submit(event)}>
        <h2>This daemon asks for an API key</h2>
        <p class="muted">An admin's key shows the cache. It stays in this tab until you close it, and
          goes nowhere but to this daemon.</p>
        <label for="api-key">API key</label>
        <div class="row">
          <input id="api-key" name="key" type="password" autocomplete="off" required
                 pattern="[\\x21-\\x7e]+" title="printable ASCII, no spaces" />
          <button class="primary">Open</button>
        </div>
        ${problem && html`<p class="problem" role="alert">${problem}</p>`}
      </form>`;
  }

  submit(event) {
    event.preventDefault();
    keepKey(new FormData(event.target).get("key"));
    this.props.onKey();
  }
}
