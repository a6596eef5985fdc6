// How to use this daemon from a terminal, a program or an agent.

import { Code } from "../parts/code.js";
import { whole } from "../parts/format.js";
import { Component, html } from "../parts/html.js";
import { baseUrl, curl, environment, launchLine, python } from "./lines.js";

/**
 * `model` as /v1/models lists it, `named` its name where there are several; `launch` as
 * /dashboard/agents has it. Only agents that the model can serve have a line.
 */
export class Connect extends Component {
  state = { chosen: null };

  render({ model, named, launch }, { chosen }) {
    const agents = launch.agents.filter((agent) => serves(model, agent));
    const lines = new Map([
      ...agents.map(({ name }) => [name, launchLine(launch.command, name, named)]),
      ["curl", curl("Hello", named)],
      ["Python", python(model.id)],
      ["Variables", environment()],
    ]);
    const name = lines.has(chosen) ? chosen : lines.keys().next().value;
    return html`
      <section class="card connect" id="connect" aria-labelledby="connect-title">
        <h2 id="connect-title">Connect a client</h2>
        <p class="muted">Any client of OpenAI's, Anthropic's or Ollama's API can use this daemon.</p>
        <${Code} text=${baseUrl()} name="Base URL" />
        <label>Client
          <select aria-label="Client" value=${name} onChange=${({ target }) => this.setState({ chosen: target.value })}>
            ${[...lines.keys()].map((each) => html`<option key=${each} value=${each}>${each}</option>`)}
          </select>
        </label>
        <${Code} key=${name} text=${lines.get(name)} name=${name} />
        ${agents.some((agent) => agent.name === name) && html`
          <p class="muted">Starts the agent on this daemon. Nothing is saved in its configuration.</p>`}
        <${Missing} model=${model} agents=${launch.agents.filter((agent) => !agents.includes(agent))} />
      </section>`;
  }
}

/** Before a model has been loaded its context and its tools are not known: then it may serve each. */
function serves(model, agent) {
  return hasTools(model, agent) && hasRoom(model, agent);
}

function hasTools({ tools }, { calls_tools }) {
  return tools !== false || !calls_tools;
}

function hasRoom({ max_model_len: tokens }, { context_tokens }) {
  return tokens === null || tokens === undefined || tokens >= context_tokens;
}

/** Which agents the model cannot serve, and why. */
function Missing({ model, agents }) {
  if (agents.length === 0) return null;
  const toolless = agents.filter((agent) => !hasTools(model, agent)).map(({ name }) => name);
  const short = agents.filter((agent) => hasTools(model, agent))
    .map(({ name, context_tokens }) => `${name} ${whole(context_tokens)}`);
  return html`
    <details>
      <summary>${agents.length} agents need another model</summary>
      ${short.length > 0 && html`
        <p class="muted">This model has a context of ${whole(model.max_model_len)} tokens. Needed
          are, for ${short.join(", for ")}.</p>`}
      ${toolless.length > 0 && html`
        <p class="muted">${toolless.join(", ")}: this model's chat template has no tool calls.</p>`}
    </details>`;
}
