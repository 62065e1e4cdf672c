// A curve drawn below Size Weight Schedule: click to add a point, drag to move it, right click or Delete to remove it.
// The text field "points" stays the value, in both pages; without this file it is typed.
import { app } from "../../scripts/app.js";
import { addPanel, chain, colour, foldable, styled, THEME, undoStep } from "./panel.js";
import { fieldOf } from "./requests.js";
import { t } from "./words.js";

const GRAB = 9, EDGE = 14, LEFT = 30, LOW = 42; // pixels on the screen; below and left stand the scales

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
  const box = styled("div", `overflow:hidden;touch-action:none;background:${THEME.ground};border-radius:6px`);
  const canvas = styled("canvas", "width:100%;height:100%;display:block;cursor:crosshair");
  canvas.className = "vitrine-curve";
  box.append(canvas);
  let grabbed = -1, mouse = null, before = null;
  const points = () => parse(String(text.value ?? ""));
  const ratio = () => window.devicePixelRatio || 1;
  const frame = () => {
    const edge = EDGE * ratio(), left = LEFT * ratio(), low = LOW * ratio();
    return { x: left, y: edge, w: canvas.width - edge - left, h: canvas.height - edge - low };
  };

  const draw = () => {
    canvas.width = Math.max(1, Math.round(box.clientWidth * ratio()));
    canvas.height = Math.max(1, Math.round(box.clientHeight * ratio()));
    const pen = canvas.getContext("2d"), f = frame(), current = points();
    const at = ([x, y]) => [f.x + x * f.w, f.y + (1 - y) * f.h];
    pen.strokeStyle = colour(box, "line");
    pen.strokeRect(f.x, f.y, f.w, f.h);
    pen.fillStyle = colour(box, "faint");
    pen.font = `${10 * ratio()}px sans-serif`;
    for (const share of [0, 0.25, 0.5, 0.75, 1]) { // the scales: progress of the run, weight of the size
      const x = f.x + share * f.w, y = f.y + (1 - share) * f.h;
      pen.fillRect(x, f.y + f.h, 1, 3 * ratio());
      pen.fillRect(f.x - 3 * ratio(), y, 3 * ratio(), 1);
      pen.textAlign = "center";
      pen.fillText(`${100 * share} %`, x, f.y + f.h + 14 * ratio());
      pen.textAlign = "right";
      pen.fillText(share, f.x - 5 * ratio(), y + 4 * ratio());
    }
    pen.textAlign = "start";
    pen.fillText(t("noise"), f.x, canvas.height - 8 * ratio());
    pen.textAlign = "center";
    pen.fillText(t("weight of the size, over the run"), f.x + f.w / 2, canvas.height - 8 * ratio());
    pen.textAlign = "right";
    pen.fillText(t("picture"), f.x + f.w, canvas.height - 8 * ratio());
    pen.textAlign = "start";
    if (!current?.length) {
      const hint = current ? t("Click to make your own weight curve") : t("The text is not a curve");
      pen.fillText(hint, f.x + 8 * ratio(), f.y + 18 * ratio());
      return;
    }
    pen.beginPath();
    pen.moveTo(...at([0, current[0][1]]));
    for (const p of [...current, [1, current[current.length - 1][1]]]) pen.lineTo(...at(p));
    pen.strokeStyle = "#4c9be8";
    pen.lineWidth = 2 * ratio();
    pen.stroke();
    pen.fillStyle = colour(box, "text");
    for (const [index, p] of current.entries()) {
      const [x, y] = at(p);
      pen.beginPath();
      pen.arc(x, y, 4 * ratio(), 0, 2 * Math.PI);
      pen.fill();
      if (index !== grabbed) continue;
      pen.textAlign = p[0] > 0.5 ? "right" : "left";
      pen.fillText(`${(100 * p[0]).toFixed(0)} %: ${p[1].toFixed(2)}`, x + (p[0] > 0.5 ? -8 : 8) * ratio(), y + (p[1] > 0.9 ? 14 : -6) * ratio());
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
  const nearest = ({ point, reach, f }, current) => (current ?? []).findIndex((p) => Math.hypot((p[0] - point[0]) * f.w, (p[1] - point[1]) * f.h) <= reach);
  const stop = () => {
    if (grabbed >= 0) undoStep();
    grabbed = -1;
    draw();
  };
  const drop = (event) => {
    const current = points(), near = event ? nearest(under(event), current) : -1;
    if (near < 0) return;
    write(current.toSpliced(near, 1));
    undoStep();
  };
  const cancel = () => {
    if (grabbed < 0) return false;
    grabbed = -1;
    text.value = before;
    text.callback?.(before);
    draw();
    return true;
  };

  box.addEventListener("contextmenu", (event) => { event.preventDefault(); event.stopPropagation(); });
  box.addEventListener("pointerdown", (event) => {
    if (event.button === 1) return; // the page pans with it
    event.stopPropagation();
    event.preventDefault();
    mouse = event;
    const current = points(), { point } = under(event);
    if (current === null) return;
    if (event.button === 2 || event.altKey) return drop(event);
    box.setPointerCapture(event.pointerId);
    before = String(text.value ?? "");
    const near = nearest(under(event), current);
    const kept = near >= 0 ? current : [...current.filter((p) => p[0] !== point[0]), point].sort((a, b) => a[0] - b[0]);
    grabbed = near >= 0 ? near : kept.findIndex((p) => p[0] === point[0]);
    write(kept);
  });
  box.addEventListener("pointermove", (event) => {
    mouse = event;
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

  const widget = addPanel(node, "curve", box, 290, { remove: () => drop(mouse), cancel });
  const watcher = new ResizeObserver(draw);
  watcher.observe(box);
  draw();
  return { widget, refresh: draw, close: () => watcher.disconnect() };
}

app.registerExtension({
  name: "vitrine.curve",
  nodeCreated(node) {
    const widget = node.comfyClass === "VitrineApplyGammaSchedule" && node.widgets?.find((w) => w.name === "points");
    if (!widget) return;
    const panel = foldable(node, t("edit the curve"), () => openCurve(node, fieldOf(node, "points")));
    chain(widget, "callback", panel.later);
  },
});
