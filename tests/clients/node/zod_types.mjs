// Every type of zod that has a JSON Schema.

export const types = (z) => ({
  ...Object.fromEntries(
    [
      ...["string", "number", "int", "int32", "uint32", "float32", "float64", "boolean", "null"],
      ...["any", "unknown", "never", "json", "email", "url", "httpUrl", "uuid", "uuidv4", "uuidv6"],
      ...["uuidv7", "guid", "cuid", "cuid2", "ulid", "xid", "ksuid", "nanoid", "emoji", "ipv4"],
      ...["ipv6", "mac", "cidrv4", "cidrv6", "base64", "base64url", "hex", "e164", "jwt", "iban"],
      ...["creditCard", "currencyCode", "hostname", "file", "stringbool"],
    ].map((name) => [`z.${name}()`, z[name]()]),
  ),
  "z.iso.date()": z.iso.date(),
  "z.iso.time()": z.iso.time(),
  "z.iso.time({ precision: 3 })": z.iso.time({ precision: 3 }),
  "z.iso.datetime()": z.iso.datetime(),
  "z.iso.datetime({ offset: true })": z.iso.datetime({ offset: true }),
  "z.iso.datetime({ local: true })": z.iso.datetime({ local: true }),
  "z.iso.duration()": z.iso.duration(),
  "z.hash('sha256')": z.hash("sha256"),
  "z.hash('md5', { enc: 'base64' })": z.hash("md5", { enc: "base64" }),
  "z.email({ pattern: z.regexes.html5Email })": z.email({ pattern: z.regexes.html5Email }),
  "z.email({ pattern: z.regexes.rfc5322Email })": z.email({ pattern: z.regexes.rfc5322Email }),
  "z.email({ pattern: z.regexes.unicodeEmail })": z.email({ pattern: z.regexes.unicodeEmail }),
  "z.stringFormat('mine', /^a+$/)": z.stringFormat("mine", /^a+$/),
  "z.string().min(2).max(4)": z.string().min(2).max(4),
  "z.string().length(3)": z.string().length(3),
  "z.string().regex(/^a+$/)": z.string().regex(/^a+$/),
  "z.string().regex(/^a/).regex(/b$/)": z.string().regex(/^a/).regex(/b$/),
  "z.string().startsWith('a.')": z.string().startsWith("a."),
  "z.string().endsWith('z')": z.string().endsWith("z"),
  "z.string().includes('mid')": z.string().includes("mid"),
  "z.string().lowercase()": z.string().lowercase(),
  "z.string().uppercase()": z.string().uppercase(),
  "z.string().trim()": z.string().trim(),
  "z.templateLiteral(['v', z.int(), '.x'])": z.templateLiteral(["v", z.int(), ".x"]),
  "z.templateLiteral([z.enum(['a', 'b']), '-', z.string()])": z.templateLiteral([
    z.enum(["a", "b"]),
    "-",
    z.string(),
  ]),
  "z.number().gt(1).lt(5)": z.number().gt(1).lt(5),
  "z.number().gte(1).lte(5)": z.number().gte(1).lte(5),
  "z.number().positive()": z.number().positive(),
  "z.number().nonpositive()": z.number().nonpositive(),
  "z.number().multipleOf(5)": z.number().multipleOf(5),
  "z.int().min(3)": z.int().min(3),
  "z.literal('a')": z.literal("a"),
  "z.literal(['a', 1, null])": z.literal(["a", 1, null]),
  "z.enum(['a', 'b'])": z.enum(["a", "b"]),
  "z.enum({ A: 'a', One: 1 })": z.enum({ A: "a", One: 1 }),
  "z.array(z.string())": z.array(z.string()),
  "z.array(z.int()).min(1).max(3)": z.array(z.int()).min(1).max(3),
  "z.array(z.int()).length(2)": z.array(z.int()).length(2),
  "z.tuple([z.string(), z.int()])": z.tuple([z.string(), z.int()]),
  "z.tuple([z.string()], z.int())": z.tuple([z.string()], z.int()),
  "z.tuple([])": z.tuple([]),
  "z.object({ a, b? })": z.object({ a: z.string(), b: z.int().optional() }),
  "z.object({})": z.object({}),
  "z.strictObject({ a })": z.strictObject({ a: z.string() }),
  "z.looseObject({ a })": z.looseObject({ a: z.string() }),
  "z.object({ a }).catchall(z.int())": z.object({ a: z.string() }).catchall(z.int()),
  "z.object({ a }).partial()": z.object({ a: z.string() }).partial(),
  "z.object().extend()": z.object({ a: z.string() }).extend({ b: z.int() }),
  "z.record(z.string(), z.int())": z.record(z.string(), z.int()),
  "z.record(z.enum(['a', 'b']), z.int())": z.record(z.enum(["a", "b"]), z.int()),
  "z.partialRecord(z.enum(['a', 'b']), z.int())": z.partialRecord(z.enum(["a", "b"]), z.int()),
  "z.record(z.string().regex(/^x-/), z.int())": z.record(z.string().regex(/^x-/), z.int()),
  "z.record(z.string().min(2), z.int())": z.record(z.string().min(2), z.int()),
  "z.record(z.uuid(), z.int())": z.record(z.uuid(), z.int()),
  "z.record(z.email(), z.int())": z.record(z.email(), z.int()),
  "z.record(z.iso.date(), z.int())": z.record(z.iso.date(), z.int()),
  "z.record(z.templateLiteral(['v', z.int()]), z.int())": z.record(
    z.templateLiteral(["v", z.int()]),
    z.int(),
  ),
  "z.union([z.string(), z.int()])": z.union([z.string(), z.int()]),
  "z.xor([z.string(), z.int()])": z.xor([z.string(), z.int()]),
  "z.xor([z.object({ a }), z.object({ b })])": z.xor([
    z.object({ a: z.string() }),
    z.object({ b: z.int() }),
  ]),
  "z.discriminatedUnion('kind', ...)": z.discriminatedUnion("kind", [
    z.object({ kind: z.literal("cat"), n: z.int() }),
    z.object({ kind: z.literal("dog"), s: z.string() }),
  ]),
  "z.intersection(z.object({ a }), z.object({ b }))": z.intersection(
    z.object({ a: z.string() }),
    z.object({ b: z.int() }),
  ),
  "z.string().nullable()": z.string().nullable(),
  "z.string().default('a')": z.string().default("a"),
  "z.string().catch('a')": z.string().catch("a"),
  "z.string().readonly()": z.string().readonly(),
  "z.string().brand()": z.string().brand(),
  "z.string().describe('text')": z.string().describe("text"),
  "z.string().meta({ title, examples })": z.string().meta({ title: "T", examples: ["a"] }),
  "z.string().refine()": z.string().refine((text) => text !== "b"),
  "z.promise(z.string())": z.promise(z.string()),
  "z.lazy(() => z.string())": z.lazy(() => z.string()),
  "z.object() with a getter": recursive(z),
  "z.object() twice": twice(z),
});

function recursive(z) {
  const node = z.object({
    value: z.int(),
    get next() {
      return node.nullable();
    },
  });
  return node;
}

function twice(z) {
  const point = z.object({ x: z.int() }).meta({ id: "Point" });
  return z.object({ a: point, b: point });
}
