// The picture's data as tables: for screen readers, for searching, for copying.

import { age, percent, whole } from "../parts/format.js";
import { Component, html } from "../parts/html.js";

export class Tables extends Component {
  state = { isOpen: false };

  render({ snapshot, ages }, { isOpen }) {
    return html`
      <details class="tables" onToggle=${(event) => this.setState({ isOpen: event.target.open })}>
        <summary>The same as tables</summary>
        ${isOpen && html`
          <${Nodes} snapshot=${snapshot} ages=${ages} />
          <${Requests} requests=${snapshot.requests} />`}
      </details>`;
  }
}

function Nodes({ snapshot, ages }) {
  const hasDisk = snapshot.disk !== null;
  const names = new Map(snapshot.namespaces.map(({ id, name }) => [id, name]));
  return html`
    <${Table} caption="Runs of tokens in the cache"
      heads=${["Run", "After run", "Namespace", "From token", "Tokens", "Blocks", "In use by",
               "Last used", "To be evicted", ...(hasDisk ? ["Tokens on disk"] : [])]}
      rows=${snapshot.nodes.map((node) => [
        node.id, node.parent ?? "the beginning", names.get(node.namespace) ?? "",
        whole(node.start), whole(node.tokens), whole(node.blocks), whole(node.holders),
        node.holders ? "in use" : age(ages(node)), node.next_evicted ?? "",
        ...(hasDisk ? [whole(node.disk_tokens)] : []),
      ])} />`;
}

function Requests({ requests }) {
  return html`
    <${Table} caption="Requests"
      heads=${["Request", "After run", "State", "Prompt tokens", "From the cache", "Computed",
               "Output"]}
      rows=${requests.map((request) => [
        request.id, request.node ?? "the beginning", request.state, whole(request.prompt_tokens),
        `${whole(request.cached_tokens)} (${percent(shareOf(request))})`,
        whole(request.computed_tokens), whole(request.output_tokens),
      ])} />`;
}

function shareOf({ cached_tokens, prompt_tokens }) {
  return prompt_tokens ? cached_tokens / prompt_tokens : 0;
}

function Table({ caption, heads, rows }) {
  return html`
    <div class="scroll" tabindex="0" role="region" aria-label=${caption}>
      <table>
        <caption>${caption}</caption>
        <thead><tr>${heads.map((head) => html`<th scope="col">${head}</th>`)}</tr></thead>
        <tbody>
          ${rows.map((row) => html`<tr>${row.map((cell) => html`<td>${cell}</td>`)}</tr>`)}
          ${rows.length === 0 && html`<tr><td colspan=${heads.length}>none</td></tr>`}
        </tbody>
      </table>
    </div>`;
}
