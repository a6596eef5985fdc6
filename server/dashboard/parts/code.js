// Text as it is typed, with a button that copies it.

import { copy } from "./clipboard.js";
import { Component, html } from "./html.js";

const SAID_MS = 2000;

/** `name` says what the text is; styles hide it where a label next to it does. */
export function Code({ text, name }) {
  return html`
    <div class="code">
      <span class="name" aria-hidden="true">${name}</span>
      <pre tabindex="0" aria-label=${name || "Code"}><code>${text}</code></pre>
      <${Copy} text=${text} name=${name} />
    </div>`;
}

class Copy extends Component {
  state = { said: "Copy" };

  componentWillUnmount() {
    clearTimeout(this.timer);
  }

  render({ name }, { said }) {
    return html`
      <button type="button" class="copy" aria-label=${name ? `${said}: ${name}` : said}
              onClick=${() => this.copy()}>${said}</button>`;
  }

  async copy() {
    const isCopied = await copy(this.props.text);
    clearTimeout(this.timer);
    this.setState({ said: isCopied ? "Copied" : "Not copied" });
    this.timer = setTimeout(() => this.setState({ said: "Copy" }), SAID_MS);
  }
}
