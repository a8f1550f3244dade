/* Markdown as DOM nodes. The text is a stranger's: it becomes text nodes and elements of a fixed list, never HTML.
 *
 * What is read: headings, paragraphs, lists, quotes, tables, rules, fenced code, emphasis, code, links. Pictures and
 * relative links are not followed; a link goes to http, https or mailto alone and shows the host that it leads to. Work is
 * linear in the text's length but for bounds below. */

import { make } from "./dom.js";
import { coloured } from "./highlight.js";
import { t } from "./strings.js";

const DEEPEST = 12;
const MOST_OPEN = 40;
const LONGEST_LABEL = 500;
const LONGEST_ADDRESS = 2000;
const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^`\s]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+(.*)$/;
const RULE = /^ {0,3}(?:(?:\*[ \t]*){3,}|(?:-[ \t]*){3,}|(?:_[ \t]*){3,})$/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?: +(.*)|)$/;
const TURNED = /[\u202a-\u202e\u2066-\u2069]/;

/* Shows a text in an element; blocks that have not changed since the last time stay. */
export function show(element, text) {
  const blocks = parse(text.replace(/\r\n?/g, "\n").split("\n"), 0);
  blocks.forEach((block, place) => {
    const before = element.children[place];
    if (before?.source === block.source) return;
    const after = BUILD[block.kind](block);
    after.source = block.source;
    if (before) before.replaceWith(after);
    else element.append(after);
  });
  while (element.children.length > blocks.length) element.lastElementChild.remove();
}

function parse(lines, depth) {
  const blocks = [];
  for (let at = 0; at < lines.length;) {
    if (lines[at].trim() === "") { at += 1; continue; }
    const block = READ.map((read) => read(lines, at, depth)).find(Boolean) ?? paragraph(lines, at);
    block.source = `${block.kind}\n${lines.slice(at, block.end).join("\n")}`;
    blocks.push(block);
    at = block.end;
  }
  return blocks;
}

function fence(lines, at) {
  const [, mark, language] = FENCE.exec(lines[at]) ?? [];
  if (!mark) return null;
  const closes = (line) => line.trim().length >= mark.length && line.trim().replaceAll(mark[0], "") === "";
  let end = at + 1;
  while (end < lines.length && !closes(lines[end])) end += 1;
  return { kind: "code", language, text: lines.slice(at + 1, end).join("\n"), end: Math.min(end + 1, lines.length) };
}

function heading(lines, at) {
  const [, marks, text] = HEADING.exec(lines[at]) ?? [];
  return marks ? { kind: "heading", level: marks.length, text: text.replace(/(?:^|[ \t])#+$/, ""), end: at + 1 } : null;
}

function rule(lines, at) {
  return RULE.test(lines[at]) ? { kind: "rule", end: at + 1 } : null;
}

function quote(lines, at, depth) {
  let end = at;
  while (end < lines.length && /^ {0,3}>/.test(lines[end])) end += 1;
  if (end === at || depth >= DEEPEST) return null;
  return { kind: "quote", inner: parse(lines.slice(at, end).map((line) => line.replace(/^ {0,3}> ?/, "")), depth + 1), end };
}

function indent(line) {
  return line.length - line.trimStart().length;
}

/* The items of a list; a line that stands in by two or more belongs to the item above it. */
function list(lines, at, depth) {
  const first = ITEM.exec(lines[at]);
  if (!first || depth >= DEEPEST) return null;
  const ordered = (found) => /\d/.test(found[2]);
  const base = first[1].length;
  const items = [];
  let end = at;
  while (end < lines.length) {
    const line = lines[end];
    const found = ITEM.exec(line);
    const blank = line.trim() === "";
    if (found && indent(line) < base + 2) {
      if (RULE.test(line) || ordered(found) !== ordered(first) || indent(line) < base) break;
      items.push([found[3] ?? ""]);
    } else if (blank || indent(line) >= base + 2) {
      items.at(-1).push(blank ? "" : line.slice(Math.min(indent(line), base + first[2].length + 1)));
    } else if (items.at(-1).at(-1) === "" || starts(lines, end)) break;
    else items.at(-1).push(line.trimStart());
    end += 1;
  }
  return { kind: "list", ordered: ordered(first), start: parseInt(first[2], 10), items: items.map((item) => parse(item, depth + 1)), end };
}

function cells(line) {
  return line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "").split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function table(lines, at) {
  if (!lines[at].includes("|") || !(lines[at + 1] ?? "").includes("-")) return null;
  const head = cells(lines[at]);
  const marks = cells(lines[at + 1]);
  if (marks.length !== head.length || !marks.every((mark) => /^:?-+:?$/.test(mark))) return null;
  let end = at + 2;
  while (end < lines.length && lines[end].includes("|")) end += 1;
  const side = (mark) => (mark.endsWith(":") ? (mark.startsWith(":") ? "center" : "right") : "left");
  return { kind: "table", head, sides: marks.map(side), rows: lines.slice(at + 2, end).map(cells), end };
}

function starts(lines, at) {
  const line = lines[at];
  return FENCE.test(line) || HEADING.test(line) || RULE.test(line) || /^ {0,3}>/.test(line) || ITEM.test(line) || table(lines, at) !== null;
}

function paragraph(lines, at) {
  let end = at + 1;
  while (end < lines.length && lines[end].trim() !== "" && !starts(lines, end)) end += 1;
  return { kind: "paragraph", text: lines.slice(at, end).map((line) => line.trimStart()).join("\n").trimEnd(), end };
}

const READ = [fence, heading, rule, quote, list, table];

const BUILD = {
  code: ({ language, text }) => codeBlock(language, text),
  heading: ({ level, text }) => make(`h${Math.min(level + 2, 6)}`, { dir: "auto" }, ...inline(text)),
  rule: () => make("hr"),
  quote: ({ inner }) => make("blockquote", {}, ...inner.map(built)),
  list: ({ ordered, start, items }) => make(ordered ? "ol" : "ul", ordered ? { start } : {}, ...items.map(item)),
  table: (block) => tableOf(block),
  paragraph: ({ text }) => make("p", { dir: "auto" }, ...inline(text)),
};

function built(block) {
  return BUILD[block.kind](block);
}

/* An item of one paragraph is its text alone. */
function item(blocks) {
  const nodes = blocks.flatMap((block, place) => (place === 0 && block.kind === "paragraph" ? inline(block.text) : [built(block)]));
  return make("li", { dir: "auto" }, ...nodes);
}

function tableOf({ head, sides, rows }) {
  const row = (kind) => (line) => make("tr", {}, ...head.map((_, place) => make(kind, { class: sides[place] }, ...inline(line[place] ?? ""))));
  return make("div", { class: "table", tabindex: "0", role: "group", "aria-label": t("table") },
    make("table", {}, make("thead", {}, row("th")(head)), make("tbody", {}, ...rows.map(row("td")))));
}

function codeBlock(language, text) {
  const button = make("button", { type: "button", class: "copy" }, t("copy"));
  button.copies = text;
  return make("div", { class: "code" },
    make("div", { class: "code-head" }, make("span", {}, language || t("code")), button),
    make("pre", { tabindex: "0", role: "group", "aria-label": t("code") }, make("code", { dir: "ltr" }, ...coloured(language, text).map(
      ([kind, piece]) => (kind ? make("span", { class: kind }, ...plain(piece)) : plain(piece))).flat())));
}

/* Text nodes; signs that turn the direction of text, by which it may read other than it is, are named instead. */
function plain(text) {
  if (!TURNED.test(text)) return [text];
  return text.split(/([\u202a-\u202e\u2066-\u2069])/).filter(Boolean).map((piece) => (TURNED.test(piece)
    ? make("span", { class: "turned" }, `U+${piece.codePointAt(0).toString(16).toUpperCase()}`) : piece));
}

/* Emphasis is read with a stack of what is open: a mark closes the nearest of its kind, and what is open above it stays text. */
export function inline(text, depth = 0) {
  const open = [{ mark: "", length: 0, nodes: [] }];
  const ends = new Map();
  let held = "";
  const flush = () => {
    if (held) open.at(-1).nodes.push(...plain(held));
    held = "";
  };
  for (let at = 0; at < text.length;) {
    const sign = text[at];
    const special = SPECIAL[sign]?.(text, at, depth, ends);
    if (special) {
      flush();
      open.at(-1).nodes.push(...special.nodes);
      at = special.end;
    } else if (sign === "\\" && /[!-/:-@[-`{-~]/.test(text[at + 1] ?? "")) {
      held += text[at + 1];
      at += 2;
    } else if (sign === "*" || sign === "_" || sign === "~") {
      let end = at;
      while (text[end] === sign) end += 1;
      const run = text.slice(at, end);
      flush();
      const [before, after] = [text[at - 1] ?? " ", text[end] ?? " "];
      const left = emphasise(open, run, before, after);
      held += left;
      at = end;
    } else {
      held += sign;
      at += 1;
    }
  }
  flush();
  while (open.length > 1) unopened(open);
  return open[0].nodes;
}

/* Closes and opens what a run of marks can; gives back the marks that stay text. */
function emphasise(open, run, before, after) {
  const sign = run[0];
  if (run.length > 3 || (sign === "~" && run.length !== 2)) return run;
  const within = sign === "_" && /[\p{L}\p{N}]/u.test(before) && /[\p{L}\p{N}]/u.test(after);
  let left = run.length;
  if (!/\s/.test(before) && !within) {
    for (;;) {
      const place = open.findLastIndex((one) => one.mark === sign);
      if (left === 0 || place < 1) break;
      while (open.length - 1 > place) unopened(open);
      const frame = open.at(-1);
      const used = Math.min(left, frame.length);
      const wrapped = wrap(sign, used, frame.nodes);
      left -= used;
      frame.length -= used;
      frame.nodes = [wrapped];
      if (frame.length === 0) {
        open.pop();
        open.at(-1).nodes.push(wrapped);
      }
    }
  }
  if (left === 0) return "";
  if (/\s/.test(after) || within || open.length > MOST_OPEN) return sign.repeat(left);
  open.push({ mark: sign, length: left, nodes: [] });
  return "";
}

function unopened(open) {
  const { mark, length, nodes } = open.pop();
  open.at(-1).nodes.push(mark.repeat(length), ...nodes);
}

function wrap(sign, length, nodes) {
  if (sign === "~") return make("del", {}, ...nodes);
  if (length === 1) return make("em", {}, ...nodes);
  const strong = make("strong", {}, ...nodes);
  return length === 2 ? strong : make("em", {}, strong);
}

const SPECIAL = {
  "`": codeSpan,
  "[": linked,
  "!": picture,
  "<": bracketed,
  h: address,
};

function codeSpan(text, at, _, ends) {
  let begin = at;
  while (text[begin] === "`") begin += 1;
  const marks = text.slice(at, begin);
  if (ends.get(marks) === false) return { nodes: [marks], end: begin };
  let end = text.indexOf(marks, begin);
  let close = end;
  while (end >= 0) {
    while (text[close] === "`") close += 1;
    if (close - end === marks.length) break;
    close = end = text.indexOf(marks, close);
  }
  if (end < 0) {
    ends.set(marks, false); // none of this length closes any more, so it is looked for once
    return { nodes: [marks], end: begin };
  }
  return { nodes: [make("code", { dir: "ltr" }, ...plain(text.slice(begin, end)))], end: close };
}

/* The label and the address of `[label](address)`; null where the text is none. */
function labelled(text, at) {
  let level = 0;
  for (let end = at; end < Math.min(text.length, at + LONGEST_LABEL); end += 1) {
    if (text[end] === "\\") end += 1;
    else if (text[end] === "[") level += 1;
    else if (text[end] === "]" && (level -= 1) === 0) {
      const rest = /^\(\s*<?([^\s<>()]*(?:\([^\s<>()]*\)[^\s<>()]*)*)>?(?:\s+["'(][^"')]*["')])?\s*\)/.exec(text.slice(end + 1, end + 1 + LONGEST_ADDRESS));
      return rest && { label: text.slice(at + 1, end), to: rest[1], end: end + 1 + rest[0].length };
    }
  }
  return null;
}

function linked(text, at, depth) {
  const found = depth < 2 ? labelled(text, at) : null;
  return found && { nodes: link(found.to, inline(found.label, 2), found.label), end: found.end };
}

function picture(text, at) {
  const found = text[at + 1] === "[" ? labelled(text, at + 1) : null;
  if (!found) return null;
  const label = `${t("picture")} ${found.label}`.trim();
  return { nodes: link(found.to, plain(label), label), end: found.end };
}

function bracketed(text, at) {
  const found = /^<(https?:\/\/[^\s<>]{1,2000}|mailto:[^\s<>]{1,300})>/.exec(text.slice(at, at + LONGEST_ADDRESS));
  return found && { nodes: link(found[1], plain(found[1]), found[1]), end: at + found[0].length };
}

function address(text, at, depth) {
  if (depth > 0 || (at > 0 && /[\w/]/.test(text[at - 1])) || !/^https?:\/\//.test(text.slice(at, at + 8))) return null;
  const found = /^https?:\/\/[^\s<>"`*|\\^{}]+/.exec(text.slice(at, at + LONGEST_ADDRESS));
  if (!found) return null;
  let to = found[0].replace(/[.,;:!?'"\]_~]+$/, "");
  while (to.endsWith(")") && to.split(")").length > to.split("(").length) to = to.slice(0, -1);
  return { nodes: link(to, plain(to), to), end: at + to.length };
}

/* A link that leads where it says; what is no address of the web stays text. */
function link(to, nodes, label) {
  const url = safe(to);
  if (!url) return nodes;
  const host = url.protocol === "mailto:" ? url.pathname : url.host;
  const anchor = make("a", { href: url.href, rel: "noopener noreferrer nofollow", target: "_blank", title: url.href }, ...nodes);
  const told = label === to || label === url.href;
  return told ? [anchor] : [anchor, make("span", { class: "host" }, ` (${host})`)];
}

export function safe(to) {
  try {
    const url = new URL(to);
    return ["http:", "https:", "mailto:"].includes(url.protocol) ? url : null;
  } catch {
    return null;
  }
}
