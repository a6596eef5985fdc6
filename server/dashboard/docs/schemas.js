// JSON Schema as lists of fields. What lies deeper is made when it is opened: schemas are recursive.

import { element } from "./elements.js";

/** What may follow the type: a schema's keyword, and how its value is put. */
const LIMITS = [
  [["minimum", "maximum"], ""], [["minLength", "maxLength"], " characters"],
  [["minItems", "maxItems"], " items"], [["minProperties", "maxProperties"], " entries"],
];
const LARGE = 1e15; // a limit that is only that of the number's type says nothing

export class Schemas {
  constructor(api) {
    this.api = api;
  }

  /** One field, as a list's item. */
  field(name, schema, isRequired, place = "") {
    const notes = [place, isRequired ? "required" : "", this.defaultText(schema)].filter(Boolean);
    const line = [element("code", { class: "name" }, name), " ",
      element("span", { class: "type" }, this.typeText(schema))];
    if (notes.length) line.push(" ", element("span", { class: "notes" }, notes.join(", ")));
    const about = schema.description ? [element("p", {}, schema.description)] : [];
    return element("li", {}, element("div", {}, ...line), ...about, ...this.deeper(schema));
  }

  /** What a schema is, for a place that has named it: its fields, or else its type. */
  inside(schema) {
    const found = this.resolved(schema);
    const about = found.description ? [element("p", {}, found.description)] : [];
    if (found.properties) return [...about, this.fields(found)];
    return [...about, element("p", { class: "type" }, this.typeText(found)), ...this.deeper(found)];
  }

  fields({ properties, required = [] }) {
    const others = Object.keys(properties).filter((name) => !required.includes(name));
    const rows = (names, isRequired) => names.filter((name) => properties[name])
      .map((name) => this.field(name, properties[name], isRequired));
    return element("ul", { class: "fields" }, ...rows(required, true), ...rows(others, false));
  }

  /** The parts of a type that have fields of their own, each to be opened. */
  deeper(schema) {
    return [...this.parts(schema)].map(([name, part]) => {
      const shown = element("details", { class: "schema" }, element("summary", {}, name));
      shown.addEventListener("toggle", () => shown.append(...this.inside(part)), { once: true });
      return shown;
    });
  }

  /** Schemas by name, as far as they say more than the type's text does. */
  parts(schema, found = new Map()) {
    if (schema.$ref) {
      const target = this.resolved(schema);
      if (target.properties || target.anyOf || target.oneOf) found.set(nameOf(schema), schema);
    } else if (schema.properties) {
      found.set(schema.title ?? "object", schema);
    } else {
      const { anyOf = [], oneOf = [], items, contentSchema, additionalProperties } = schema;
      for (const part of [...anyOf, ...oneOf, items, contentSchema, additionalProperties]) {
        if (part && typeof part === "object") this.parts(part, found);
      }
    }
    return found;
  }

  typeText(schema) {
    const { anyOf, oneOf } = schema;
    if (schema.$ref) return this.referenceText(schema);
    if (anyOf ?? oneOf) return [...new Set((anyOf ?? oneOf).map((one) => this.typeText(one)))].join(" or ");
    if ("const" in schema) return JSON.stringify(schema.const);
    if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" or ");
    if (schema.contentSchema) return `JSON of ${this.typeText(schema.contentSchema)}`;
    if (schema.type === "array") return `array of ${this.typeText(schema.items ?? {})}${limits(schema)}`;
    return (schema.type ?? "anything") + limits(schema);
  }

  referenceText(schema) {
    const target = this.resolved(schema);
    return target.enum || "const" in target ? this.typeText(target) : nameOf(schema);
  }

  resolved(schema) {
    return schema.$ref ? this.api.components.schemas[nameOf(schema)] : schema;
  }

  defaultText(schema) {
    const value = schema.default;
    const says = value !== undefined && value !== null && value !== "";
    return says ? `default ${JSON.stringify(value)}` : "";
  }
}

const nameOf = ({ $ref }) => $ref.slice($ref.lastIndexOf("/") + 1);

function limits(schema) {
  const said = LIMITS.flatMap(([[least, most], unit]) => range(schema[least], schema[most], unit));
  if (schema.pattern) said.push(`pattern ${schema.pattern}`);
  if (schema.format) said.push(schema.format);
  return said.length ? ` (${said.join(", ")})` : "";
}

function range(least, most, unit) {
  const low = least === undefined || Math.abs(least) > LARGE ? undefined : least;
  const high = most === undefined || most > LARGE ? undefined : most;
  if (low !== undefined && high !== undefined) return [`${low} to ${high}${unit}`];
  if (high !== undefined) return [`at most ${high}${unit}`];
  return low === undefined || low === 0 && unit ? [] : [`at least ${low}${unit}`];
}
