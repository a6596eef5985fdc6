// What is served here, for whoever may use it.

import { ask } from "./api.js";

/** The models of /v1/models, and the agents that `rootstock launch` knows. Throws as ask() does. */
export async function served() {
  const [models, { agents }] = await Promise.all([read("v1/models"), read("dashboard/agents")]);
  return { served: models.data, agents };
}

async function read(path) {
  return (await ask(path)).json();
}
