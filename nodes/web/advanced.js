// What Nodes 2.0 hides behind "Show advanced inputs" is folded in the classic page too, behind a button of that name.
// Hidden values are saved and sent as ever; an input that a link feeds is always seen.
import { app } from "../../scripts/app.js";
import { beforeLinked, chain, linked, makesRoom } from "./panel.js";
import { t } from "./words.js";

const ALWAYS = "Comfy.Node.AlwaysShowAdvancedWidgets"; // a setting of the page
const FOOTER = "[data-testid=advanced-inputs-button]"; // of Nodes 2.0
const rooms = new WeakMap(); // node -> what makes room for it

document.addEventListener("click", ({ target }) => { // before the page hears it
  const id = target.closest?.(FOOTER)?.closest("[data-node-id]")?.dataset.nodeId;
  rooms.get(app.canvas?.graph?.getNodeById(id))?.(() => {});
}, true);

/** The classic page hides a widget by its own mark, which Nodes 2.0 does not read. */
function fold(node, button) {
  for (const w of node.widgets) {
    if (!w.options?.advanced) continue;
    for (const own of w.linkedWidgets ?? []) own.options.advanced = true; // such as what becomes of a seed after a run
  }
  for (const w of node.widgets) if (w.options?.advanced) w.hidden = !node.showAdvanced && !linked(node, w.name);
  button.label = node.showAdvanced ? t("hide advanced inputs") : t("show advanced inputs");
}

app.registerExtension({
  name: "vitrine.advanced",
  nodeCreated(node) {
    if (!node.comfyClass?.startsWith("Vitrine") || !node.widgets?.some((w) => w.options?.advanced)) return;
    if (app.extensionManager?.setting?.get?.(ALWAYS)) node.showAdvanced = true;
    const inRoom = makesRoom(node);
    rooms.set(node, inRoom);
    const press = () => inRoom(() => {
      const least = node.computeSize()[1];
      node.showAdvanced = !node.showAdvanced;
      fold(node, button);
      node.setSize([node.size[0], node.size[1] + node.computeSize()[1] - least]);
      node.setDirtyCanvas?.(true, true);
    });
    const button = node.addWidget("button", "advanced", null, press, { serialize: false, hidden: true }); // 2.0 has its own
    button.serialize = false;
    const before = node.computeSize()[1];
    fold(node, button);
    node.setSize([node.size[0], node.size[1] + node.computeSize()[1] - before]);
    beforeLinked(node, (widget) => { widget.hidden = false; });
    for (const hook of ["onConfigure", "onConnectionsChange"]) chain(node, hook, () => node.graph && fold(node, button));
  },
});
