// Elements of the tokens that marked has parsed. Unknown ones are shown as text.

import { Code } from "../parts/code.js";
import { html } from "../parts/html.js";

const DEEPEST = 16;
const SCHEMES = new Set(["http:", "https:", "mailto:"]);
const ENTITIES = { "&amp;": "&", "&lt;": "<", "&gt;": ">", "&quot;": '"', "&#39;": "'", "&nbsp;": "\u00a0" };

const BLOCKS = {
  space: () => "",
  def: () => "",
  hr: () => html`<hr />`,
  code: ({ text, lang }) => html`<${Code} text=${text} name=${lang?.split(/\s/, 1)[0]} />`,
  paragraph: ({ tokens }, depth) => html`<p>${inline(tokens, depth)}</p>`,
  text: (token, depth) => (token.tokens ? inline(token.tokens, depth) : readable(token)),
  blockquote: ({ tokens }, depth) => html`<blockquote>${blocks(tokens, depth)}</blockquote>`,
  heading({ depth: level, tokens }, depth) {
    return html`<${`h${Math.min(6, level + 2)}`}>${inline(tokens, depth)}<//>`;
  },
  list({ ordered, start, items }, depth) {
    const points = items.map(({ tokens }) => html`<li>${blocks(tokens, depth)}</li>`);
    return ordered ? html`<ol start=${start}>${points}</ol>` : html`<ul>${points}</ul>`;
  },
  table({ header, rows, align }, depth) {
    const cells = (Cell, row) => row.map(({ tokens }, column) => html`
      <${Cell} style=${{ textAlign: align[column] ?? "" }}>${inline(tokens, depth)}<//>`);
    return html`
      <div class="table" tabindex="0" role="group" aria-label="A table">
        <table>
          <thead><tr>${cells("th", header)}</tr></thead>
          <tbody>${rows.map((row) => html`<tr>${cells("td", row)}</tr>`)}</tbody>
        </table>
      </div>`;
  },
};

const SPANS = {
  text: (token, depth) => (token.tokens ? inline(token.tokens, depth) : readable(token)),
  escape: ({ text }) => text,
  br: () => html`<br />`,
  codespan: ({ text }) => html`<code>${text}</code>`,
  strong: ({ tokens }, depth) => html`<strong>${inline(tokens, depth)}</strong>`,
  em: ({ tokens }, depth) => html`<em>${inline(tokens, depth)}</em>`,
  del: ({ tokens }, depth) => html`<del>${inline(tokens, depth)}</del>`,
  checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
  link: (token, depth) => link(token, inline(token.tokens, depth)),
  image: (token) => link(token, token.text || token.href), // the page loads nothing from elsewhere
};

/** One block. */
export function block(token, depth = 0) {
  return element(BLOCKS, token, depth) ?? html`<p>${token.raw}</p>`;
}

function blocks(tokens, depth) {
  return tokens.map((token) => element({ ...SPANS, ...BLOCKS }, token, depth) ?? token.raw);
}

function inline(tokens, depth) {
  return tokens.map((token) => element(SPANS, token, depth) ?? token.raw);
}

/** Undefined for what is not known, or too deep for a page. */
function element(kinds, token, depth) {
  return Object.hasOwn(kinds, token.type) && depth < DEEPEST
    ? kinds[token.type](token, depth + 1) : undefined;
}

function link({ href, raw }, children) {
  const target = safe(href);
  return target === null ? raw : html`
    <a href=${target} target="_blank" rel="noopener noreferrer">${children}</a>`;
}

/** The address as browsers read it, or null for one that may do something here. */
function safe(href) {
  if (!URL.canParse(href)) return null;
  const url = new URL(href);
  return SCHEMES.has(url.protocol) ? url.href : null;
}

function readable({ text }) {
  return text.replace(/&(?:amp|lt|gt|quot|#39|nbsp);/g, (entity) => ENTITIES[entity]);
}
