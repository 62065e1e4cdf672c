// Right click on Person Sliders (W2W): save the person as a LoRA at once, and copy the sliders as a text that another node takes.
import { app } from "../../scripts/app.js";
import { undoStep } from "./panel.js";
import { fieldsOf } from "./people.js";
import { executionId } from "./requests.js";
import { t } from "./words.js";

const SAVER = "VitrineSaveW2WLora", GAP = 60;

/** The node that saves this one's person: the connected one, else a new one beside it. */
function saverOf(node) {
  const graph = node.graph;
  const known = node.getOutputNodes(0)?.find((n) => n.comfyClass === SAVER); // newer pages deprecate `links` of an output
  if (known) return known;
  const saver = LiteGraph.createNode(SAVER);
  saver.pos = [node.pos[0] + node.size[0] + GAP, node.pos[1]];
  graph.add(saver);
  const at = (name) => saver.inputs.findIndex((i) => i.name === name);
  const space = node.inputs.findIndex((i) => i.name === "space"), link = graph.getLink(node.inputs[space].link);
  if (link) graph.getNodeById(link.origin_id)?.connectByType(link.origin_slot, saver, saver.inputs[at("space")].type);
  node.connectByType(0, saver, saver.inputs[at("w2w_model")].type);
  undoStep();
  return saver;
}

/** Runs the saver and what it needs, and nothing else of the graph. */
function savePerson(node) {
  const saver = saverOf(node);
  saver.mode = 0; // templates have it muted
  return app.queuePrompt(0, 1, [executionId(saver)]);
}

const say = (summary) => app.extensionManager?.toast?.add({ severity: "info", summary, life: 4000 });

/** As the text "more" of another Person Sliders (W2W) takes it. */
async function copySliders(node) {
  const text = fieldsOf(node).used().map(([label, strength]) => `${label}: ${strength}`).join(", ");
  if (!text) return say(t("All sliders are at 0"));
  await navigator.clipboard?.writeText(text);
  return say(t("Copied: {text}", { text }));
}

app.registerExtension({
  name: "vitrine.people_menu",
  getNodeMenuItems(node) {
    if (node.comfyClass !== "VitrineW2WEdit") return [];
    return [
      { content: t("save this person as LoRA"), callback: () => { savePerson(node); } },
      { content: t("copy these sliders"), callback: () => { copySliders(node); } },
    ];
  },
});
