// What has failed or is slower than it could be, each in a line with what to do.

import { html } from "../parts/html.js";

/**
 * Of all loaded `models`, and of the machine's memory, as /admin/models has them. Nothing where
 * nothing is wrong.
 */
export function Alarms({ models, memory }) {
  const lines = models.flatMap(({ id, alarms }) => alarms.map((text) => [id, text]));
  const problem = memory?.problem;
  if (lines.length === 0 && !problem) return null;
  return html`
    <section class="card alarms" aria-label="Alarms">
      <ul>
        ${problem && html`<li key="memory"><b>Memory is short:</b> ${problem}</li>`}
        ${lines.map(([id, text]) => html`
          <li key=${id + text}>${models.length > 1 && html`<b>${id}:</b> `}${text}</li>`)}
      </ul>
    </section>`;
}
