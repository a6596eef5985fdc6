// A button that asks once more before it does what cannot be undone.

import { Component, html } from "./html.js";

const ASKS_MS = 5000;

export class Confirm extends Component {
  state = { isAsking: false };

  componentWillUnmount() {
    clearTimeout(this.timer);
  }

  render({ label, question, onConfirm }, { isAsking }) {
    const click = isAsking ? () => this.answer(onConfirm) : () => this.ask();
    return html`
      <button class="quiet ${isAsking ? "danger" : ""}" onClick=${click}>
        ${isAsking ? question : label}
      </button>`;
  }

  ask() {
    this.setState({ isAsking: true });
    this.timer = setTimeout(() => this.setState({ isAsking: false }), ASKS_MS);
  }

  answer(onConfirm) {
    clearTimeout(this.timer);
    this.setState({ isAsking: false });
    onConfirm();
  }
}
