// LoRA Report's button: opens the page that the node wrote, which ComfyUI itself would only offer to download.
import { app } from "../../scripts/app.js";
import { api } from "../../scripts/api.js";
import { t } from "./words.js";

const FOLDER = "vitrine_lora_report";

const POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'";

/** A page that runs nothing: anybody may have put the file there. */
function showSandboxed(tab, text) {
  const frame = tab.document.createElement("iframe");
  frame.setAttribute("sandbox", "");
  frame.style.cssText = "position:fixed;inset:0;width:100%;height:100%;border:0;background:#fff";
  frame.srcdoc = `<!doctype html><meta http-equiv="Content-Security-Policy" content="${POLICY}">${text}`;
  tab.document.title = t("LoRA report");
  tab.document.body.replaceChildren(frame);
}

/** The page of the node's folder in a tab of its own; it has no scripts, and needs nothing beside it. */
async function openPage(node) {
  const name = node.widgets?.find((w) => w.name === "name")?.value ?? "report";
  if (!/^[^\\/]+$/.test(name) || name.startsWith(".")) return; // a plain name: no other folder
  const tab = window.open("", "_blank"); // now: after the answer the browser would call it a popup
  const place = new URLSearchParams({ filename: "report.html", subfolder: `${FOLDER}/${name}`, type: "output" });
  const answer = await api.fetchApi(`/view?${place}&${Date.now()}`);
  if (!answer.ok) {
    tab?.close();
    app.extensionManager?.toast?.add({ severity: "info", summary: t("Run once to make the report"), life: 4000 });
    return;
  }
  if (tab) showSandboxed(tab, await answer.text());
}

app.registerExtension({
  name: "vitrine.report",
  nodeCreated(node) {
    if (node.comfyClass !== "VitrineLoRAReport") return;
    const button = node.addWidget("button", t("open the report"), null, () => openPage(node), { serialize: false });
    button.serialize = false;
  },
});
