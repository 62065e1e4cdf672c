// The template browser lists a pack's files as the disk does, in no order: ours in the order of learning, twins together.
import { api } from "../../scripts/api.js";

const ORDER = [
  "Pull sliders, four nodes", "Pull sliders on a person", "Find the same part", "See what the model sees", "Sample in one step",
  "Stop the model copying a picture", "Check a model for copies", "Is my LoRA overfitted", "Look inside a copied picture",
  "Turn a folder of LoRAs into sliders", "Make a slider from pictures", "Change a person halfway through", "Sample a person in one step",
  "Sample at twice the size", "Say how large a picture should look",
  "Make a picture look small or large",
  "Reuse saved neurons, people and layers", "Make your own slider, threshold and space",
];
const OWN = "(your checkpoint)"; // after its twin "(demo)"

const place = (title) => {
  const at = ORDER.indexOf(title.replace(/ \([^)]*\)$/, ""));
  return (at < 0 ? ORDER.length : at) + (title.endsWith(OWN) ? 0.5 : 0);
};

const ask = api.getWorkflowTemplates;
if (ask) api.getWorkflowTemplates = async function () {
  const found = await ask.apply(this, arguments);
  for (const titles of Object.values(found ?? {}))
    if (Array.isArray(titles) && titles.includes(`${ORDER[0]} (demo)`)) titles.sort((a, b) => place(a) - place(b) || a.localeCompare(b));
  return found;
};
