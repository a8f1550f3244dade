/* Pictures that go with a message. They are drawn on canvases, so that the page never loads one from anywhere. */

import { make } from "./dom.js";

const LARGEST = 1568; // pixels of the longer side: models look at no more
const MOST = 2 ** 20; // bytes that are sent as they are
const FORMS = /^image\/(bmp|gif|jpeg|png|webp)$/; // that servers read
const SHOWN = 160;

/* A file as a data URL, made smaller where it is large; rejects what the browser cannot show. */
export async function readPicture(file) {
  const bitmap = await createImageBitmap(file), scale = LARGEST / Math.max(bitmap.width, bitmap.height);
  if (scale >= 1 && file.size <= MOST && FORMS.test(file.type)) return asUrl(file);
  return drawn(bitmap, Math.min(1, scale)).toDataURL("image/jpeg", 0.9);
}

/* A small canvas with a picture of a message. */
export function thumbnail({ name, url }) {
  const canvas = make("canvas", { role: "img", "aria-label": name, title: name, class: "thumbnail", width: "0", height: "0" });
  bitmapOf(url).then((bitmap) => drawn(bitmap, Math.min(1, SHOWN / Math.max(bitmap.width, bitmap.height)), canvas), () => canvas.remove());
  return canvas;
}

/* Whether something read from storage is a picture of a message. */
export function goodPicture(held) {
  return typeof held?.name === "string" && typeof held.url === "string" && /^data:image\/[a-z]+;base64,/.test(held.url);
}

function drawn(bitmap, scale, canvas = make("canvas")) {
  canvas.width = Math.max(1, Math.round(bitmap.width * scale));
  canvas.height = Math.max(1, Math.round(bitmap.height * scale));
  const pen = canvas.getContext("2d");
  pen.fillStyle = "white";
  pen.fillRect(0, 0, canvas.width, canvas.height);
  pen.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return canvas;
}

function asUrl(file) {
  return new Promise((done, fail) => {
    const reader = new FileReader();
    reader.onload = () => done(reader.result);
    reader.onerror = () => fail(reader.error);
    reader.readAsDataURL(file);
  });
}

async function bitmapOf(url) {
  const [head, body] = url.split(",", 2), bytes = Uint8Array.from(atob(body), (letter) => letter.charCodeAt(0));
  return createImageBitmap(new Blob([bytes], { type: head.slice(5, head.indexOf(";")) }));
}
