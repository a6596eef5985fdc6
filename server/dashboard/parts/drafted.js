// How many of the generated tokens were drafted.

import { whole } from "./format.js";
import { html } from "./html.js";

const TITLE = "Tokens that a draft predicted correctly: they needed no step of their own";

export function Drafted({ tokens }) {
  return tokens > 0 && html`<span title=${TITLE}>${whole(tokens)} from drafts</span>`;
}
