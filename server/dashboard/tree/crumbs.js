// The way back from a bar that fills the width to all there is.

import { whole } from "../parts/format.js";
import { html } from "../parts/html.js";

const MOST_ABOVE = 3; // of the bars before it, the nearest

/** `path`: the nodes from the first to the one that fills the width. */
export function Crumbs({ path, onSelect }) {
  const above = path.slice(0, -1);
  return html`
    <nav class="crumbs" aria-label="Where the picture begins">
      <ol>
        <${Crumb} text="All tokens" onClick=${() => onSelect(null)} />
        ${above.length > MOST_ABOVE && html`<li>…</li>`}
        ${above.slice(-MOST_ABOVE).map((node) => html`
          <${Crumb} key=${node.id} text=${span(node)} onClick=${() => onSelect(node.id)} />`)}
        <li aria-current="true">${span(path.at(-1))}</li>
      </ol>
    </nav>`;
}

function Crumb({ text, onClick }) {
  return html`<li><button class="quiet" onClick=${onClick}>${text}</button></li>`;
}

function span(node) {
  return `${whole(node.start)} to ${whole(node.start + node.tokens)}`;
}
