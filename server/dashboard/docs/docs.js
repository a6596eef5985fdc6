// /docs: the daemon's OpenAPI document as a page. Whatever comes from it goes in as text.

import { copy } from "../parts/clipboard.js";
import { quoted } from "../parts/shell.js";
import { element } from "./elements.js";
import { Schemas } from "./schemas.js";

const METHODS = ["get", "post", "put", "patch", "delete"];
const DOCUMENT = "/openapi.json";

async function main() {
  const state = document.getElementById("state");
  try {
    const answer = await fetch(DOCUMENT);
    if (!answer.ok) throw new Error(`it answers with ${answer.status}`);
    show(await answer.json());
    state.remove();
  } catch (error) {
    state.setAttribute("role", "alert");
    state.textContent = `${DOCUMENT} could not be read: ${error.message}`;
  }
}

function show(api) {
  const schemas = new Schemas(api);
  document.getElementById("version").textContent = api.info.version;
  for (const [title, routes] of sections(api)) {
    const id = `section-${slug(title)}`;
    document.getElementById("contents").append(contents(title, routes));
    document.getElementById("routes").append(
      element("section", { "aria-labelledby": id }, element("h2", { id }, title),
        ...routes.map((route) => routeElement(route, schemas))),
    );
  }
  openTarget(); // the browser looked for it before it was there
  window.addEventListener("hashchange", openTarget);
}

function openTarget() {
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (target instanceof HTMLDetailsElement) {
    target.open = true;
    target.scrollIntoView();
  }
}

/** The document's routes by their first tag, in the order of the document. */
function sections(api) {
  const found = new Map();
  for (const [path, item] of Object.entries(api.paths)) {
    for (const method of METHODS.filter((name) => item[name])) {
      const route = { method: method.toUpperCase(), path, ...item[method] };
      route.parameters = [...(item.parameters ?? []), ...(route.parameters ?? [])];
      const title = route.tags?.[0] ?? "Others";
      found.set(title, [...(found.get(title) ?? []), route]);
    }
  }
  return found;
}

function contents(title, routes) {
  const links = routes.map((route) =>
    element("li", {}, element("a", { href: `#${idOf(route)}` }, ...nameOf(route))));
  return element("div", {}, element("p", { class: "section" }, title), element("ul", {}, ...links));
}

function routeElement(route, schemas) {
  const summary = element("summary", {},
    element("h3", {}, ...nameOf(route)), element("span", { class: "about" }, route.summary ?? ""));
  const parts = [
    route.description && element("p", {}, route.description),
    route.security && element("p", {}, "Needs an API key."),
    example(route),
    route.parameters.length && parameters(route.parameters, schemas),
    route.requestBody && body(route.requestBody, schemas),
    answers(route.responses, schemas),
  ];
  return element("details", { id: idOf(route), class: "route" }, summary, ...parts.filter(Boolean));
}

function nameOf({ method, path }) {
  const name = element("span", { class: `method ${method.toLowerCase()}` }, method);
  return [name, " ", element("code", {}, path)];
}

const idOf = ({ method, path }) => slug(`${method} ${path}`);
const slug = (text) => text.toLowerCase().replace(/[^a-z0-9]+/g, "-").replace(/-$/, "");

function part(title, ...children) {
  return element("div", { class: "part" }, element("h4", {}, title), ...children);
}

function parameters(list, schemas) {
  const rows = list.map((parameter) => schemas.field(
    parameter.name, { description: parameter.description, ...parameter.schema },
    parameter.required, `in the ${parameter.in}`));
  return part("Parameters", element("ul", { class: "fields" }, ...rows));
}

function body({ content }, schemas) {
  return part("Body", ...contentElements(content, schemas));
}

/** A 200 is shown whole. Errors that are alike share a line. */
function answers(responses, schemas) {
  const alike = new Map();
  for (const [status, { content = {}, description }] of Object.entries(responses)) {
    const key = status < "400" ? status : JSON.stringify(content);
    const statuses = alike.get(key)?.statuses ?? [];
    alike.set(key, { content, statuses: [...statuses, `${status} ${description}`] });
  }
  const blocks = [...alike.values()].map(({ content, statuses }) =>
    element("div", { class: "answer" },
      element("p", { class: "statuses" }, statuses.sort().join(" · ")),
      ...contentElements(content, schemas)));
  return part("Answers", ...blocks);
}

function contentElements(content, schemas) {
  return Object.entries(content).map(([type, { schema, itemSchema }]) =>
    element("div", {},
      element("p", { class: "type" }, element("code", {}, type), itemSchema ? ", each event:" : ""),
      ...schemas.inside(schema ?? itemSchema ?? {})));
}

function example(route) {
  const command = curl(route);
  const shown = element("pre", { tabindex: "0" }, element("code", {}, command));
  return part("Example", shown, copyButton(command));
}

function copyButton(text) {
  const button = element("button", { type: "button" }, "Copy");
  button.addEventListener("click", async () => {
    button.textContent = await copy(text) ? "Copied" : "Not copied";
  });
  return button;
}

/** A path's parameters stand in capitals; those of the query only where they are required. */
function curl({ method, path, parameters, requestBody, security }) {
  const filled = path.replace(/\{([^}:]+)[^}]*\}/g, (_, name) => name.toUpperCase());
  const query = parameters.filter((one) => one.in === "query" && one.required)
    .map((one) => `${one.name}=${one.name.toUpperCase()}`).join("&");
  const words = [`curl ${quoted(location.origin + filled + (query && `?${query}`))}`];
  const body = requestBody?.content["application/json"]?.example;
  if (method !== "GET" && body === undefined) words[0] = words[0].replace("curl", `curl -X ${method}`);
  if (security) words.push('-H "Authorization: Bearer $ROOTSTOCK_API_KEY"');
  if (body !== undefined) {
    words.push("-H 'Content-Type: application/json'", `-d ${quoted(JSON.stringify(body, null, 2))}`);
  }
  return words.join(" \\\n  ");
}

await main();
