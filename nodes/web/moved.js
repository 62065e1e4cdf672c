// The shipped LoRAs moved into the folder "vitrine" of the list: a saved graph that names them as before opens with them.
import { app } from "../../scripts/app.js";

const OLD = /^vitrine-portraits-emd-[\w-]+\.safetensors$/;

function moved(values) {
  for (const [key, value] of Object.entries(values ?? {}))
    if (typeof value === "string" && OLD.test(value)) values[key] = `vitrine/${value}`;
}

app.registerExtension({
  name: "vitrine.moved",
  beforeConfigureGraph(graph) {
    for (const { nodes } of [graph, ...(graph.definitions?.subgraphs ?? [])])
      for (const node of nodes ?? []) [node.widgets_values, node.widgets_values_named].forEach(moved);
  },
});
