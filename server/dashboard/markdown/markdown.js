// Markdown that may still be growing.

import { Component, html } from "../parts/html.js";
import { Blocks } from "./blocks.js";
import { block } from "./elements.js";

/** `text` only ever grows; another text needs another key. */
export class Markdown extends Component {
  blocks = new Blocks();
  length = 0;

  shouldComponentUpdate({ text }) {
    return text !== this.props.text;
  }

  render({ text }) {
    this.blocks.append(text.slice(this.length));
    this.length = text.length;
    const { closed, open } = this.blocks;
    return html`
      <div class="text markdown">
        ${[...closed, ...open].map((token, index) => html`
          <${Block} key=${index} token=${token} />`)}
      </div>`;
  }
}

/** Made again only when it has been read again. */
class Block extends Component {
  shouldComponentUpdate({ token }) {
    return token !== this.props.token;
  }

  render({ token }) {
    return block(token);
  }
}
