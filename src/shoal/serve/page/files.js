/* Files that go with a message: chosen, dropped or pasted, and read in the browser. Pictures only where the model sees. */

import { make } from "./dom.js";
import { readPicture, thumbnail } from "./images.js";
import { t } from "./strings.js";

const MOST = 256; // kB

export class Attached {
  /* `list` shows the files; `refuse` takes a line on what was not attached. */
  constructor(list, refuse) {
    Object.assign(this, { list, refuse, files: [], sees: false });
  }

  async add(given) {
    for (const file of given) {
      try {
        const { name } = file, picture = file.type.startsWith("image/");
        this.files.push(picture ? { name, url: await this.seen(file) } : { name, text: await read(file) });
      } catch (error) {
        this.refuse(error.message);
      }
    }
    this.show();
  }

  async seen(file) {
    const { name } = file;
    if (!this.sees) throw new Error(t("no_pictures", { name }));
    return readPicture(file).catch(() => { throw new Error(t("no_picture", { name })); });
  }

  show() {
    this.list.hidden = this.files.length === 0;
    this.list.replaceChildren(...this.files.map((file) => {
      const remove = make("button", { type: "button", "aria-label": t("detach", file) }, "×");
      remove.addEventListener("click", () => { this.files = this.files.filter((one) => one !== file); this.show(); });
      return make("li", {}, ...(file.url ? [thumbnail(file)] : []), file.name, remove);
    }));
  }

  /* A message with the files' texts before it, and its pictures; none is left attached. */
  taken(text) {
    const pictures = this.files.filter((file) => file.url);
    const files = this.files.filter((file) => !file.url).map((file) => `${file.name}:\n${fenced(file.text)}`);
    this.files = [];
    this.show();
    return { text: [...files, text].filter(Boolean).join("\n\n"), pictures };
  }
}

/* A text between fences of more marks than it has in a row. */
export function fenced(text) {
  const longest = Math.max(2, ...(text.match(/`+/g) ?? []).map((run) => run.length));
  const fence = "`".repeat(longest + 1);
  return `${fence}\n${text.replace(/\n$/, "")}\n${fence}`;
}

async function read(file) {
  const { name } = file;
  if (file.size > MOST * 1024) throw new Error(t("too_large", { name, size: Math.ceil(file.size / 1024), most: MOST }));
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    if (!text.includes("\0")) return text;
  } catch { /* no UTF-8, or a folder */ }
  throw new Error(t("no_text", { name }));
}
