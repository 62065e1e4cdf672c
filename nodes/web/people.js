// The people of Person Sliders (W2W): drag the person on the map of the space, pull sliders, and the picture follows: in one step
// of a student while a hand drags, in a few steps of the model itself once it lets go.
// The text fields stay the value (labels, strengths, "more", "map_position"); this only reads and writes them.
import { app } from "../../scripts/app.js";
import { addPanel, chain, colour, foldable, styled, THEME, undoStep } from "./panel.js";
import { ask, executionId, fieldOf, whenStateMayDiffer } from "./requests.js";
import { t } from "./words.js";

const PAIRS = [1, 2, 3, 4];
const SENT = ["protect", "more", "map_position", ...PAIRS.flatMap((i) => [`label_${i}`, `strength_${i}`])];
const LOW = [46, 98, 150], MIDDLE = [214, 208, 198], HIGH = [196, 92, 40]; // as the loader's map
const MARGIN = 0.06, HEIGHT = 390;
const FACE = 72, NEAR = 7, RESTS = 120; // of a dot under the mouse: its face's side, pixels, milliseconds until it is asked for
const SLOW = 1000; // milliseconds of a picture until it is said that one is drawn
const LEARNS = "VitrineTrainW2WDirection"; // of a space without sliders, what makes some
const PAIRED = /\(pairs\)$/; // a slider trained from pictures before and after
const FIELD = `background:${THEME.field};color:${THEME.text};border:1px solid ${THEME.line};border-radius:3px;padding:2px 4px;font:inherit`;

/** Workflow, node and its sliders -> how they were listed: undo makes a panel anew, and a mouse may rest on it. */
const LISTED = new Map();

/** "label: number" lines or commas as [[label, number]]; null if unreadable. */
function parse(text) {
  const parts = text.split(/[\n,]/).filter((part) => part.trim());
  const pairs = parts.map((part) => [part.slice(0, part.lastIndexOf(":")).trim(), Number(part.slice(part.lastIndexOf(":") + 1))]);
  return pairs.every(([label, number]) => label && Number.isFinite(number)) ? pairs : null;
}

function colourOf(score, reach) {
  if (score === null) return "#969696";
  const share = Math.min(1, Math.max(0, 0.5 + score / (2 * Math.max(reach, 1e-6))));
  const [from, to, t] = share < 0.5 ? [LOW, MIDDLE, 2 * share] : [MIDDLE, HIGH, 2 * share - 1];
  return `rgb(${from.map((v, i) => Math.round(v + t * (to[i] - v))).join(",")})`;
}

/** Fills a slider from its middle, and marks where the training models end. */
function shade(slider, reach) {
  const share = (value) => `${(100 * (value - slider.min) / (slider.max - slider.min)).toFixed(1)}%`;
  const [low, high] = [0, +slider.value].sort((a, b) => a - b).map(share);
  const tick = (value) => `linear-gradient(90deg, transparent calc(${share(value)} - 1px), ${THEME.faint} 0 calc(${share(value)} + 1px), transparent 0)`;
  slider.style.background = `${tick(-reach)}, ${tick(reach)}, linear-gradient(90deg, ${THEME.line} ${low}, #2fbf71 0 ${high}, ${THEME.line} 0)`;
}

/** Reads and writes the node's own widgets. */
export function fieldsOf(node) {
  const widget = (name) => fieldOf(node, name);
  const read = (name) => widget(name)?.value ?? "";
  const write = (name, value) => {
    const w = widget(name);
    if (!w || w.value === value) return;
    w.value = value;
    w.callback?.(value, app.canvas, node);
  };
  const more = () => parse(String(read("more")));
  const strength = (label) => {
    const pairs = PAIRS.filter((i) => String(read(`label_${i}`)).trim() === label).map((i) => +read(`strength_${i}`));
    const further = (more() ?? []).filter(([l]) => l === label).map(([, number]) => number).slice(-1);
    return [...pairs, ...further].reduce((a, b) => a + b, 0);
  };
  /** A label's strength into its own field, else a free one, else the text "more". */
  const setStrength = (label, value) => {
    const change = value - strength(label), round = (v) => Math.round(v * 1000) / 1000;
    const mine = PAIRS.find((i) => String(read(`label_${i}`)).trim() === label);
    const listed = more();
    if (mine) return write(`strength_${mine}`, round(+read(`strength_${mine}`) + change));
    const free = PAIRS.find((i) => !String(read(`label_${i}`)).trim());
    if (free && !listed?.some(([l]) => l === label)) {
      write(`label_${free}`, label);
      return write(`strength_${free}`, round(value));
    }
    if (listed === null) return undefined; // someone's text that is no list stays
    const others = listed.filter(([l]) => l !== label);
    return write("more", [...others, [label, round(value)]].map(([l, v]) => `${l}: ${v}`).join("\n"));
  };
  const place = () => {
    const words = String(read("map_position")).replaceAll(",", " ").trim().split(/\s+/).map(Number);
    return words.length === 2 && words.every(Number.isFinite) ? words : null;
  };
  /** [label, strength] of all sliders that are not at 0. */
  const used = () => {
    const labels = [...PAIRS.map((i) => String(read(`label_${i}`)).trim()), ...(more() ?? []).map(([label]) => label)];
    return [...new Set(labels.filter(Boolean))].map((label) => [label, strength(label)]).filter(([, v]) => v !== 0);
  };
  const inputs = () => Object.fromEntries(SENT.filter(widget).map((name) => [name, read(name)]));
  return { read, write, strength, setStrength, place, used, inputs };
}

function openPeople(node, byHand) {
  const fields = fieldsOf(node);
  const box = styled("div", "display:flex;flex-direction:column;gap:4px;overflow:hidden;border-radius:6px;font:11px sans-serif;padding:4px;"
    + `background:${THEME.ground};color:${THEME.text}`);
  box.className = "vitrine-people";
  const status = styled("div", "white-space:nowrap;overflow:hidden;text-overflow:ellipsis", t("Run once to see the space"));
  const top = styled("div", "display:flex;gap:4px;flex:0 0 190px");
  const frame = styled("div", "flex:1;min-width:0;height:190px;position:relative");
  const hover = styled("img", `position:absolute;display:none;pointer-events:none;width:${FACE}px;height:${FACE}px;border-radius:4px;`
    + `border:1px solid ${THEME.line};background:${THEME.ground}`);
  const map = styled("canvas", `width:100%;height:190px;background:${THEME.field};border-radius:4px;touch-action:none;cursor:crosshair`);
  const picture = styled("img", `flex:0 0 190px;width:190px;height:190px;object-fit:contain;background:${THEME.field};border-radius:4px`);
  const lack = styled("div", `flex:0 0 190px;display:none;place-items:center;padding:12px;box-sizing:border-box;text-align:center;color:${THEME.faint}`,
    "");
  const list = styled("div", "overflow-y:auto;flex:1 1 0;min-height:60px");
  const bar = styled("div", "display:flex;gap:4px");
  const prompt = styled("input", `flex:1;min-width:0;${FIELD}`);
  const seed = styled("input", `width:60px;${FIELD}`);
  const reset = styled("button", `flex:none;cursor:pointer;margin-left:auto;${FIELD}`, t("reset"));
  map.className = "vitrine-map";
  hover.className = "vitrine-hover";
  picture.className = "vitrine-person";
  prompt.title = t("The picture's prompt; of the panel only");
  seed.type = "number";
  seed.min = 0;
  seed.title = t("The picture's seed; of the panel only");
  reset.className = "vitrine-reset";
  reset.title = t("All sliders to 0, and the person back to where they were");
  lack.className = "vitrine-lack";
  frame.append(map, hover);
  top.append(frame, picture, lack);
  bar.append(prompt, seed, reset);
  box.append(status, top, bar, list);

  let space = null, about = "", coloured = 0, dragged = null, pulled = null, pulling = false, drawing = null, again = false, closed = false, shown = "", slow = false;
  const leaving = new AbortController(); // a closed panel waits for nothing
  let listed = byHand ? {} : null;
  const rows = [];

  // --- the picture: one request at a time, and always the latest values; a newer one ends one after a release ---
  const follow = async () => {
    if (!space || closed || !node.graph) return;
    if (drawing) {
      again = true;
      if (drawing.released) drawing.stop.abort();
      return;
    }
    const inputs = fields.inputs(), released = dragged === null && !pulling;
    const wanted = { inputs, prompt: prompt.value, seed: Math.max(0, Math.trunc(+seed.value || 0)), released };
    const body = JSON.stringify([executionId(node), wanted]);
    again = false;
    if (body === shown) return;
    const stop = new AbortController();
    drawing = { released, stop };
    const began = performance.now(), until = AbortSignal.any([leaving.signal, stop.signal]);
    const patience = setTimeout(() => { slow = true; say(""); }, SLOW);
    const answer = await ask(node, "/vitrine/person", wanted, until), content = answer?.content;
    clearTimeout(patience);
    slow = false;
    drawing = null;
    if (closed) return;
    if (stop.signal.aborted) return void follow();
    shown = answer?.ok ? body : "";
    if (answer?.ok && (released || content.picture)) showPicture(content.picture);
    if (answer?.ok && content.picture) {
      picture.src = `data:image/png;base64,${content.picture}`;
      picture.dataset.turn = (+picture.dataset.turn || 0) + 1;
      picture.dataset.milliseconds = Math.round(performance.now() - began);
      picture.dataset.released = released;
      picture.dataset.inputs = JSON.stringify(inputs);
      say("");
    } else if (answer?.ok) {
      say("");
    } else if (answer?.status === 409) {
      say(t("The graph runs; the picture follows afterwards"));
      setTimeout(follow, 500);
    } else {
      say(content?.error ?? t("The server does not answer"));
    }
    if (again) follow();
  };
  const showPicture = (there) => {
    picture.style.display = there ? "" : "none";
    lack.style.display = there ? "none" : "grid";
    lack.textContent = t("Values change; for a picture connect {inputs}", { inputs: space.missing.join(", ") });
  };
  const usual = () => {
    const label = space?.labels[coloured]?.name;
    return label
      ? t("coloured by {label}; drag the person, double-click to take them back", { label })
      : t("drag the person, double-click to take them back");
  };
  const say = (text) => { status.textContent = text || (slow && t("Drawing ...")) || usual(); };

  // --- the map ---
  const person = () => fields.place() ?? space.person;
  const side = () => Math.min(map.width, map.height) * (1 - 2 * MARGIN) / 2;
  const onScreen = ([x, y]) => [map.width / 2 + x * side(), map.height / 2 - y * side()];
  const draw = () => {
    const ratio = window.devicePixelRatio || 1;
    map.width = Math.max(1, Math.round(map.clientWidth * ratio));
    map.height = Math.max(1, Math.round(map.clientHeight * ratio));
    if (!space) return;
    const pen = map.getContext("2d"), label = space.labels[coloured];
    space.points.forEach((point, i) => {
      const [x, y] = onScreen(point);
      pen.fillStyle = label ? colourOf(label.scores[i], label.reach) : `rgb(${LOW.join(",")})`;
      pen.fillRect(x - 1.5 * ratio, y - 1.5 * ratio, 3 * ratio, 3 * ratio);
    });
    const [x, y] = onScreen(person());
    pen.beginPath();
    pen.arc(x, y, 6 * ratio, 0, 2 * Math.PI);
    pen.fillStyle = fields.place() ? "#2fbf71" : colour(map, "text");
    pen.fill();
    pen.lineWidth = 2 * ratio;
    pen.strokeStyle = colour(map, "field");
    pen.stroke();
  };
  const drag = (event) => {
    const shown = map.getBoundingClientRect(); // the page scales the element with its zoom
    const x = ((event.clientX - shown.left) / shown.width) * map.width, y = ((event.clientY - shown.top) / shown.height) * map.height;
    const clamp = (v) => Math.min(1, Math.max(-1, v)).toFixed(4);
    fields.write("map_position", `${clamp((x - map.width / 2) / side())} ${clamp((map.height / 2 - y) / side())}`);
    draw();
    follow();
  };
  map.addEventListener("pointerdown", (event) => {
    if (event.button !== 0 || !space) return;
    event.stopPropagation();
    event.preventDefault();
    map.setPointerCapture(event.pointerId);
    leaveDot();
    dragged = fields.read("map_position");
    if (event.detail < 2) drag(event);
  });
  map.addEventListener("pointermove", (event) => (dragged !== null ? drag(event) : point(event)));

  // --- the face of the dot under the mouse ---
  const faces = new Map();
  let pointed = -1, rests = 0, asking = null;
  const leaveDot = () => {
    clearTimeout(rests);
    asking?.abort();
    asking = null;
    pointed = -1;
    hover.style.display = "none";
    hover.removeAttribute("src");
    say("");
  };
  const dotAt = (event) => {
    const shown = map.getBoundingClientRect(), scale = map.width / shown.width;
    const x = (event.clientX - shown.left) * scale, y = (event.clientY - shown.top) * scale;
    const away = space.points.map((place) => { const [px, py] = onScreen(place); return (px - x) ** 2 + (py - y) ** 2; });
    const nearest = away.indexOf(Math.min(...away));
    return Math.sqrt(away[nearest]) <= NEAR * scale * (shown.width / (map.clientWidth || 1)) ? nearest : -1;
  };
  const point = (event) => {
    if (!space?.points.length) return;
    const dot = dotAt(event);
    if (dot === pointed) return;
    leaveDot();
    if (dot < 0) return;
    pointed = dot;
    say(space.names[dot]);
    if (space.draws) rests = setTimeout(() => showFace(dot), RESTS);
  };
  const showFace = async (dot) => {
    const wanted = { dot, prompt: prompt.value, seed: Math.max(0, Math.trunc(+seed.value || 0)) }, key = JSON.stringify(wanted);
    if (!faces.has(key)) {
      const stop = asking = new AbortController();
      const answer = await ask(node, "/vitrine/person", wanted, AbortSignal.any([leaving.signal, stop.signal]));
      if (answer?.ok && answer.content.picture) faces.set(key, `data:image/png;base64,${answer.content.picture}`);
    }
    if (closed || pointed !== dot || !faces.has(key)) return;
    const [x, y] = onScreen(space.points[dot]).map((v) => v * map.clientWidth / map.width);
    const beside = (v, end) => `${v + 10 + FACE > end ? Math.max(0, v - 10 - FACE) : v + 10}px`;
    Object.assign(hover.style, { left: beside(x, map.clientWidth), top: beside(y, map.clientHeight), display: "" });
    hover.src = faces.get(key);
    hover.dataset.name = space.names[dot];
  };
  map.addEventListener("pointerleave", leaveDot);
  const letGo = () => { dragged = null; follow(); };
  map.addEventListener("pointerup", () => { if (dragged !== null) { undoStep(); letGo(); } });
  map.addEventListener("pointercancel", letGo);
  const putBack = (place) => {
    dragged = null;
    fields.write("map_position", place);
    draw();
    follow();
  };
  map.addEventListener("dblclick", (event) => {
    event.stopPropagation();
    putBack("");
    undoStep();
  });
  box.addEventListener("wheel", (event) => { if (!LiteGraph.vueNodesMode && !list.contains(event.target)) app.canvas.processMouseWheel(event); });

  // --- the sliders ---
  const colourBy = (index) => {
    listed.coloured = coloured = index;
    say("");
    draw();
  };
  const sliderRow = (label, index) => {
    const row = styled("label", "display:flex;align-items:center;gap:6px;height:20px");
    const name = styled("span", "flex:0 0 90px;overflow:hidden;text-overflow:ellipsis;white-space:nowrap;cursor:pointer", label.name);
    const slider = styled("input", "flex:1;min-width:0;appearance:none;height:6px;border-radius:3px");
    const value = styled("span", "flex:0 0 34px;text-align:right");
    Object.assign(slider, { type: "range", step: 0.05, className: "vitrine-slider" });
    slider.dataset.name = label.name;
    slider.addEventListener("pointerdown", (event) => event.stopPropagation());
    slider.addEventListener("input", () => {
      pulling = true;
      fields.setStrength(label.name, +slider.value);
      value.textContent = (+slider.value).toFixed(2);
      shade(slider, label.reach);
      if (coloured !== index) colourBy(index); // the map shows what the hand moves
      follow();
    });
    slider.addEventListener("change", () => { pulling = false; undoStep(); follow(); });
    const toZero = () => {
      slider.value = 0;
      slider.dispatchEvent(new Event("input"));
      slider.dispatchEvent(new Event("change"));
    };
    row.addEventListener("pointerenter", () => { pulled = toZero; });
    row.addEventListener("pointerleave", () => { pulled = null; });
    slider.title = t("double-click: 0; arrow keys: one step");
    slider.addEventListener("dblclick", toZero);
    name.addEventListener("pointerdown", (event) => { event.stopPropagation(); event.preventDefault(); colourBy(index); });
    row.append(name, slider, value);
    const describe = (now) => {
      const { value: has, reach } = now;
      name.title = t("colour the map by {label}; the person has {value}, training models reach {reach}", { label: now.name, value: has, reach });
      return { row, slider, value, label: now, describe };
    };
    return describe(label);
  };
  const showSliders = () => {
    const kept = String(fields.read("protect")).split(",").map((p) => p.trim());
    for (const { slider, value, label } of rows) {
      const strength = fields.strength(label.name), reach = Math.max(4, Math.ceil(label.reach), Math.abs(strength));
      Object.assign(slider, { min: -reach, max: reach, disabled: kept.includes(label.name) });
      slider.value = strength;
      shade(slider, label.reach);
      value.textContent = strength.toFixed(2);
    }
  };

  /** Of another copy of a subgraph, which has not run. */
  const forget = () => {
    leaveDot();
    faces.clear();
    space = null;
    about = shown = "";
    rows.length = 0;
    list.replaceChildren();
    picture.removeAttribute("src");
    status.textContent = t("Run once to see the space");
    draw();
  };

  /** Those in use first, then the others; sliders from pairs of pictures stand folded below, unless they are in use. */
  const listRows = () => {
    const names = rows.map(({ label }) => label.name), key = [app.graph.id, executionId(node), ...names].join("\n");
    const used = names.filter((name) => fields.strength(name) !== 0);
    listed = { used, scrolled: 0, coloured: Math.max(0, names.indexOf(used[0])), ...(listed ? {} : LISTED.get(key)) };
    LISTED.set(key, listed);
    coloured = listed.coloured;
    const first = rows.filter(({ label }) => listed.used.includes(label.name));
    const others = rows.filter((r) => !first.includes(r)), pairs = others.filter(({ label }) => PAIRED.test(label.name));
    const more = styled("details", "margin-top:2px");
    const title = styled("summary", `cursor:pointer;color:${THEME.faint}`, t("{count} sliders trained from pictures before and after", { count: pairs.length }));
    more.append(title, ...pairs.map(({ row }) => row));
    more.open = !!listed.unfolded;
    more.addEventListener("toggle", () => { listed.unfolded = more.open; });
    if (!rows.length) {
      const lacking = t("No sliders in this space yet: {node} makes one", { node: LiteGraph.registered_node_types[LEARNS]?.title });
      return list.replaceChildren(styled("div", `padding:24px;text-align:center;color:${THEME.faint}`, lacking));
    }
    list.replaceChildren(...first.map(({ row }) => row), ...others.filter((r) => !pairs.includes(r)).map(({ row }) => row), ...(pairs.length ? [more] : []));
    scrollBack();
  };
  const scrollBack = () => { if (list.clientHeight && listed) list.scrollTop = listed.scrolled; };
  list.addEventListener("scroll", () => { if (listed && list.scrollHeight > list.clientHeight) listed.scrolled = list.scrollTop; });
  reset.addEventListener("pointerdown", (event) => event.stopPropagation());
  reset.addEventListener("click", () => {
    for (const { label } of rows) if (fields.strength(label.name) !== 0) fields.setStrength(label.name, 0);
    putBack("");
    showSliders();
    undoStep();
  });

  const refresh = async (anew = false) => {
    const id = executionId(node);
    if (anew || !space || about !== id) {
      const answer = await ask(node, "/vitrine/space", {}, leaving.signal);
      if (closed) return;
      if (!answer?.ok) {
        if (answer && about !== id) forget();
        return;
      }
      const before = JSON.stringify(space), names = (s) => s?.labels.map(({ name }) => name).join("\n");
      const known = about === id && names(space) === names(answer.content);
      space = answer.content;
      if (about !== id || before !== JSON.stringify(space)) {
        shown = "";
        faces.clear();
      }
      about = id;
      rows.splice(0, rows.length, ...space.labels.map((label, i) => (known ? rows[i].describe(label) : sliderRow(label, i))));
      for (const field of [prompt, seed]) field.style.display = space.draws ? "" : "none";
      if (space.prompt === null) prompt.style.display = "none";
      prompt.placeholder = space.prompt ?? "";
      if (!known) listRows(); // else each stays in its place, for a mouse may rest on it
      say("");
    }
    showSliders();
    draw();
    follow();
  };
  for (const [field, property, usual] of [[prompt, "vitrine_prompt", ""], [seed, "vitrine_seed", 7]]) {
    field.value = node.properties[property] ?? usual;
    field.addEventListener("pointerdown", (event) => event.stopPropagation());
    field.addEventListener("change", () => { node.properties[property] = field.value; follow(); undoStep(); });
  }

  const cancel = () => {
    if (dragged === null) return false;
    putBack(dragged);
    return true;
  };
  const widget = addPanel(node, "people", box, HEIGHT, { remove: () => (map.matches(":hover") ? (putBack(""), undoStep()) : pulled?.()), cancel });
  const watcher = new ResizeObserver(() => { draw(); scrollBack(); });
  watcher.observe(map);
  const quiet = whenStateMayDiffer(node, () => refresh(true));
  refresh();
  return { widget, refresh, close: () => { closed = true; quiet(); leaving.abort(); watcher.disconnect(); } };
}

app.registerExtension({
  name: "vitrine.people",
  nodeCreated(node) {
    if (node.comfyClass !== "VitrineW2WEdit" || !node.widgets?.find((w) => w.name === "map_position")) return;
    const panel = foldable(node, t("people and sliders"), (byHand) => openPeople(node, byHand), 420, true);
    for (const name of SENT) {
      const widget = node.widgets.find((w) => w.name === name);
      if (widget) chain(widget, "callback", () => panel.later());
    }
    chain(node, "onExecuted", () => panel.later(true));
  },
});
