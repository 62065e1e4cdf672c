// What our widgets share: a panel below a node's inputs that a button folds away, its colours and its keys, in the
// classic page and in Nodes 2.0.
import { app } from "../../scripts/app.js";

const OPEN = "vitrine_panel"; // a node's property, saved in the workflow
const HEIGHT = 260, GAP = 30;
const NODE_TITLE = 30; // pixels that a node's title stands above its position

/** Colours of the page's own palette, so that a panel follows its light and dark themes. */
export const THEME = {
  ground: "var(--comfy-menu-bg, #1d1d1d)", field: "var(--comfy-input-bg, #333)", text: "var(--input-text, #ddd)",
  faint: "var(--descrip-text, #999)", line: "var(--border-color, #444)",
};

/** A colour of THEME as a canvas takes it. */
export function colour(element, name) {
  const [, variable, usual] = /var\((--[\w-]+), (#\w+)\)/.exec(THEME[name]);
  return getComputedStyle(element).getPropertyValue(variable).trim() || usual;
}

export function styled(tag, css, content = "") {
  const element = document.createElement(tag);
  element.style.cssText = css;
  element.textContent = content;
  return element;
}

/** One step for the page's undo. The page records after mouse events, which a widget keeps to itself. */
export const undoStep = () => app.extensionManager?.workflow?.activeWorkflow?.changeTracker?.captureCanvasState?.();

/** Do ``after`` whenever the object's own handler of that name has run. */
export function chain(object, name, after) {
  const before = object[name];
  object[name] = function (...values) {
    const answer = before?.apply(this, values);
    after(...values);
    return answer;
  };
}

/** Whether an input is fed by a link; the page hides its widget's value then. */
export const linked = (node, name) => {
  const at = node.inputs?.findIndex((i) => (i.widget?.name ?? i.name) === name) ?? -1;
  return at >= 0 && !!node.isInputConnected?.(at);
};

/** Do ``show`` with a widget that is about to be linked: a subgraph's box copies how it looks just then. */
export function beforeLinked(node, show) {
  chain(node, "onConnectInput", (slot) => {
    const name = node.inputs[slot]?.widget?.name, widget = name && node.widgets?.find((w) => w.name === name);
    if (widget) show(widget);
  });
}

/** Nodes 2.0 reads a widget's options when the list of widgets changes. */
export function reread(node, widget) {
  const at = node.widgets.indexOf(widget);
  if (at < 0) return;
  node.widgets.splice(at, 1);
  node.widgets.splice(at, 0, widget);
}

const typing = (element) => element?.tagName === "TEXTAREA" || element?.isContentEditable
  || (element?.tagName === "INPUT" && !["range", "button", "checkbox"].includes(element.type));

/** Keys of a slider that has the focus. The page takes no key that comes from a field: the others are passed on to it. */
const SLIDER = /^(Arrow\w+|Home|End|Page\w+|Tab|Escape|Enter|Delete|Backspace|Control|Shift|Alt|Meta| )$/;

/** The mouse's keys leave a field: what is pressed next is the page's. */
export function letGo(element) {
  element.blur();
  app.canvas?.canvas?.focus?.({ preventScroll: true });
}

/** A key as if it had been pressed on the canvas. */
function passOn(event) {
  letGo(event.target);
  event.stopPropagation();
  if (app.canvas?.canvas?.dispatchEvent(new KeyboardEvent(event.type, event)) === false) event.preventDefault();
}

/**
 * Keys of a panel as everywhere in the page. A slider that has the focus keeps its own and passes the others on; in a
 * text field keys are the field's, Enter and Escape leave it. While the mouse is on a panel that has ``remove``, Delete
 * is that and never takes the node; Escape is what ``cancel`` does, where the panel says so.
 */
function takeKeys(box, { remove, cancel }) {
  box.addEventListener("keydown", (event) => {
    const { target, key } = event, command = event.ctrlKey || event.metaKey;
    if (typing(target)) {
      if (!command) event.stopPropagation();
      if (key === "Escape") target.value = target.dataset.before ?? target.value;
      if (key === "Enter" || key === "Escape") letGo(target);
    } else if (key === "Escape") letGo(target);
    else if (target.type === "range" && !SLIDER.test(key)) passOn(event);
  });
  box.addEventListener("pointerdown", ({ target }) => { // a field elsewhere would take the keys that follow
    const before = document.activeElement;
    if (typing(before) && before !== target) letGo(before);
  }, true);
  box.addEventListener("focusin", ({ target }) => { if (typing(target)) target.dataset.before = target.value; });
  const above = (event) => {
    if (!box.isConnected || !box.matches(":hover")) return window.removeEventListener("keydown", above, true);
    if (typing(event.target)) return undefined;
    const removes = remove && (event.key === "Delete" || event.key === "Backspace");
    if (!removes && !(event.key === "Escape" && cancel?.())) return undefined;
    event.preventDefault();
    event.stopImmediatePropagation();
    return removes && remove();
  };
  box.addEventListener("pointerenter", () => window.addEventListener("keydown", above, true));
  box.addEventListener("pointerleave", () => window.removeEventListener("keydown", above, true));
}

/** After undo Nodes 2.0 goes on showing the element of the node that was, whose clicks go nowhere: ours takes its place. */
function takePlace(node, box) {
  if (!box || box.isConnected || !LiteGraph.vueNodesMode) return;
  document.querySelector(`[data-node-id="${node.id}"] [data-vitrine-panel="${box.dataset.vitrinePanel}"]`)?.replaceWith(box);
}

/** An element as a widget that is neither saved nor sent: the text fields are. ``height`` may be a function. */
export function addPanel(node, name, box, height = HEIGHT, keys = {}) {
  const tall = typeof height === "function" ? height : () => height;
  box.dataset.vitrinePanel = name;
  box.style.minHeight = `${tall() - 12}px`; // Nodes 2.0 would squeeze it beside a preview
  box.style.boxSizing = "border-box";
  const options = { serialize: false, getValue: () => "", setValue: () => {}, getMinHeight: tall, margin: 6 };
  const widget = node.addDOMWidget(name, "VITRINE_PANEL", box, options);
  widget.serialize = false;
  takeKeys(box, keys);
  if (!LiteGraph.vueNodesMode) { // until it is drawn, the classic page has no place for it and shows it at its corner
    box.style.visibility = "hidden";
    chain(widget, "draw", () => { if (box.style.visibility) requestAnimationFrame(() => { box.style.visibility = ""; }); });
  }
  return widget;
}

/** A node's box as it is drawn: newer pages leave its size as it was when its content needs more. */
function boxOf({ pos: [left, y], size, renderingSize: [width, height] = size }) {
  return { left, top: y - NODE_TITLE, right: left + width, bottom: y + height };
}
const meet = (a, b) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;

/** Groups that held a box grow with it; returns what undoes that. */
function widenGroups(graph, was, now) {
  return (graph._groups ?? []).flatMap((group) => {
    const [[x, y], [w, h]] = [group.pos, group.size].map((pair) => [...pair]);
    if (was.left < x || was.top < y || was.right > x + w || was.bottom > y + h) return [];
    const size = [Math.max(w, now.right + GAP / 2 - x), Math.max(h, now.bottom + GAP / 2 - y)];
    group.size = size;
    return [() => { if (group.size[0] === size[0] && group.size[1] === size[1]) group.size = [w, h]; }];
  });
}

/**
 * Nodes that a grown node has come to lie over move out of its way, down or to the right, and push others along.
 * Returns what moves them back, those excepted that have been moved since.
 */
function makeRoom(node, before) {
  const back = [], pushing = [[node, before]];
  while (pushing.length && back.length < 200) {
    const [grown, was] = pushing.shift(), box = boxOf(grown);
    back.push(...widenGroups(node.graph, was, box));
    for (const other of node.graph._nodes) {
      const old = boxOf(other);
      if (other === grown || other === node || !meet(box, old) || meet(was, old)) continue;
      const [x, y] = other.pos;
      other.pos = old.top >= was.bottom ? [x, y + box.bottom + GAP - old.top] : [x + box.right + GAP - old.left, y];
      const at = [...other.pos];
      back.push(() => { if (other.graph && other.pos[0] === at[0] && other.pos[1] === at[1]) other.pos = [x, y]; });
      pushing.push([other, old]);
    }
  }
  return back.reverse();
}

/**
 * A function that changes a node's height, as one step of undo: others make room for it. They come back at its next
 * call, unless that changes the node ``more``.
 */
export function makesRoom(node) {
  let back = [];
  return (change, more = false) => {
    const before = boxOf(node);
    change();
    if (!more) for (const undo of back.splice(0)) undo();
    undoStep();
    requestAnimationFrame(() => requestAnimationFrame(() => { // Nodes 2.0 measures what it has drawn
      const moved = node.graph ? makeRoom(node, before) : [];
      back.unshift(...moved);
      if (moved.length) undoStep();
    }));
  };
}

/**
 * A button that opens and closes what ``open`` makes: {widget, refresh, close}; it is told whether a hand opened it, not
 * a graph that was loaded or an undo, and what makes room when it grows. ``fresh``: a new node comes with it open.
 * Returns {later}, which refreshes the panel once values and links are in place.
 */
export function foldable(node, label, open, width = 280, fresh = false) {
  let panel = null, narrow = 0; // the node's width before a hand opened it
  const inRoom = makesRoom(node);
  const show = (wanted, byHand = false) => {
    if (wanted && !panel) {
      panel = open(byHand, (change) => inRoom(change, true));
      node.widgets.splice(node.widgets.indexOf(panel.widget), 1); // next to its button, above what a run shows
      node.widgets.splice(node.widgets.indexOf(button) + 1, 0, panel.widget);
    } else if (!wanted && panel) {
      panel.close();
      node.removeWidget(panel.widget);
      panel = null;
    }
    node.vitrineFolded?.(); // rows.js
    const least = node.computeSize()[1];
    node.setSize?.([Math.max(node.size[0], panel ? width : 0), Math.max(node.size[1], least)]);
    node.setDirtyCanvas?.(true, true);
    return least;
  };
  const press = () => inRoom(() => {
    const [wide, high] = node.size, least = node.computeSize()[1];
    node.properties[OPEN] = !panel;
    const grown = show(!panel, true) - least; // what room the node has beside, as for a preview, stays
    if (panel) narrow = wide;
    const now = panel ? Math.max(wide, width) : narrow && wide === width ? narrow : wide;
    node.setSize?.([now, Math.max(high + grown, least + grown)]);
  });
  const button = node.addWidget("button", label, null, press, { serialize: false });
  button.serialize = false;
  const settle = () => node.graph && takePlace(node, panel?.widget.element);
  const later = (...news) => setTimeout(() => { settle(); if (node.graph) panel?.refresh(...news); }, 0);
  chain(node, "onConfigure", () => { show(!!node.properties?.[OPEN]); later(); setTimeout(settle, 300); });
  chain(node, "onRemoved", () => panel?.close());
  let configured = false;
  chain(node, "onConfigure", () => { configured = true; });
  if (fresh) chain(node, "onAdded", () => queueMicrotask(() => { // a saved or copied node is configured, as it was left
    if (configured || panel || !node.graph) return;
    node.properties[OPEN] = true;
    const beside = Math.max(0, node.size[1] - node.computeSize()[1]); // what room.js keeps for what a run shows
    const least = show(true);
    node.setSize?.([node.size[0], least + beside]);
  }));
  return { later };
}
