// Which model the page is about.

import { html } from "../parts/html.js";

/** Its name, or a choice where there are several. */
export function Choice({ names, chosen, onChoose }) {
  if (names.length < 2) return html`<span class="model">${chosen}</span>`;
  return html`
    <select class="model" aria-label="Model" value=${chosen}
            onChange=${(event) => onChoose(event.target.value)}>
      ${names.map((name) => html`<option key=${name} value=${name}>${name}</option>`)}
    </select>`;
}
