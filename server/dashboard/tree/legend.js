// What the colours and marks mean. Marks that cannot occur now are left out.

import { html } from "../parts/html.js";

const ALWAYS = [
  ["held", "in use by a request now"],
  ["cached", "kept for later, fainter with age"],
  ["done", "being computed or generated"],
  ["found", "found by a prompt just now"],
];
const WHEN_SHORT = ["next", "next to be evicted"];
const OF_GROUPS = {
  recurrent: ["state", "saved state of recurrent layers"],
  window: ["hole", "no longer in a sliding window"],
};
const OF_DISK = ["disk", "on disk too"];

/** `isShort`: few blocks are free, so that cached ones are evicted soon. */
export function Legend({ groups, disk, isShort }) {
  const kinds = new Set(groups.map((group) => group.kind));
  const ofGroups = [...kinds].map((kind) => OF_GROUPS[kind]).filter(Boolean);
  const entries = [...ALWAYS, ...(isShort ? [WHEN_SHORT] : []), ...(disk ? [OF_DISK] : []), ...ofGroups];
  return html`
    <ul class="legend">
      ${entries.map(([mark, meaning]) => html`
        <li key=${mark}><span class="swatch ${mark}"></span>${meaning}</li>`)}
    </ul>`;
}
