// Small pictures side by side at the size that their node has room for. The classic page shows no picture above its own
// size, so a batch of 64 px is a narrow column there; Nodes 2.0 enlarges by itself. Nodes of our demo templates alone, by
// a property that is saved with them.
import { app } from "../../scripts/app.js";
import { chain } from "./panel.js";

const ENLARGED = "vitrine_enlarged", LARGE = 1024;

/** The page lays a grid out by ``naturalWidth`` and ``naturalHeight``; a picture opened alone keeps its own. */
function enlarge(node, picture) {
  const { naturalWidth, naturalHeight } = picture, times = LARGE / Math.max(naturalWidth, naturalHeight);
  if (!naturalWidth || times <= 1 || Object.hasOwn(picture, "naturalWidth")) return;
  for (const [name, own] of Object.entries({ naturalWidth, naturalHeight })) {
    Object.defineProperty(picture, name, { get: () => (node.imageIndex == null ? times * own : own) });
  }
}

app.registerExtension({
  name: "vitrine.enlarge",
  nodeCreated(node) {
    if (node.comfyClass !== "PreviewImage") return;
    chain(node, "onDrawBackground", () => {
      if (node.properties[ENLARGED] && !LiteGraph.vueNodesMode) for (const picture of node.imgs ?? []) enlarge(node, picture);
    });
  },
});
