// A curve drawn below Apply Gamma Schedule: click to add a point, drag to move it, right click to remove it.
// The text field "points" stays the value, in both pages; without this file it is typed.
import { app } from "../../scripts/app.js";
import { addPanel, chain, foldable, undoStep } from "./panel.js";
import { t } from "./words.js";

const GRAB = 9, EDGE = 14; // pixels on the screen

/** "0:0, 0.5:0.2, 1:1" as [[progress, weight]] in order; null if it is no curve, [] if nothing is drawn. */
function parse(text) {
  const points = text.replaceAll(";", ",").split(",").filter((part) => part.trim())
    .map((part) => part.split(":").map((number) => (number.trim() ? Number(number) : NaN)));
  const fine = points.every((p) => p.length === 2 && p.every((x) => x >= 0 && x <= 1));
  if (!fine || new Set(points.map((p) => p[0])).size < points.length) return null;
  return points.sort((a, b) => a[0] - b[0]);
}

const written = (points) => points.map((p) => p.map((x) => +x.toFixed(3)).join(":")).join(", ");

function openCurve(node, text) {
  const box = document.createElement("div");
  const canvas = document.createElement("canvas");
  box.style.cssText = "overflow:hidden;touch-action:none;background:#1d1d1d;border-radius:6px";
  canvas.style.cssText = "width:100%;height:100%;display:block;cursor:crosshair";
  canvas.className = "vitrine-curve";
  box.append(canvas);
  let grabbed = -1;
  const points = () => parse(String(text.value ?? ""));
  const ratio = () => window.devicePixelRatio || 1;
  const frame = () => {
    const edge = EDGE * ratio();
    return { x: edge, y: edge, w: canvas.width - 2 * edge, h: canvas.height - 2 * edge };
  };

  const draw = () => {
    canvas.width = Math.max(1, Math.round(box.clientWidth * ratio()));
    canvas.height = Math.max(1, Math.round(box.clientHeight * ratio()));
    const pen = canvas.getContext("2d"), f = frame(), current = points();
    const at = ([x, y]) => [f.x + x * f.w, f.y + (1 - y) * f.h];
    pen.strokeStyle = "#555";
    pen.strokeRect(f.x, f.y, f.w, f.h);
    pen.fillStyle = "#bbb";
    pen.font = `${11 * ratio()}px sans-serif`;
    pen.fillText(t("noise"), f.x, canvas.height - 3 * ratio());
    pen.textAlign = "right";
    pen.fillText(t("picture"), f.x + f.w, canvas.height - 3 * ratio());
    pen.textAlign = "start";
    if (!current?.length) {
      const hint = current ? t("Click to draw a weight of your own") : t("The text is not a curve");
      pen.fillText(hint, f.x + 8 * ratio(), f.y + 18 * ratio());
      return;
    }
    pen.beginPath();
    pen.moveTo(...at([0, current[0][1]]));
    for (const p of [...current, [1, current[current.length - 1][1]]]) pen.lineTo(...at(p));
    pen.strokeStyle = "#4c9be8";
    pen.lineWidth = 2 * ratio();
    pen.stroke();
    pen.fillStyle = "#fff";
    for (const p of current) {
      pen.beginPath();
      pen.arc(...at(p), 4 * ratio(), 0, 2 * Math.PI);
      pen.fill();
    }
  };

  const write = (current) => {
    text.value = written(current);
    text.callback?.(text.value);
    draw();
  };
  const under = (event) => {
    const shown = canvas.getBoundingClientRect(), f = frame(); // the page scales the element with its zoom
    const x = ((event.clientX - shown.left) / shown.width) * canvas.width;
    const y = ((event.clientY - shown.top) / shown.height) * canvas.height;
    const clamp = (v) => +Math.min(1, Math.max(0, v)).toFixed(3);
    return { point: [clamp((x - f.x) / f.w), clamp(1 - (y - f.y) / f.h)], reach: (GRAB / shown.width) * canvas.width, f };
  };
  const stop = () => { if (grabbed >= 0) undoStep(); grabbed = -1; };

  box.addEventListener("contextmenu", (event) => { event.preventDefault(); event.stopPropagation(); });
  box.addEventListener("pointerdown", (event) => {
    if (event.button === 1) return; // the page pans with it
    event.stopPropagation();
    event.preventDefault();
    const current = points(), { point, reach, f } = under(event);
    if (current === null) return;
    const near = current.findIndex((p) => Math.hypot((p[0] - point[0]) * f.w, (p[1] - point[1]) * f.h) <= reach);
    if (event.button === 2 || event.altKey) {
      if (near >= 0) write(current.toSpliced(near, 1));
      undoStep();
      return;
    }
    box.setPointerCapture(event.pointerId);
    const kept = near >= 0 ? current : [...current.filter((p) => p[0] !== point[0]), point].sort((a, b) => a[0] - b[0]);
    grabbed = near >= 0 ? near : kept.findIndex((p) => p[0] === point[0]);
    write(kept);
  });
  box.addEventListener("pointermove", (event) => {
    const current = points();
    if (grabbed < 0 || !current?.[grabbed]) return;
    const [x, y] = under(event).point; // between its neighbours, so that the order stays
    const low = grabbed ? current[grabbed - 1][0] + 0.001 : 0;
    const high = grabbed < current.length - 1 ? current[grabbed + 1][0] - 0.001 : 1;
    current[grabbed] = [Math.min(high, Math.max(low, x)), y];
    write(current);
  });
  box.addEventListener("pointerup", stop);
  box.addEventListener("pointercancel", stop);
  box.addEventListener("wheel", (event) => { if (!LiteGraph.vueNodesMode) app.canvas.processMouseWheel(event); });

  const widget = addPanel(node, "curve", box);
  const watcher = new ResizeObserver(draw);
  watcher.observe(box);
  draw();
  return { widget, refresh: draw, close: () => watcher.disconnect() };
}

app.registerExtension({
  name: "vitrine.curve",
  nodeCreated(node) {
    const text = node.comfyClass === "VitrineApplyGammaSchedule" && node.widgets?.find((w) => w.name === "points");
    if (!text) return;
    const panel = foldable(node, t("draw the curve"), () => openCurve(node, text));
    chain(text, "callback", panel.later);
  },
});
