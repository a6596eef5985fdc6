// What a visitor sees before anything is cached: what to do about it.

import { curl } from "../connect/lines.js";
import { address } from "../net/api.js";
import { Code } from "../parts/code.js";
import { html } from "../parts/html.js";

export function Empty({ disk, question, named }) {
  const isOnDisk = disk?.entries > 0;
  return html`
    <div class="empty">
      <h3>${isOnDisk ? "Nothing is in memory yet" : "Nothing is cached yet"}</h3>
      ${isOnDisk && html`<p>What is on disk is loaded when a prompt begins like it.</p>`}
      <p>Send a message in the playground, point a client at <code>${address("v1")}</code>, or paste
        this into a terminal. The tokens of the prompt appear here as they are computed; send it
        again, and they are found instead.</p>
      <${Code} text=${curl(question, named)} name="A request to try" />
    </div>`;
}
