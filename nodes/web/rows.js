// Person Sliders (W2W) shows the slider rows that are in use and one free one; none while the panel is open, whose sliders are the
// same: so nothing moves under the mouse as they are pulled. Values of hidden rows are saved and sent as ever.
import { beforeLinked, chain, linked, reread } from "./panel.js";
import { app } from "../../scripts/app.js";

const ROWS = [1, 2, 3, 4];

/** In the classic page a widget is hidden by itself, in Nodes 2.0 by its options, which are read when the list changes. */
export function hide(node, widget, hidden) {
  if (!!widget.hidden === hidden) return;
  widget.hidden = hidden;
  widget.options.hidden = hidden;
  reread(node, widget);
}

function showRows(node) {
  const widget = (name) => node.widgets.find((w) => w.name === name);
  const fed = (row) => linked(node, `label_${row}`) || linked(node, `strength_${row}`);
  const used = (row) => String(widget(`label_${row}`)?.value ?? "").trim() || fed(row);
  const open = node.widgets.some((w) => w.name === "people");
  const free = ROWS.find((row) => !used(row));
  for (const row of ROWS) {
    const shown = open ? fed(row) : used(row) || row === free;
    for (const part of [widget(`label_${row}`), widget(`strength_${row}`)].filter(Boolean)) hide(node, part, !shown);
  }
  const least = node.computeSize?.()[1] ?? 0;
  if (node.size[1] < least) node.setSize([node.size[0], least]);
  node.setDirtyCanvas?.(true, true);
}

app.registerExtension({
  name: "vitrine.rows",
  nodeCreated(node) {
    if (node.comfyClass !== "VitrineW2WEdit") return;
    const later = () => setTimeout(() => node.graph && showRows(node), 0); // values and links are in place by then
    for (const hook of ["onAdded", "onConfigure", "onConnectionsChange"]) chain(node, hook, later);
    beforeLinked(node, (widget) => { widget.hidden = widget.options.hidden = false; });
    node.vitrineChosen = later;
    node.vitrineFolded = () => node.graph && showRows(node);
  },
});
