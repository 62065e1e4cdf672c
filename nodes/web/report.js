// LoRA Report's button: opens the page that the node wrote, which ComfyUI itself would only offer to download.
import { app } from "../../scripts/app.js";
import { api } from "../../scripts/api.js";
import { t } from "./words.js";

const FOLDER = "vitrine_lora_report";

/** The page of the node's folder in a tab of its own; it has no scripts, and needs nothing beside it. */
async function openPage(node) {
  const name = node.widgets?.find((w) => w.name === "name")?.value ?? "report";
  const tab = window.open("", "_blank"); // now: after the answer the browser would call it a popup
  const place = new URLSearchParams({ filename: "report.html", subfolder: `${FOLDER}/${name}`, type: "output" });
  const answer = await api.fetchApi(`/view?${place}&${Date.now()}`);
  if (!answer.ok) {
    tab?.close();
    app.extensionManager?.toast?.add({ severity: "info", summary: t("Run once to make the report"), life: 4000 });
    return;
  }
  const page = new Blob([await answer.text()], { type: "text/html;charset=utf-8" });
  if (tab) tab.location = URL.createObjectURL(page);
}

app.registerExtension({
  name: "vitrine.report",
  nodeCreated(node) {
    if (node.comfyClass !== "VitrineLoRAReport") return;
    const button = node.addWidget("button", t("open the report"), null, () => openPage(node), { serialize: false });
    button.serialize = false;
  },
});
