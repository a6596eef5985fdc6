// Words of a command line.

/** A word as a POSIX shell reads it. */
export function quoted(text) {
  return /^[\w./:-]+$/.test(text) ? text : `'${text.replaceAll("'", String.raw`'\''`)}'`;
}
