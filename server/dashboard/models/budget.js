// The memory that all models may take together, and whose it is.

import { bytes } from "../parts/format.js";
import { html } from "../parts/html.js";
import { Stack } from "../parts/stack.js";

const SHADES = 8;
const IN_MEMORY = ["loading", "ready", "draining"];

/** The class of a model's part of the bar, and of its swatch. */
export function part(index) {
  return `part-${index % SHADES}`;
}

export function Budget({ models, budget }) {
  const taken = models.map(({ state, memory, needed_bytes }) =>
    IN_MEMORY.includes(state) ? memory?.total_bytes ?? needed_bytes ?? 0 : 0);
  const sum = taken.reduce((left, right) => left + right, 0);
  const said = models.flatMap(({ id }, index) => (taken[index] ? [`${id} ${bytes(taken[index])}`] : []));
  const free = bytes(Math.max(0, budget - sum));
  return html`
    <div class="memory">
      <p>Memory <span class="muted">${bytes(sum)} of ${bytes(budget)}</span></p>
      <${Stack} parts=${taken.map((number, index) => [part(index), number])}
                total=${Math.max(budget, sum)}
                label="Memory of the models: ${[...said, `${free} free`].join(", ")}" />
    </div>`;
}
