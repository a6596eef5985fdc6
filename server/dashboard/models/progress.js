// How far a model has come that is being fetched or loaded.

import { html } from "../parts/html.js";

/** A share that nobody knows makes a bar that only moves. */
export function Progress({ model: { id, progress, progress_share } }) {
  if (progress === null) return null;
  return html`
    <small>${progress}</small>
    <progress aria-label="Loading ${id}" max="1" value=${progress_share ?? undefined}></progress>`;
}
