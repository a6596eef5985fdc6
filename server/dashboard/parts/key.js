// The form for the API key of a daemon that needs one.

import { keepKey } from "../net/api.js";
import { Component, html } from "./html.js";

export class KeyForm extends Component {
  render({ isWrong }) {
    return html`
      <main class="lone">
        <form class="key" onSubmit=${(event) => this.submit(event)}>
          <h1>This daemon needs an API key</h1>
          <p class="muted">With an admin's key you see the cache, with a user's key you can chat. The key
            stays in this tab until you close it, and is sent to this daemon alone.</p>
          <label for="api-key">API key</label>
          <div class="row">
            <input id="api-key" name="key" type="password" autocomplete="off" required
                   pattern="[\\x21-\\x7e]+" title="printable ASCII, no spaces" />
            <button class="primary">Open</button>
          </div>
          ${isWrong && html`<p class="problem" role="alert">The daemon does not know this key.</p>`}
        </form>
      </main>`;
  }

  submit(event) {
    event.preventDefault();
    keepKey(new FormData(event.target).get("key"));
    this.props.onKey();
  }
}
