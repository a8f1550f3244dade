/* Pictures of depth: which layers a plan runs, and how many each token did run. */

import { draw, tint } from "./dom.js";
import { t } from "./strings.js";

/* A row per layer, the first at the bottom; as far to the right as the layer runs. Sublayers take half a row each. */
export function planPicture(plan, tokens) {
  const layers = plan.num_layers;
  const svg = draw("svg", {
    viewBox: `0 0 ${tokens} ${layers}`, preserveAspectRatio: "none", role: "img",
    "aria-label": t("plan_picture", { mean: plan.mean_layers.toFixed(1), all: layers }),
  });
  for (let layer = 0; layer < layers; layer += 1) {
    const top = layers - 1 - layer;
    const bars = plan.attention[layer] === plan.mlp[layer]
      ? [[plan.mlp[layer], top + 0.08, 0.84]]
      : [[plan.mlp[layer], top + 0.04, 0.44], [plan.attention[layer], top + 0.52, 0.44]];
    for (const [last, y, height] of bars) {
      svg.append(draw("rect", { x: 0, y, width: Math.min(last ?? tokens, tokens), height }));
    }
  }
  return svg;
}

/* The number of layers that the plan's last token runs: no other runs fewer. */
export function fewestOf(plan, tokens) {
  const runs = (last) => (last === null || last >= tokens ? 0.5 : 0);
  return [...plan.attention, ...plan.mlp].reduce((sum, last) => sum + runs(last), 0);
}

/* A bar per token, added as they come. */
export class DepthBars {
  constructor(ramp) {
    this.ramp = ramp;
    this.svg = draw("svg", { preserveAspectRatio: "none", role: "img", "aria-label": t("bars") });
  }

  get count() {
    return this.svg.childElementCount;
  }

  room(tokens) {
    this.svg.setAttribute("viewBox", `0 0 ${Math.max(tokens, 1)} ${this.ramp.all}`);
  }

  add(layers) {
    this.svg.append(draw("rect", {
      x: this.count, y: this.ramp.all - layers, width: 0.94, height: layers, class: tint(layers, this.ramp),
    }));
  }
}
