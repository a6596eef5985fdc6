// A button that asks once more before it does what cannot be undone, and how where there is a choice.

import { Component, html } from "./html.js";

const ASKS_MS = 5000;

/** `answers`: what may be said yes to, each a text and what is done then. */
export class Confirm extends Component {
  state = { isAsking: false };

  componentWillUnmount() {
    clearTimeout(this.timer);
  }

  render({ label, answers }, { isAsking }) {
    const button = (text, act) => html`
      <button class="quiet ${isAsking ? "danger" : ""}" onClick=${act}>${text}</button>`;
    return html`
      <span class="confirm">
        ${isAsking ? answers.map(([text, act]) => button(text, () => this.answer(act)))
                   : [button(label, () => this.ask())]}
      </span>`;
  }

  ask() {
    this.setState({ isAsking: true });
    this.timer = setTimeout(() => this.setState({ isAsking: false }), ASKS_MS);
  }

  answer(act) {
    clearTimeout(this.timer);
    this.setState({ isAsking: false });
    act();
  }
}
