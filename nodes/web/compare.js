// Core's Compare Images in the classic page, which draws only a grey bar there: the second picture under the mouse.
// In Nodes 2.0 core's own widget does it, and this stays away.
import { app } from "../../scripts/app.js";
import { api } from "../../scripts/api.js";
import { addPanel, chain } from "./panel.js";

const TINY = 160; // pixels of a picture whose pixels are to be seen, not smoothed

function pictureOf(images, box) {
  const element = document.createElement("img");
  element.style.cssText = "position:absolute;inset:0;width:100%;height:100%;object-fit:contain;pointer-events:none";
  element.draggable = false;
  element.addEventListener("load", () => {
    element.style.imageRendering = element.naturalWidth <= TINY ? "pixelated" : "auto";
  });
  const { filename, subfolder, type } = images[0];
  element.src = api.apiURL(`/view?${new URLSearchParams({ filename, subfolder, type })}`);
  box.append(element);
  return element;
}

function addComparison(node) {
  const placeholder = node.widgets?.find((w) => w.type === "imagecompare");
  if (placeholder) placeholder.hidden = true;
  const box = document.createElement("div");
  box.className = "vitrine-compare";
  box.style.cssText = "position:relative;overflow:hidden;border-radius:6px;background:#1d1d1d;cursor:ew-resize";
  let above = null, share = 0.5;
  const line = document.createElement("div");
  const place = () => {
    if (above) above.style.clipPath = `inset(0 ${100 - 100 * share}% 0 0)`;
    line.style.cssText = `position:absolute;top:0;bottom:0;width:2px;background:#fff;pointer-events:none;left:${100 * share}%`;
    box.dataset.share = share.toFixed(3);
  };
  box.addEventListener("pointermove", (event) => {
    const { left, width } = box.getBoundingClientRect();
    if (width) share = Math.min(1, Math.max(0, (event.clientX - left) / width));
    place();
  });
  addPanel(node, "vitrine_compare", box, 280);
  chain(node, "onExecuted", (output) => {
    box.replaceChildren();
    above = null;
    if (output?.b_images?.length) pictureOf(output.b_images, box);
    if (output?.a_images?.length) above = pictureOf(output.a_images, box); // its left part, as in Nodes 2.0
    box.append(line);
    place();
  });
}

app.registerExtension({
  name: "vitrine.compare",
  nodeCreated(node) {
    if (node.comfyClass === "ImageCompare" && !window.LiteGraph?.vueNodesMode) addComparison(node);
  },
});
