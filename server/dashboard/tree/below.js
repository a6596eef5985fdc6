// Says how much more there is below what a box shows that scrolls.

import { count } from "../parts/format.js";
import { Component, html } from "../parts/html.js";

const PAGE = 0.9; // of what is seen, so that one finds one's place

export class Below extends Component {
  state = { bars: 0 };

  componentDidMount() {
    this.measure();
  }

  componentDidUpdate() {
    this.measure();
  }

  render({ children }, { bars }) {
    return html`
      <div class="scrolled">
        <div class="namespaces" ref=${(element) => (this.box = element)}
             onScroll=${() => this.measure()}>${children}</div>
        ${bars > 0 && html`
          <button class="quiet below" onClick=${() => this.turn()}>
            ▾ ${count(bars, "more run")} below</button>`}
      </div>`;
  }

  measure() {
    const end = this.box.getBoundingClientRect().bottom;
    const isBelow = (bar) => bar.getBoundingClientRect().top >= end;
    const isCut = this.box.scrollHeight > this.box.clientHeight;
    const bars = isCut ? [...this.box.querySelectorAll(".bar .body")].filter(isBelow).length : 0;
    if (bars !== this.state.bars) this.setState({ bars });
  }

  turn() {
    this.box.scrollBy({ top: this.box.clientHeight * PAGE });
  }
}
