// How many of the tokens that were written had been drafted.

import { whole } from "./format.js";
import { html } from "./html.js";

const TITLE = "of these tokens: drafted and right, so that they did not take a step each";

export function Drafted({ tokens }) {
  return tokens > 0 && html`<span title=${TITLE}>${whole(tokens)} drafted</span>`;
}
