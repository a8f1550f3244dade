/* Colours for code: comments, strings, numbers and keywords, by families of languages. A guide for the eye, no parser. */

const LONGEST = 60000;
const setOf = (text) => new Set(text.split(" "));
const C_LIKE = "auto bool break case catch char class const continue default delete do double else enum extern false final float for "
  + "if import inline int interface long namespace new null nullptr override package private protected public return short signed "
  + "sizeof static struct super switch template this throw true try typedef union unsigned using virtual void volatile while";
const KEYWORDS = {
  python: setOf("and as assert async await break class continue def del elif else except False finally for from global if import in is "
    + "lambda match None nonlocal not or pass raise return self True try while with yield"),
  script: setOf("async await break case catch class const continue debugger default delete do else enum export extends false finally for "
    + "from function if implements import in instanceof interface let new null of return static super switch this throw true try type "
    + "typeof undefined var void while yield"),
  c: setOf(C_LIKE),
  rust: setOf("as async await bool break char const continue crate dyn else enum extern f32 f64 false fn for i32 i64 if impl in let loop "
    + "match mod move mut None Ok pub ref return self Self Some static str String struct super trait true type u8 u32 u64 unsafe use usize where while"),
  go: setOf("break case chan const continue default defer else fallthrough false for func go goto if import interface map nil package range "
    + "return select string struct switch true type var int error bool"),
  shell: setOf("case do done elif else esac exit export fi for function if in local return set shift source then until while cd echo sudo"),
  sql: setOf("add all alter and as asc between by case create delete desc distinct drop else end exists from group having in index inner insert "
    + "into is join key left like limit not null on or order outer primary right select set table then union update values view when where with"),
  data: setOf("true false null yes no"),
};
const FAMILY = {
  python: "python", py: "python", javascript: "script", js: "script", jsx: "script", typescript: "script", ts: "script", tsx: "script",
  c: "c", h: "c", cpp: "c", "c++": "c", cc: "c", java: "c", kotlin: "c", csharp: "c", cs: "c", swift: "c", php: "c", scala: "c",
  rust: "rust", rs: "rust", go: "go", bash: "shell", sh: "shell", shell: "shell", zsh: "shell", console: "shell", dockerfile: "shell",
  makefile: "shell", sql: "sql", json: "data", yaml: "data", yml: "data", toml: "data", ruby: "python", rb: "python", css: "c",
  html: "markup", xml: "markup", svg: "markup", r: "python",
};
const STRING = String.raw`"(?:\\[^]|[^"\\\n])*"?|'(?:\\[^]|[^'\\\n])*'?`;
const BLOCK = String.raw`\/\*[^]*?(?:\*\/|$)`;
const COMMENT = {
  python: String.raw`#[^\n]*`, shell: String.raw`#[^\n]*`, data: String.raw`#[^\n]*`, sql: String.raw`--[^\n]*|${BLOCK}`,
};
const LONG = { python: String.raw`"""[^]*?(?:"""|$)|'''[^]*?(?:'''|$)|`, script: "`(?:\\\\[^]|[^`\\\\])*`?|" };

function pattern(family) {
  if (family === "markup") return /(?<comment><!--[^]*?(?:-->|$))|(?<word><\/?[\w:-]+|\/?>)|(?<string>"[^"\n]*"?|'[^'\n]*'?)|[^<>"'/]+|[^]/gu;
  const comment = COMMENT[family] ?? String.raw`\/\/[^\n]*|${BLOCK}`;
  return new RegExp(`(?<comment>${comment})|(?<string>${LONG[family] ?? ""}${STRING})`
    + String.raw`|(?<number>\b\d[\w.]*)|(?<name>[\p{L}_$][\p{L}\p{N}_$]*)|\s+|[^]`, "gu");
}

/* Pieces of a text, each with the class of its colour or null. */
export function coloured(language, text) {
  const family = FAMILY[language.toLowerCase()];
  if (!family || text.length > LONGEST) return [[null, text]];
  const pieces = [];
  for (const found of text.matchAll(pattern(family))) {
    const kind = kindOf(found, KEYWORDS[family], family);
    if (pieces.length && pieces.at(-1)[0] === kind) pieces.at(-1)[1] += found[0];
    else pieces.push([kind, found[0]]);
  }
  return pieces;
}

function kindOf({ groups }, keywords, family) {
  if (groups.comment) return "comment";
  if (groups.string) return "string";
  if (groups.number) return "number";
  if (groups.word) return "keyword";
  if (groups.name && keywords.has(family === "sql" ? groups.name.toLowerCase() : groups.name)) return "keyword";
  return null;
}
