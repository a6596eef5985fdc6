// Parts of a whole, side by side.

import { html } from "./html.js";

/** `parts` are of a class and a number each. `label` says the same in words. */
export function Stack({ parts, total, label }) {
  return html`
    <div class="stack" role="img" aria-label=${label}>
      ${parts.map(([kind, number], index) => html`
        <span key=${index} class=${kind} style=${{ flexGrow: total ? number / total : 0 }}></span>`)}
    </div>`;
}
