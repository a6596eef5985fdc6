// A button that asks once more before it does what cannot be undone.

import { Component, html } from "./html.js";

const ASKS_MS = 5000;

export class Confirm extends Component {
  state = { isAsking: false };

  componentWillUnmount() {
    clearTimeout(this.timer);
  }

  render({ label, question, isBusy = false }, { isAsking }) {
    return isAsking
      ? html`<button class="quiet danger" onClick=${() => this.answer()}>${question}</button>`
      : html`
        <button class="quiet" disabled=${isBusy} onClick=${() => this.ask()}>${label}</button>`;
  }

  ask() {
    this.setState({ isAsking: true });
    this.timer = setTimeout(() => this.setState({ isAsking: false }), ASKS_MS);
  }

  answer() {
    clearTimeout(this.timer);
    this.setState({ isAsking: false });
    this.props.onAnswer();
  }
}
