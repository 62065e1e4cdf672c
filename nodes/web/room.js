// Room for what a run shows on a node, kept free from the start: a picture or a text does not push the node over the
// next one. A saved node keeps its saved size.
import { app } from "../../scripts/app.js";
import { chain } from "./panel.js";

const PICTURE = 232, TEXT = 64; // pixels that the page takes for them, in whichever of its two modes takes more
const ROWS = 72; // by so much at most rows of widgets are higher in Nodes 2.0 than a node's size says before it is drawn
const SHOWS = {
  VitrineActivationPicture: PICTURE, VitrineActivationTap: PICTURE, VitrineActivePatches: TEXT,
  VitrineBuildW2WSpace: TEXT, VitrineControlConditionedSampler: PICTURE, VitrineControlValues: TEXT,
  VitrineCollectTaps: PICTURE, VitrineEMDDistill: PICTURE, VitrineEMDMCMCCorrect: PICTURE, VitrineEMDVariety: TEXT,
  VitrineFindCorrespondence: PICTURE, VitrineLoadW2WModel: TEXT, VitrineLoadW2WSpace: TEXT,
  VitrineLoRAReport: PICTURE + TEXT, VitrineNEMODetect: PICTURE + TEXT, VitrineNEMOSampleThreshold: TEXT,
  VitrineNEMOCompareCopies: PICTURE + TEXT, VitrineNEMOCopyCheck: PICTURE + TEXT,
  VitrineNEMOFindNeurons: PICTURE + TEXT, VitrineNEMOScore: TEXT,
  VitrineNEMOVerify: PICTURE + TEXT, VitrineRankActivations: PICTURE, VitrineRenderPortrait: PICTURE,
  VitrineSaveActivations: TEXT, VitrineSaveFeaturePreset: TEXT, VitrineSaveNeurons: TEXT, VitrineSaveW2WLora: TEXT,
  VitrineSegmentLikeThis: PICTURE, VitrineTapDuringSampling: PICTURE, VitrineTrainW2WDirection: TEXT,
  VitrineTrainW2WSlider: TEXT, VitrineW2WEdit: TEXT, VitrineW2WInvert: PICTURE + TEXT, VitrineW2WSample: TEXT, VitrineWordMap: PICTURE + TEXT,
};

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
