// TypeBox's schemas, as zod.mjs has zod's: `ENVIRONMENT=.clients/typebox node ... --keep`.

import { conform, installed } from "./schemas.mjs";

const { Type } = installed("@sinclair/typebox");

const point = { x: Type.Integer(), y: Type.Optional(Type.Number()) };
const cat = Type.Object({ kind: Type.Literal("cat"), n: Type.Integer() });
const dog = Type.Object({ kind: Type.Literal("dog"), s: Type.String() });

const types = {
  ...Object.fromEntries(
    [
      ...["Any", "Unknown", "String", "Number", "Integer", "Boolean", "Null", "Never", "BigInt"],
      ...["Date", "Symbol", "Uint8Array", "Undefined", "Void"],
    ].map((name) => [`Type.${name}()`, Type[name]()]),
  ),
  ...Object.fromEntries(
    [
      ...["date-time", "time", "date", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"],
      ...["url", "uri-reference", "uri-template", "json-pointer", "relative-json-pointer", "regex"],
      ...["iri", "iri-reference", "idn-email", "idn-hostname", "duration"],
      ...["json-pointer-uri-fragment", "iso-time", "iso-date-time"],
    ].map((format) => [`Type.String({ format: '${format}' })`, Type.String({ format })]),
  ),
  "Type.String({ minLength, maxLength })": Type.String({ minLength: 2, maxLength: 4 }),
  "Type.String({ pattern })": Type.String({ pattern: "^a+$" }),
  "Type.String({ contentEncoding })": Type.String({ contentEncoding: "base64" }),
  "Type.RegExp(/^a+$/)": Type.RegExp(/^a+$/),
  "Type.RegExp(/^a+$/i)": Type.RegExp(/^a+$/i),
  "Type.Number({ minimum, exclusiveMaximum })": Type.Number({ minimum: 1, exclusiveMaximum: 5 }),
  "Type.Integer({ multipleOf })": Type.Integer({ multipleOf: 5 }),
  "Type.Literal('a')": Type.Literal("a"),
  "Type.Literal(1)": Type.Literal(1),
  "Type.Enum({ A, B })": Type.Enum({ A: "a", B: 1 }),
  "Type.Array(Type.String())": Type.Array(Type.String()),
  "Type.Array({ minItems, maxItems })": Type.Array(Type.Integer(), { minItems: 1, maxItems: 2 }),
  "Type.Array({ uniqueItems })": Type.Array(Type.Integer(), { uniqueItems: true }),
  "Type.Array({ contains })": Type.Array(Type.Any(), { contains: Type.Integer() }),
  "Type.Tuple([Type.String(), Type.Integer()])": Type.Tuple([Type.String(), Type.Integer()]),
  "Type.Tuple([])": Type.Tuple([]),
  "Type.Object({})": Type.Object({}),
  "Type.Object({ x, y? })": Type.Object(point),
  "Type.Object({ additionalProperties: false })": Type.Object(point, {
    additionalProperties: false,
  }),
  "Type.Object({ additionalProperties })": Type.Object(point, {
    additionalProperties: Type.String(),
  }),
  "Type.Object({ minProperties: 1 })": Type.Object({ a: Type.String() }, { minProperties: 1 }),
  "Type.Partial(Type.Object())": Type.Partial(Type.Object(point)),
  "Type.Required(Type.Object())": Type.Required(Type.Object(point)),
  "Type.Pick(Type.Object())": Type.Pick(Type.Object(point), ["x"]),
  "Type.Omit(Type.Object())": Type.Omit(Type.Object(point), ["x"]),
  "Type.Mapped()": Type.Mapped(Type.Union([Type.Literal("a"), Type.Literal("b")]), () =>
    Type.Integer(),
  ),
  "Type.Composite()": Type.Composite([Type.Object(point), Type.Object({ z: Type.String() })]),
  "Type.KeyOf(Type.Object())": Type.KeyOf(Type.Object(point)),
  "Type.Index(Type.Object(), ['x'])": Type.Index(Type.Object(point), ["x"]),
  "Type.Const({ a: [1] })": Type.Const({ a: [1] }),
  "Type.Union([Type.String(), Type.Null()])": Type.Union([Type.String(), Type.Null()]),
  "Type.Union([cat, dog])": Type.Union([cat, dog]),
  "Type.Intersect([a, b])": Type.Intersect([
    Type.Object({ a: Type.String() }),
    Type.Object({ b: Type.Integer() }),
  ]),
  "Type.Intersect({ unevaluatedProperties: false })": Type.Intersect(
    [Type.Object({ a: Type.String() }), Type.Object({ b: Type.Integer() })],
    { unevaluatedProperties: false },
  ),
  "Type.Not(Type.String())": Type.Not(Type.String()),
  "Type.Extract()": Type.Extract(Type.Union([Type.Literal("a"), Type.Null()]), Type.String()),
  "Type.Exclude()": Type.Exclude(Type.Union([Type.Literal("a"), Type.Null()]), Type.String()),
  "Type.Record(Type.String(), Type.Integer())": Type.Record(Type.String(), Type.Integer()),
  "Type.Record(Type.Integer(), Type.Integer())": Type.Record(Type.Integer(), Type.Integer()),
  "Type.Record(Type.RegExp(/^x/), Type.Integer())": Type.Record(Type.RegExp(/^x/), Type.Integer()),
  "Type.Record(union of literals)": Type.Record(
    Type.Union([Type.Literal("a"), Type.Literal("b")]),
    Type.Integer(),
  ),
  "Type.TemplateLiteral('v${0|1}')": Type.TemplateLiteral("v${0|1}"),
  "Type.Uppercase(Type.Literal('a'))": Type.Uppercase(Type.Literal("a")),
  "Type.Recursive()": Type.Recursive(
    (This) => Type.Object({ value: Type.Integer(), next: Type.Optional(This) }),
    { $id: "Node" },
  ),
  "Type.Module().Import()": Type.Module({
    Node: Type.Object({ value: Type.Integer(), next: Type.Optional(Type.Ref("Node")) }),
  }).Import("Node"),
  "Type.Promise(Type.String())": Type.Promise(Type.String()),
  "Type.Function()": Type.Function([Type.String()], Type.Integer()),
  "Type.Transform()": Type.Transform(Type.String())
    .Decode((text) => text)
    .Encode((text) => text),
  "Type.Unsafe({ type: ['string', 'null'] })": Type.Unsafe({ type: ["string", "null"] }),
};

await conform("typebox", types);
