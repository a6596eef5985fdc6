// Images of messages: files that are chosen, pasted or dropped, as they are sent and shown.

import { bytes } from "../parts/format.js";
import { Component, html } from "../parts/html.js";

const TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif"];
const MOST_BYTES = 20 * 2 ** 20; // of one image, as the daemon takes it

/**
 * Reads the files as they are. Returns `images` with their `name`, their `size` in bytes and a data:
 * `url`, and `problems`: a sentence for each file that cannot be sent.
 */
export async function readImages(files) {
  const read = await Promise.all(files.map(readImage));
  return {
    images: read.filter((one) => typeof one !== "string"),
    problems: read.filter((one) => typeof one === "string"),
  };
}

/** The image, or why it cannot be sent. */
async function readImage(file) {
  const { name, size, type } = file;
  if (!TYPES.includes(type)) return `${name} is no PNG, JPEG, WebP or GIF.`;
  if (size > MOST_BYTES) return `${name} has ${bytes(size)}; an image may have ${bytes(MOST_BYTES)}.`;
  try {
    return { name, size, url: await dataUrl(file) };
  } catch (error) {
    return `${name} cannot be read: ${error.message}`;
  }
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

/** The parts of a message's content: its images, then its text. */
export function parts(images, text) {
  const shown = images.map(({ url }) => ({ type: "image_url", image_url: { url } }));
  return text ? [...shown, { type: "text", text }] : shown;
}

/** Why the model, as /v1/models lists it, takes no images; null where it takes them. */
export function refusal(model) {
  if (model?.images) return null;
  if ((model?.images ?? null) === null) return "Whether this model takes images is known when it is loaded.";
  return model.images_refused ? `This model takes no images: ${model.images_refused}` : "This model takes no images.";
}

/** The files of a paste. A paste with text is text: programs add a picture of it. */
export function pastedFiles(data) {
  return data.types.includes("text/plain") ? [] : [...data.files];
}

/** `onRemove` gets the image whose button is pressed; without it there are no buttons. */
export function Images({ images, onRemove }) {
  if (!images?.length) return null;
  return html`
    <ul class="images" aria-label="Images">
      ${images.map((image) => html`
        <li>
          <img src=${image.url} alt=${image.name} title="${image.name}, ${bytes(image.size)}" />
          ${onRemove && html`
            <button type="button" aria-label="Remove ${image.name}" title="Remove"
                    onClick=${() => onRemove(image)}>×</button>`}
        </li>`)}
    </ul>`;
}

/** A button that chooses files; the reason in its place, where a tower is there and cannot be used. */
export class ChooseImages extends Component {
  render({ model, onFiles }) {
    if (model?.images_refused) return html`<small class="muted">${refusal(model)}</small>`;
    if (refusal(model)) return null;
    return html`
      <button type="button" onClick=${() => this.input.click()}>Add images</button>
      <input type="file" hidden multiple accept=${TYPES.join()} ref=${(input) => (this.input = input)}
             onChange=${({ target }) => this.choose(target, onFiles)} />`;
  }

  /** The same file can be chosen again. */
  choose(input, onFiles) {
    const files = [...input.files];
    input.value = "";
    onFiles(files);
  }
}
