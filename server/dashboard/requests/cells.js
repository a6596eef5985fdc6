// The cells that rows of live and of finished requests have in common.

import { Drafted } from "../parts/drafted.js";
import { percent, rate, whole } from "../parts/format.js";
import { html } from "../parts/html.js";

/** A table for eyes and screen readers; where it is narrow, CSS makes a card of each row. */
export function Table({ name, caption, heads, children }) {
  return html`
    <table class="rows ${name}" role="table" aria-label=${caption}>
      <thead role="rowgroup">
        <tr role="row">${heads.map(([head, kind]) => html`
          <th role="columnheader" scope="col" class=${kind}>${head}</th>`)}</tr>
      </thead>
      <tbody role="rowgroup">${children}</tbody>
    </table>`;
}

/** `head` is shown next to it in a card. */
export function Cell({ kind = "", head = "", title, children }) {
  return html`<td role="cell" class=${kind} data-head=${head} title=${title}>${children}</td>`;
}

/** The program that sent it, and below that its route, its model if there are several, its address, and its key's name. */
export function Who({ request, ofSeveral }) {
  const { agent, route, model, client, key, sequences } = request;
  const about = [agent && route, ofSeveral && model, client, key !== client && key && `key ${key}`];
  return html`
    <${Cell} kind="who" title=${request.id}>
      ${agent ?? html`<code>${route}</code>`}${sequences > 1 && html` <span class="times">×${sequences}</span>`}
      <small>${about.filter(Boolean).join(", ")}</small>
    <//>`;
}

/** The prompt's tokens; `children` stand below them. */
export function Prompt({ request, children }) {
  return html`
    <${Cell} kind="number" head="Prompt">${whole(request.prompt_tokens)} ${children}<//>`;
}

/** The share of the prompt that was cached; nothing where no prompt was read. */
export function Cached({ request: { prompt_tokens, cached_tokens } }) {
  return prompt_tokens > 0 && html`<small>${percent(cached_tokens / prompt_tokens)} cached</small>`;
}

/** The generated tokens, their rate, and how many of them a draft had predicted. */
export function Output({ request }) {
  const { output_tokens: tokens, accepted_draft_tokens: drafted, tokens_per_second: speed } = request;
  return html`
    <${Cell} kind="number" head="Output">
      ${whole(tokens)} ${speed !== null && html`<small>${rate(speed)} tokens/s</small>`}
      ${drafted > 0 && html` <small><${Drafted} tokens=${drafted} /></small>`}
    <//>`;
}
