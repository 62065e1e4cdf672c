// What our widgets share: a panel below a node's inputs that a button folds away, in the classic page and in Nodes 2.0.
import { app } from "../../scripts/app.js";

const OPEN = "vitrine_panel"; // a node's property, saved in the workflow
const HEIGHT = 260;

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

/** After undo Nodes 2.0 goes on showing the element of the node that was, whose clicks go nowhere: ours takes its place. */
function takePlace(node, box) {
  if (!box || box.isConnected || !LiteGraph.vueNodesMode) return;
  document.querySelector(`[data-node-id="${node.id}"] [data-vitrine-panel="${box.dataset.vitrinePanel}"]`)?.replaceWith(box);
}

/** An element as a widget that is neither saved nor sent: the text fields are. */
export function addPanel(node, name, box, height = HEIGHT) {
  box.dataset.vitrinePanel = name;
  box.style.minHeight = `${height - 40}px`; // Nodes 2.0 would squeeze it beside a preview
  const options = { serialize: false, getValue: () => "", setValue: () => {}, getMinHeight: () => height, margin: 6 };
  const widget = node.addDOMWidget(name, "VITRINE_PANEL", box, options);
  widget.serialize = false;
  return widget;
}

/**
 * A button that opens and closes what ``open`` makes: {widget, refresh, close}. Returns {later}, which refreshes the
 * panel once values and links are in place.
 */
export function foldable(node, label, open, width = 280) {
  let panel = null;
  const show = (wanted) => {
    if (wanted && !panel) {
      panel = open();
      node.setSize?.([Math.max(node.size[0], width), Math.max(node.size[1], node.computeSize()[1])]);
    } else if (!wanted && panel) {
      panel.close();
      node.removeWidget(panel.widget);
      panel = null;
      node.setSize?.([node.size[0], node.computeSize()[1]]);
    }
    node.setDirtyCanvas?.(true, true);
  };
  const press = () => {
    node.properties[OPEN] = !panel;
    show(!panel);
    undoStep();
  };
  const button = node.addWidget("button", label, null, press, { serialize: false });
  button.serialize = false;
  const settle = () => node.graph && takePlace(node, panel?.widget.element);
  const later = (...news) => setTimeout(() => { settle(); if (node.graph) panel?.refresh(...news); }, 0);
  chain(node, "onConfigure", () => { show(!!node.properties?.[OPEN]); later(); setTimeout(settle, 300); });
  chain(node, "onRemoved", () => panel?.close());
  return { later };
}
