// How to use this daemon from a terminal, a program or an agent.

import { Code } from "../parts/code.js";
import { html } from "../parts/html.js";
import { baseUrl, curl, environment, launch, python } from "./lines.js";

/** `model` as /v1/models lists it, `named` its name where there are several; `agents` by the names that `rootstock launch` has for them. */
export function Connect({ model, named, agents }) {
  const lines = [
    ["Base URL", baseUrl()],
    ["Variables", environment()],
    ...agents.map((agent) => [agent, launch(agent, named)]),
    ["curl", curl("Hello", named)],
    ["openai", python(model.id)],
  ];
  return html`
    <section class="card connect" id="connect" aria-labelledby="connect-title">
      <h2 id="connect-title">Connect a client</h2>
      <p class="muted">Whatever speaks OpenAI's API or Anthropic's can use this daemon. An agent is
        started, set up for this one time, where <code>rootstock</code> is installed.</p>
      <dl class="lines">${lines.map(([name, text]) => html`
        <div key=${name}><dt>${name}</dt><dd><${Code} text=${text} name=${name} /></dd></div>`)}</dl>
    </section>`;
}
