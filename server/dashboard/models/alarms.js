// What has failed or is slower than it could be, each in a line with what to do.

import { html } from "../parts/html.js";

/** Of all loaded `models`, as /admin/models has them. Nothing where nothing is wrong. */
export function Alarms({ models }) {
  const lines = models.flatMap(({ id, alarms }) => alarms.map((text) => [id, text]));
  if (lines.length === 0) return null;
  return html`
    <section class="card alarms" aria-label="Alarms">
      <ul>
        ${lines.map(([id, text]) => html`
          <li key=${id + text}>${models.length > 1 && html`<b>${id}:</b> `}${text}</li>`)}
      </ul>
    </section>`;
}
