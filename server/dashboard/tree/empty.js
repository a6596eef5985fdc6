// What a visitor sees before anything is cached: what to do about it.

import { address, hasKey } from "../net/api.js";
import { html } from "../parts/html.js";

export function Empty({ disk }) {
  const isOnDisk = disk?.entries > 0;
  return html`
    <div class="empty">
      <h3>${isOnDisk ? "Nothing is in memory yet" : "Nothing is cached yet"}</h3>
      ${isOnDisk && html`<p>What is on disk is loaded when a prompt begins like it.</p>`}
      <p>Send a message in the playground, point a client at <code>${address("v1")}</code>, or paste
        this into a terminal. The tokens of the prompt appear here as they are computed; send it
        again, and they are found instead.</p>
      <pre tabindex="0" aria-label="A request to try">${curl()}</pre>
    </div>`;
}

function curl() {
  const key = hasKey() ? ` \\\n  -H 'Authorization: Bearer YOUR_KEY'` : "";
  const body = '{"messages": [{"role": "user", "content": "How does the cache work?"}]}';
  return `curl ${address("v1/chat/completions")}${key} \\
  -H 'Content-Type: application/json' \\
  -d '${body}'`;
}
