// Points on the connected picture: click to add, drag to move, right click or Delete to remove, shift for what is not wanted.
// The text field stays the value; this only reads and writes it, so graphs work without this file as well.
import { app } from "../../scripts/app.js";
import { api } from "../../scripts/api.js";
import { addPanel, chain, colour, foldable, linked, styled, THEME, undoStep } from "./panel.js";
import { ask, executionId, fieldOf, whenStateMayDiffer } from "./requests.js";
import { t } from "./words.js";

const PICKERS = {
  VitrineFindCorrespondence: { picture: "source", unwanted: false, instead: "mask" },
  VitrineSegmentLikeThis: { picture: "examples", unwanted: true, instead: "masks" },
};
const GRAB = 9; // pixels on the screen
const RAN = {}; // the news that a run has ended
const LEAST = 160, MOST = 460, HINT = 34; // pixels of the panel's height, and of the line below the picture
const SHAPE = "vitrine_shape"; // a node's property: the shape of the picture that it last took, height over width
const COLOURS = { wanted: "#2fbf71", unwanted: "#e5484d" };

/** Lines "x y" and "not x y", or the JSON of other packs, as [{x, y, wanted, own}] in fractions; null if unreadable. */
function parse(text, width, height) {
  let points;
  const tree = treeOf(text);
  if (tree) {
    const lists = Array.isArray(tree) ? { positive: tree } : tree;
    points = ["positive", "negative"].flatMap((sign) =>
      (lists[sign] ?? []).map((p) => ({ x: Number(p?.x ?? NaN), y: Number(p?.y ?? NaN), wanted: sign === "positive", own: p })));
  } else {
    points = text.split("\n").filter((line) => line.trim()).map((line) => {
      const words = line.replaceAll(",", " ").trim().split(/\s+/);
      const wanted = words[0] !== "not";
      const [x, y, ...more] = (wanted ? words : words.slice(1)).map(Number);
      return { x: more.length ? NaN : x, y, wanted };
    });
  }
  if (points.some((p) => !Number.isFinite(p.x) || !Number.isFinite(p.y))) return null;
  if (points.some((p) => p.x > 1 || p.y > 1)) points = points.map((p) => ({ ...p, x: p.x / width, y: p.y / height }));
  return points;
}

/** The list or the lists of a JSON text; null for lines. */
function treeOf(text) {
  try {
    const tree = JSON.parse(text);
    return tree && typeof tree === "object" ? tree : null;
  } catch {
    return null;
  }
}

const line = (p) => `${p.wanted ? "" : "not "}${p.x.toFixed(4)} ${p.y.toFixed(4)}`;

/** The points as the text before was written: lines, or JSON with what else stood in it, in pixels or fractions. */
function written(points, before, width, height) {
  const tree = treeOf(before);
  if (!tree) return points.map(line).join("\n");
  const old = (Array.isArray(tree) ? tree : [...(tree.positive ?? []), ...(tree.negative ?? [])]);
  const fractions = old.length > 0 && old.every((p) => p.x <= 1 && p.y <= 1);
  const number = (share, side) => (fractions ? +share.toFixed(4) : Math.round(share * side * 100) / 100);
  const plain = (wanted) => points.filter((p) => p.wanted === wanted).map((p) => ({ ...p.own, x: number(p.x, width), y: number(p.y, height) }));
  const unwanted = plain(false);
  if (Array.isArray(tree) && !unwanted.length) return JSON.stringify(plain(true));
  return JSON.stringify({ ...(Array.isArray(tree) ? {} : tree), positive: plain(true), negative: unwanted });
}

/** Blue over red to yellow: the colour of a share of the way from the least alike cell to the most. */
const heat = (v) => [v, Math.max(0, 2 * v - 255), 255 - v];

/**
 * Address of the picture on a node's input: what the node before it shows, else what the last run kept. Inside a subgraph
 * the page has one list of outputs for all copies, so that only the last run counts.
 */
function pictureOf(node, input) {
  const show = (i) => api.apiURL(`/view?${new URLSearchParams({ filename: i.filename, subfolder: i.subfolder ?? "", type: i.type ?? "temp" })}`);
  const before = node.graph ? node.getInputNode(node.inputs.findIndex((i) => i.name === input)) : null;
  const drawn = before && node.graph === app.graph && app.nodeOutputs?.[before.id]?.images?.[0];
  if (drawn) return show(drawn);
  const file = before?.comfyClass === "LoadImage" && fieldOf(before, "image")?.value;
  if (file) {
    const parts = String(file).replace(/ \[\w+\]$/, "").split("/");
    return show({ filename: parts.pop(), subfolder: parts.join("/"), type: /\[(\w+)\]$/.exec(file)?.[1] ?? "input" });
  }
  return node.vitrinePicture ? show(node.vitrinePicture) : null;
}

/** The element, its widget, and how to draw it anew. */
function openPicker(node, text, settings, inRoom) {
  const box = styled("div", "display:flex;flex-direction:column;overflow:hidden;touch-action:none;border-radius:6px;"
    + `background:${THEME.ground};color:${THEME.faint}`);
  const frameOf = styled("div", "flex:1;min-height:0;position:relative");
  const canvas = styled("canvas", "position:absolute;inset:0;width:100%;height:100%;display:block;cursor:crosshair");
  const says = settings.unwanted ? t("click: add, shift-click: not wanted, drag: move, right click or Delete: remove")
    : t("click: add, drag: move, right click or Delete: remove");
  const hint = styled("div", `flex:none;height:${HINT - 4}px;padding:0 6px;font:11px/14px sans-serif;box-sizing:border-box`, says);
  canvas.className = "vitrine-points";
  frameOf.append(canvas);
  box.append(frameOf, hint);

  const image = new Image();
  let address = null, grabbed = -1, map = null, about = "", mouse = null, before = null, looking = false, next = null;
  const size = () => [image.naturalWidth || 1, image.naturalHeight || 1];
  const points = () => parse(String(text.value ?? ""), ...size());
  const frame = () => {
    const [w, h] = size(), scale = Math.min(canvas.width / w, canvas.height / h);
    return { x: (canvas.width - w * scale) / 2, y: (canvas.height - h * scale) / 2, w: w * scale, h: h * scale };
  };

  /** Which colour is how alike: a bar from the least alike cell to the most, with their cosines. */
  const legend = (pen, f, ratio) => {
    const wide = Math.min(110 * ratio, f.w / 2), high = 10 * ratio, x = f.x + 6 * ratio, y = f.y + f.h - 6 * ratio - high;
    const bar = pen.createLinearGradient(x, 0, x + wide, 0);
    for (const v of [0, 128, 255]) bar.addColorStop(v / 255, `rgb(${heat(v).join(",")})`);
    pen.fillStyle = "rgba(0,0,0,0.65)";
    pen.fillRect(x - 3 * ratio, y - 15 * ratio, wide + 6 * ratio, high + 18 * ratio);
    pen.fillStyle = bar;
    pen.fillRect(x, y, wide, high);
    pen.fillStyle = "#fff";
    pen.font = `${10 * ratio}px sans-serif`;
    pen.fillText(map.low.toFixed(2), x, y - 4 * ratio);
    pen.textAlign = "right";
    pen.fillText(map.high.toFixed(2), x + wide, y - 4 * ratio);
    pen.textAlign = "center";
    pen.fillText(t("alike"), x + wide / 2, y - 4 * ratio);
    pen.textAlign = "start";
  };

  const draw = () => {
    const ratio = window.devicePixelRatio || 1;
    canvas.width = Math.max(1, Math.round(canvas.clientWidth * ratio));
    canvas.height = Math.max(1, Math.round(canvas.clientHeight * ratio));
    const pen = canvas.getContext("2d"), f = frame(), current = points();
    hint.textContent = linked(node, settings.instead) ? t("{input} is connected and counts; these points do not", { input: settings.instead }) : says;
    if (image.naturalWidth) {
      pen.imageSmoothingEnabled = image.naturalWidth > 128; // tiny pictures stay crisp
      pen.drawImage(image, f.x, f.y, f.w, f.h);
    }
    if (map) {
      pen.imageSmoothingEnabled = true;
      pen.globalAlpha = 0.65;
      pen.drawImage(map, f.x, f.y, f.w, f.h);
      pen.globalAlpha = 1;
      legend(pen, f, ratio);
    }
    const lacking = !image.naturalWidth ? t("Connect a picture, or run once") : current === null ? t("The text is not points") : "";
    pen.fillStyle = colour(box, "text");
    pen.font = `${13 * ratio}px sans-serif`;
    pen.fillText(lacking, 10 * ratio, 20 * ratio);
    for (const [index, p] of (current ?? []).entries()) {
      const x = f.x + p.x * f.w, y = f.y + p.y * f.h;
      pen.beginPath();
      pen.arc(x, y, 5 * ratio, 0, 2 * Math.PI);
      pen.fillStyle = p.wanted ? COLOURS.wanted : COLOURS.unwanted;
      pen.fill();
      pen.lineWidth = 1.5 * ratio;
      pen.strokeStyle = "#fff";
      pen.stroke();
      pen.font = `bold ${11 * ratio}px sans-serif`;
      pen.lineWidth = 3 * ratio;
      pen.strokeStyle = "#000";
      const at = [x + (x > canvas.width - 24 * ratio ? -16 : 8) * ratio, y + (y < 16 * ratio ? 14 : -5) * ratio];
      pen.strokeText(index + 1, ...at);
      pen.fillText(index + 1, ...at);
    }
  };

  const refresh = (news) => {
    if (news === RAN) learn();
    const next = pictureOf(node, settings.picture);
    if (next && next !== address) image.src = next;
    else if (!next) image.removeAttribute("src");
    address = next;
    draw();
  };
  /** The picture of the last run: of this workflow, and of this copy of a subgraph. */
  const learn = async () => {
    const id = executionId(node), answer = await ask(node, "/vitrine/picture");
    if (!answer || !node.graph || id !== executionId(node)) return;
    if (id !== about) map = next = null;
    about = id;
    node.vitrinePicture = answer.ok ? answer.content : null;
    refresh();
  };
  /** Height of the panel that shows a picture of this shape in the node's whole width. */
  const tallFor = (shape) => Math.round(Math.min(MOST, Math.max(LEAST, (node.size[0] - 12) * shape)) + HINT + 12);
  let tall = tallFor(node.properties[SHAPE] ?? 1);
  image.onload = () => { // the node takes the picture's shape, once for each shape
    const [w, h] = size(), shape = Math.round((100 * h) / w) / 100;
    if (shape !== (node.properties[SHAPE] ?? 1) && node.graph) inRoom(() => {
      const high = tallFor(shape) - tall;
      node.properties[SHAPE] = shape;
      tall += high;
      box.style.minHeight = `${tall - 12}px`;
      node.setSize([node.size[0], node.size[1] + high]);
      node.setDirtyCanvas?.(true, true);
    });
    draw();
  };

  const write = (current) => {
    text.value = written(current, String(text.value ?? ""), ...size());
    text.callback?.(text.value);
    draw();
  };
  const at = (event) => {
    const shown = canvas.getBoundingClientRect(), f = frame(); // the page scales the element with its zoom
    const x = ((event.clientX - shown.left) / shown.width) * canvas.width;
    const y = ((event.clientY - shown.top) / shown.height) * canvas.height;
    const clamp = (v) => Math.min(1, Math.max(0, v));
    return { x: clamp((x - f.x) / f.w), y: clamp((y - f.y) / f.h), inside: x >= f.x && y >= f.y && x <= f.x + f.w && y <= f.y + f.h,
      reach: (GRAB / shown.width) * canvas.width, f };
  };

  /** What the model thinks is like this point, from the node's last run: one request at a time, then the latest place. */
  const look = async (p) => {
    next = p;
    if (looking) return;
    looking = true;
    while (next) {
      const place = next, began = performance.now();
      const answer = await ask(node, "/vitrine/similarity", { x: place.x, y: place.y });
      if (next && answer?.ok) showMap(answer.content, began);
      if (next === place) next = null;
    }
    looking = false;
  };
  const showMap = ({ width, height, values, low, high }, began) => {
    const levels = Uint8Array.from(atob(values), (c) => c.charCodeAt(0));
    const cells = new ImageData(width, height);
    levels.forEach((v, i) => cells.data.set([...heat(v), v], 4 * i));
    map = Object.assign(document.createElement("canvas"), { width, height });
    map.getContext("2d").putImageData(cells, 0, 0);
    Object.assign(map, { low, high });
    draw();
    canvas.dataset.milliseconds = Math.round(performance.now() - began);
    canvas.dataset.turn = +(canvas.dataset.turn ?? 0) + 1;
  };

  const under = (p, current) => (current ?? []).findIndex((q) => Math.hypot((q.x - p.x) * p.f.w, (q.y - p.y) * p.f.h) <= p.reach);
  const drop = (event) => {
    const current = points(), index = event ? under(at(event), current) : -1;
    if (index < 0) return;
    write(current.toSpliced(index, 1));
    map = next = null; // it was of a point
    draw();
    undoStep();
  };
  const cancel = () => {
    if (grabbed < 0) return false;
    text.value = before;
    text.callback?.(before);
    grabbed = -1;
    draw();
    return true;
  };

  box.addEventListener("contextmenu", (event) => { event.preventDefault(); event.stopPropagation(); });
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button === 1) return; // the page pans with it
    event.stopPropagation();
    event.preventDefault();
    mouse = event;
    const current = points(), p = at(event);
    if (current === null || !image.naturalWidth || !p.inside) return;
    if (event.button === 2 || event.altKey) return drop(event);
    canvas.setPointerCapture(event.pointerId);
    before = String(text.value ?? "");
    grabbed = under(p, current);
    if (grabbed < 0) grabbed = current.push({ x: p.x, y: p.y, wanted: !(settings.unwanted && event.shiftKey) }) - 1;
    write(current);
    look(current[grabbed]);
  });
  canvas.addEventListener("pointermove", (event) => {
    mouse = event;
    const current = points();
    if (grabbed < 0 || !current?.[grabbed]) return;
    const { x, y } = at(event);
    current[grabbed] = { ...current[grabbed], x, y };
    write(current);
    look(current[grabbed]);
  });
  canvas.addEventListener("pointerup", () => { if (grabbed >= 0) undoStep(); grabbed = -1; });
  box.addEventListener("pointerenter", () => refresh()); // another file may have been chosen
  canvas.addEventListener("pointercancel", () => { grabbed = -1; });
  box.addEventListener("wheel", (event) => { if (!LiteGraph.vueNodesMode) app.canvas.processMouseWheel(event); });

  const widget = addPanel(node, "picker", box, () => tall, { remove: () => drop(mouse), cancel });
  const watcher = new ResizeObserver(draw);
  watcher.observe(canvas);
  const quiet = whenStateMayDiffer(node, learn);
  refresh(RAN);
  return { widget, refresh, close: () => { quiet(); watcher.disconnect(); } };
}

app.registerExtension({
  name: "vitrine.points",
  nodeCreated(node) {
    const settings = PICKERS[node.comfyClass];
    const widget = settings && node.widgets?.find((w) => w.name === "points");
    if (!widget) return;
    const panel = foldable(node, t("points on the picture"), (byHand, inRoom) => openPicker(node, fieldOf(node, "points"), settings, inRoom));
    chain(widget, "callback", panel.later);
    chain(node, "onConnectionsChange", panel.later);
    chain(node, "onExecuted", () => panel.later(RAN));
  },
});
