// What a run says of a node, on the node. The page draws it on its own nodes alone, and newer pages take down what a node
// has written there with `send_progress_text` once the run has ended.
import { app } from "../../scripts/app.js";
import { THEME, addPanel, chain, styled } from "./panel.js";

const HEIGHT = 52; // three lines; more with a higher node, the rest by scrolling
const LOOK = `position: absolute; inset: 0; overflow: auto; white-space: pre-wrap; overflow-wrap: anywhere; user-select: text; font-size: 12px;
  line-height: 1.3; padding: 4px 8px; border-radius: 4px; color: ${THEME.text}; background: ${THEME.field};`;

// Nodes 2.0 writes names of inputs in notes blue on grey, which a coloured note makes illegible
document.head.append(styled("style", "", ".comfy-markdown-content :not(pre) > code { color: inherit; }"));

app.registerExtension({
  name: "vitrine.texts",
  nodeCreated(node) {
    if (!node.comfyClass?.startsWith("Vitrine")) return;
    let field = null;
    const show = (output) => {
      const text = [output?.text ?? []].flat().join("\n");
      if (!text) return;
      if (!field) {
        const box = styled("div", "position: relative; height: 100%"); // a long text does not push the node's edge down
        field = styled("div", LOOK);
        box.append(field);
        field.addEventListener("wheel", (event) => { if (field.scrollHeight > field.clientHeight) event.stopPropagation(); });
        addPanel(node, "report", box, HEIGHT);
        node.setSize([node.size[0], Math.max(node.size[1], node.computeSize()[1])]);
      }
      field.textContent = text;
      node.setDirtyCanvas?.(true, true);
    };
    chain(node, "onExecuted", show);
    chain(node, "onConfigure", () => queueMicrotask(() => { // after undo; copies of a subgraph share their outputs
      if (node.graph && node.graph === app.graph) show(app.nodeOutputs?.[node.id]);
    }));
  },
});
