// Markup as tagged templates. Text between tags becomes text nodes, so whatever a prompt or an
// answer says is shown and never parsed.

import htm from "../vendor/htm.mjs";
import { Component, h, render } from "../vendor/preact.mjs";

export const html = htm.bind(h);
export { Component, render };
