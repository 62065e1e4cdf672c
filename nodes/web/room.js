// Room for what a run shows on a node, kept free from the start: a picture or a text does not push the node over the
// next one. A saved node keeps its saved size.
import { app } from "../../scripts/app.js";
import { chain, styled } from "./panel.js";

const PICTURE = 232, TEXT = 64; // pixels that the page takes for them, in whichever of its two modes takes more
const ROWS = 80; // by so much at most rows of widgets are higher in Nodes 2.0 than a node's size says before it is drawn
const SHOWS = {
  VitrineActivationPicture: PICTURE, VitrineActivationTap: PICTURE, VitrineActivePatches: TEXT,
  VitrineBuildW2WSpace: TEXT, VitrineControlConditionedSampler: PICTURE, VitrineControlValues: TEXT,
  VitrineCollectTaps: PICTURE, VitrineEMDDistill: PICTURE, VitrineEMDVariety: TEXT,
  VitrineFindCorrespondence: PICTURE, VitrineLoadW2WModel: TEXT, VitrineLoadW2WSpace: TEXT,
  VitrineLoRAReport: PICTURE + TEXT, VitrineNEMODetect: PICTURE + TEXT,
  VitrineNEMOCompareCopies: PICTURE + TEXT, VitrineNEMOCopyCheck: PICTURE + TEXT,
  VitrineNEMOFindNeurons: PICTURE + TEXT,
  VitrineNEMOVerify: PICTURE + TEXT, VitrineRankActivations: PICTURE, VitrineRenderPortrait: PICTURE,
  VitrineSaveActivations: TEXT, VitrineSaveFeaturePreset: TEXT, VitrineSaveNeurons: TEXT, VitrineSaveW2WLora: TEXT,
  VitrineSegmentLikeThis: PICTURE, VitrineTapDuringSampling: PICTURE + TEXT, VitrineTrainW2WDirection: TEXT,
  VitrineTrainW2WSlider: TEXT, VitrineW2WEdit: TEXT, VitrineW2WInvert: PICTURE + TEXT, VitrineW2WSample: TEXT, VitrineWordMap: PICTURE + TEXT,
};

/**
 * Pages from 1.5x on draw a node with a text field and a picture higher than its size, in Nodes 2.0. Here the picture takes
 * the room kept for it.
 */
const GROWTH = 232, MARK = "data-vitrine-room";
const GROWN = `[${MARK}]:has(.shrink-0 > .lg-node-content > .image-preview)`;
document.head.append(styled("style", "", `.lg-node${GROWN} { min-height: calc(var(--node-height) - ${GROWTH}px); }`));

/** In Nodes 2.0 a node that sent a live picture and then has pictures of its own shows the live one twice. */
const OURS = "data-vitrine-shows", LIVE = `[${OURS}] :has(> .lg-node-content .image-preview) ~ img`;
document.head.append(styled("style", "", `${LIVE}, ${LIVE} + div { display: none; }`));
let resized = null; // {node, element} while a hand pulls at a corner: the page's own measures hold then

const nodeOf = (element) => app.canvas?.graph?.getNodeById(element.dataset.nodeId);

function grow(node, by) {
  node.setSize([node.size[0], node.size[1] + by]);
}

new MutationObserver(() => {
  for (const picture of document.getElementsByClassName("image-preview")) {
    const element = picture.closest("[data-node-id]");
    if (!element) continue;
    const ours = nodeOf(element)?.comfyClass in SHOWS;
    element.toggleAttribute(OURS, ours);
    if (element !== resized?.element) element.toggleAttribute(MARK, ours);
  }
}).observe(document.body, { childList: true, subtree: true });

document.addEventListener("pointerdown", ({ target }) => {
  const corner = target.closest?.("[data-corner]"), element = corner?.closest(GROWN);
  if (element) corner.addEventListener("pointerdown", () => { // after the page's own, which measures the node
    resized = { element, node: nodeOf(element) };
    element.removeAttribute(MARK);
    grow(resized.node, -GROWTH);
  }, { once: true });
}, true);
for (const end of ["pointerup", "pointercancel"]) {
  document.addEventListener(end, () => { // before the page notes a step of undo
    if (!resized) return;
    grow(resized.node, GROWTH);
    resized.element.setAttribute(MARK, "");
    resized = null;
  }, true);
}

app.registerExtension({
  name: "vitrine.room",
  nodeCreated(node) {
    const room = SHOWS[node.comfyClass];
    if (!room) return;
    let saved = false;
    chain(node, "onConfigure", () => { saved = true; });
    queueMicrotask(() => { // when all scripts have added their widgets
      if (saved) return;
      const high = Math.max(node.size[1], node.computeSize()[1]) + room + (LiteGraph.vueNodesMode ? ROWS : 0);
      node.setSize([Math.max(node.size[0], 240), high]);
    });
  },
});
