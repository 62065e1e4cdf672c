// LoRA Report's five verdicts as chips, and its button: opens the page that the node wrote, which ComfyUI itself would
// only offer to download.
import { app } from "../../scripts/app.js";
import { api } from "../../scripts/api.js";
import { addPanel, chain, styled, THEME } from "./panel.js";
import { t } from "./words.js";

const FOLDER = "vitrine_lora_report", HEIGHT = 84; // pixels of the chips: three lines in a node of usual width

const POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'";
/** The report's words -> the page's. */
const topics = () => ({
  "what it is": t("what it is"), "where it acts": t("where it acts"), "what it copies": t("what it copies"),
  "what it costs": t("what it costs"), "its neighbours": t("its neighbours"),
});
const verdictWords = () => ({ fine: t("fine"), look: t("look"), bad: t("bad"), "not measured": t("not measured") });
const COLOURS = { fine: "#1f7a4d", look: "#9a6700", bad: "#b3261e", "not measured": "#666" };

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
async function openPage(node, say) {
  const name = node.widgets?.find((w) => w.name === "name")?.value ?? "report";
  if (!/^[^\\/]+$/.test(name) || name.startsWith(".")) return say(t("The name must be a plain one, without folders"));
  const place = new URLSearchParams({ filename: "report.html", subfolder: `${FOLDER}/${name}`, type: "output" });
  const answer = await api.fetchApi(`/view?${place}&${Date.now()}`);
  if (!answer.ok) return say(t("No report yet: run once to make it"));
  const text = await answer.text(), tab = window.open("", "_blank"); // so soon after a click that it is no popup
  if (!tab) return say(t("The browser did not open a tab: allow it for this page"));
  say("");
  return showSandboxed(tab, text);
}

/** One chip for each verdict, grey until a run has measured it; the sentence is its tooltip. */
function chips(node) {
  const box = styled("div", `display:flex;flex-wrap:wrap;align-content:flex-start;gap:4px;padding:4px;overflow:hidden;border-radius:6px;font:11px sans-serif;background:${THEME.ground}`);
  box.className = "vitrine-verdicts";
  const line = styled("div", `flex:1 0 100%;color:${THEME.text}`);
  const show = (verdicts) => {
    const known = new Map((verdicts ?? []).map((v) => [v.topic, v]));
    const named = topics(), words = verdictWords(), all = new Set([...Object.keys(named), ...known.keys()]);
    box.replaceChildren(...[...all].map((topic) => {
      const { verdict, text, advice } = known.get(topic) ?? { verdict: "not measured", text: "", advice: "" };
      const chip = styled("span", `padding:2px 7px;border-radius:9px;color:#fff;background:${COLOURS[verdict] ?? COLOURS["not measured"]}`,
        `${named[topic] ?? topic}: ${words[verdict] ?? verdict}`);
      chip.className = "vitrine-verdict";
      chip.dataset.verdict = verdict;
      chip.title = [text, advice].filter(Boolean).join("\n");
      return chip;
    }), line);
  };
  show();
  addPanel(node, "verdicts", box, HEIGHT);
  return { show, say: (text) => { line.textContent = text; } };
}

app.registerExtension({
  name: "vitrine.report",
  nodeCreated(node) {
    if (node.comfyClass !== "VitrineLoRAReport") return;
    const button = node.addWidget("button", t("open the report"), null, () => openPage(node, say), { serialize: false });
    button.serialize = false;
    const { show, say } = chips(node);
    chain(node, "onExecuted", (output) => {
      if (output?.vitrine_verdicts) show(output.vitrine_verdicts);
      say("");
    });
  },
});
