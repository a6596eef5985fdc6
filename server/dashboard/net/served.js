// What the daemon serves, also for users that may not see the cache.

import { ask } from "./api.js";

/** `served`: the models of /v1/models. `launch`: the command's name here and the agents that it can start. Throws as ask() does. */
export async function served() {
  const [models, launch] = await Promise.all([read("v1/models"), read("dashboard/agents")]);
  return { served: models.data, launch };
}

async function read(path) {
  return (await ask(path)).json();
}
