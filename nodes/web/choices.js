// Dropdowns for text fields whose words depend on what is connected: labels of a space, layers of a model.
// The text stays the value, and anything can still be typed; without this file they are plain text fields.
import { app } from "../../scripts/app.js";
import { chain, reread, undoStep } from "./panel.js";
import { ask, whenStateMayDiffer } from "./requests.js";
import { t } from "./words.js";

const LABELS = { input: "space" };
const FIELDS = {
  VitrineW2WEdit: { label_1: LABELS, label_2: LABELS, label_3: LABELS, label_4: LABELS, protect: { ...LABELS, several: ", " } },
  VitrineLoadW2WSpace: { colour_by: { own: "space_file" } },
  VitrineActivationPicture: { layer: { input: "activations" } },
  VitrineRankActivations: { layers: { input: "model", first: ["*"] } },
  VitrineActivationTap: { layers: { input: "model", chooser: true } },
  VitrineTapDuringSampling: { layers: { input: "model", chooser: true } },
};

/** The loader that an input leads to, through nodes that pass the same thing on; null where the page cannot know. */
function loaderOf(node, input) {
  for (let at = node, steps = 0; at?.graph && steps < 20; steps++) {
    const slot = at.inputs?.findIndex((i) => i.name === input) ?? -1;
    const before = slot < 0 ? null : at.getInputNode(slot);
    const value = (name) => before?.widgets?.find((w) => w.name === name)?.value;
    if (before?.comfyClass === "VitrineLoadW2WSpace") return { space_file: value("space_file") };
    if (before?.comfyClass === "VitrineLoadPortraits") return { shipped: value("model") };
    at = before;
  }
  return null;
}

async function namesFor(node, { input, own }) {
  const value = own && node.widgets.find((w) => w.name === own)?.value;
  const answer = await ask(node, "/vitrine/choices", own ? { [own]: value } : loaderOf(node, input) ?? {});
  return answer?.content.names ?? [];
}

/** The text field ``name`` as a dropdown in its place; returns what fills it. */
function dropdown(node, name, settings) {
  const index = node.widgets.findIndex((w) => w.name === name), text = node.widgets[index];
  const typed = t("type ...");
  const values = [text.value], names = [];
  let last = text.value;
  const fill = (value) => { // in place: the page watches this very array
    const all = ["", ...(settings.first ?? []), ...names], known = values.includes(value);
    values.splice(0, values.length, ...new Set([...all, value]), typed);
    if (!known && LiteGraph.vueNodesMode) reread(node, combo); // newer pages take it for an error else
  };
  const take = (value) => {
    fill(value);
    last = value;
    if (combo.value !== value) combo.value = value;
    text.callback?.call(combo, value, app.canvas, node);
    node.vitrineChosen?.(); // rows.js
  };
  const choose = async (value) => {
    if (value === typed) {
      combo.value = last;
      const said = await app.extensionManager.dialog.prompt({ title: name, message: combo.tooltip ?? name, defaultValue: last });
      if (said === null || said === undefined || !node.graph) return;
      take(said);
      undoStep();
      return;
    }
    const parts = String(last).split(",").map((part) => part.trim()).filter(Boolean);
    const joined = parts.includes(value) ? parts.filter((part) => part !== value) : [...parts, value];
    take(settings.several && names.includes(value) ? joined.join(settings.several) : value);
  };
  const combo = node.addWidget("combo", name, text.value, choose, { values });
  node.widgets.splice(node.widgets.indexOf(combo), 1);
  node.widgets.splice(index, 1, combo);
  if (text.options?.advanced) combo.options.advanced = true;
  for (const key of ["label", "tooltip"]) if (text[key] !== undefined) combo[key] = text[key];
  fill(text.value);
  return (fresh) => {
    last = combo.value;
    names.splice(0, names.length, ...fresh);
    fill(combo.value);
  };
}

/** A dropdown below a field of several lines, which adds to it; returns what fills it. */
function chooser(node, name) {
  const text = node.widgets.find((w) => w.name === name), title = t("choose a layer");
  const values = [""];
  const add = (value) => {
    if (!value) return;
    const lines = String(text.value ?? "").split("\n").map((line) => line.trim()).filter((line) => line && line !== "auto");
    if (!lines.includes(value)) text.value = [...lines, value].join("\n");
    text.callback?.(text.value, app.canvas, node);
    combo.value = "";
    undoStep();
  };
  const combo = node.addWidget("combo", title, "", add, { values, serialize: false });
  combo.serialize = false;
  if (text.options) text.options.getMinHeight ??= () => 28; // room for this row, so that a saved node need not grow
  return (fresh) => values.splice(0, values.length, "", ...fresh);
}

app.registerExtension({
  name: "vitrine.choices",
  nodeCreated(node) {
    const fields = Object.entries(FIELDS[node.comfyClass] ?? {}).filter(([name]) => node.widgets?.some((w) => w.name === name));
    if (!fields.length) return;
    const filled = fields.map(([name, s]) => [s, s.chooser ? chooser(node, name) : dropdown(node, name, s)]);
    const later = () => setTimeout(async () => { // values and links are in place by then
      if (!node.graph) return;
      const asked = new Map();
      for (const [settings, fill] of filled) {
        const key = settings.input ?? settings.own;
        if (!asked.has(key)) asked.set(key, namesFor(node, settings));
        fill(await asked.get(key));
      }
      node.setDirtyCanvas?.(true, true);
    }, 0);
    chain(node, "onRemoved", whenStateMayDiffer(node, later));
    for (const hook of ["onAdded", "onConfigure", "onConnectionsChange", "onExecuted"]) chain(node, hook, later);
    const own = node.widgets.find((w) => fields.some(([, s]) => s.own === w.name));
    if (own) chain(own, "callback", later);
  },
});
