/* A masked-diffusion model's answer where it stands: a box for each word, empty until it is decided, tinted by when. */

import { make } from "./dom.js";
import { t } from "./strings.js";

export class Canvas {
  constructor() {
    this.boxes = make("div", { class: "boxes", role: "img" });
    this.element = make("figure", { class: "canvas", hidden: "" }, this.boxes,
      make("figcaption", { class: "note" }, t("decided_last"), make("span", { class: "ramp" }), t("decided_first")));
    this.last = 0;
  }

  /* As many masks as the answer may have words. */
  room(places) {
    this.boxes.replaceChildren(...Array.from({ length: places }, () => make("span", { class: "mask" })));
  }

  put(words) {
    this.element.hidden = false;
    for (const [place, text, step] of words) {
      const box = this.boxes.children[place];
      box.className = "set";
      box.step = step;
      box.title = t("box", { place: place + 1, step: step + 1 });
      box.textContent = text.trim() === "" ? "␣" : text.trim();
      this.last = Math.max(this.last, step);
    }
    const share = (box) => Math.round(8 * box.step / Math.max(1, this.last));
    for (const box of this.boxes.children) if (box.step !== undefined) box.dataset.when = share(box);
  }

  /* What stands behind the answer's end is no part of it. */
  finish(words) {
    for (const [place, box] of [...this.boxes.children].entries()) box.classList.toggle("beyond", place >= words);
    this.boxes.setAttribute("aria-label", t("boxes", { count: words, steps: this.last + 1 }));
  }
}
