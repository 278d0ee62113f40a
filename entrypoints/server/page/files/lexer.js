// marked with bounds. Its expressions take time that grows with the square of a text's length, or worse, and nothing
// stops one that runs: so it is given small pieces, and what is too long, too deep or too late stays as it is written.

import { Lexer, Tokenizer } from "./vendor/marked.esm.js";

export const MOST_BLOCK = 12_000; // characters: a list, a table, a quotation
export const MOST_WORK = 4_000_000; // characters of a block times its lines, at each of which marked may look at all
export const MOST_INLINE = 2_000; // of a paragraph, a cell
export const MOST_NESTED = 10;
export const MOST_CELLS = 5_000; // of a table; marked fills its rows up
export const MOST_MS = 150; // after which no further piece is begun

const FENCE = /^( {0,3})(`{3,}(?=[^`]*$)|~{3,})(.*)$/;
const ITEM = /^(?:[*+-]|\d{1,9}[.)])(?:[ \t]|$)/;

class BoundedTokenizer extends Tokenizer {
  table(source) {
    const columns = source.split("\n", 2)[1]?.split("|").length ?? 0;
    return columns * source.split("\n").length > MOST_CELLS ? undefined : super.table(source);
  }
}

class BoundedLexer extends Lexer {
  ends = performance.now() + MOST_MS;
  depth = 0;

  blockTokens(source, tokens = [], last = false) {
    const most = Math.min(MOST_BLOCK, MOST_WORK / source.split("\n").length);
    return this.bounded(source, tokens, most, () => super.blockTokens(source, tokens, last));
  }

  inlineTokens(source, tokens = []) {
    return this.bounded(source, tokens, MOST_INLINE, () => super.inlineTokens(source, tokens));
  }

  bounded(source, tokens, most, split) {
    if (source.length > most || this.depth >= MOST_NESTED || performance.now() > this.ends) {
      this.state.top = true; // as `blockTokens` leaves it
      tokens.push({ type: "plain", raw: source });
      return tokens;
    }
    this.depth++;
    try {
      return split();
    } finally {
      this.depth--;
    }
  }
}

/** marked's tokens of a text, and "plain" ones, whose `raw` is not split. */
export function lex(text) {
  const lexer = new BoundedLexer({ gfm: true, breaks: true, tokenizer: new BoundedTokenizer() });
  const tokens = [];
  for (const piece of pieces(text.replace(/\r\n?/g, "\n"))) {
    if (piece.type === "code") tokens.push(piece);
    else tokens.push(...lexer.blockTokens(piece.raw));
  }
  for (const { src, tokens: found } of lexer.inlineQueue) {
    lexer.state.inRawBlock = false;
    lexer.inlineTokens(src, found);
  }
  return tokens;
}

/** What stands on its own, split at blank lines, in one go: code between fences, which may be long, and the rest. A
 * list, whose items blank lines may separate, is one piece, or some where it is long. */
function pieces(text) {
  const found = [];
  const lines = text.split("\n");
  let piece = [];
  let size = 0;
  let isList = false;
  let wasBlank = false;
  const close = () => {
    if (piece.length) found.push({ raw: piece.join("\n").trimEnd() });
    piece = [];
    size = 0;
    isList = false;
  };
  for (let at = 0; at < lines.length; at++) {
    const line = lines[at];
    const fence = FENCE.exec(line);
    if (fence && !(isList && fence[1])) {
      close();
      const end = fenceEnd(lines, at + 1, fence[2]);
      found.push(code(lines.slice(at + 1, end), fence));
      at = end;
      continue;
    }
    const isItem = ITEM.test(line);
    const isBlank = !line.trim();
    const goesOn = isBlank || /^[ \t]/.test(line) || (isList && isItem);
    const isLong = size > MOST_BLOCK / 2 || size * piece.length > MOST_WORK / 2;
    if ((wasBlank && !goesOn) || (isList && isItem && isLong)) close();
    if (piece.length || !isBlank) piece.push(line);
    size += line.length + 1;
    isList ||= isItem;
    wasBlank = isBlank;
  }
  close();
  return found;
}

function fenceEnd(lines, from, mark) {
  for (let at = from; at < lines.length; at++) {
    const [, , closing, rest] = FENCE.exec(lines[at]) ?? [];
    if (closing?.startsWith(mark) && !rest.trim()) return at;
  }
  return lines.length - (lines.at(-1) === "");
}

function code(lines, [, { length: indent }, , about]) {
  const strip = (line) => line.slice(Math.min(indent, line.search(/[^ ]|$/)));
  return { type: "code", lang: about.trim(), text: lines.map(strip).join("\n") };
}
