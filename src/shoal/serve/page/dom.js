/* Makes elements. Text goes in as text nodes alone: nothing here, or anywhere in the page, parses HTML. */

const SVG = "http://www.w3.org/2000/svg";

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

export function make(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}

export function draw(name, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, name), attributes, children);
}

/* The class of a depth: d0 at all layers, d8 at the fewest or below. */
export function tint(layers, { all, fewest }) {
  return `d${all > fewest ? Math.round(8 * Math.min(1, Math.max(0, (all - layers) / (all - fewest)))) : 0}`;
}
