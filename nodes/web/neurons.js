// The neurons of NEMO Neuron Blocker, layer by layer: lit ones are blocked, a click leaves one alone.
// The text field "spared" stays the value.
import { app } from "../../scripts/app.js";
import { addPanel, chain, foldable, undoStep } from "./panel.js";
import { t } from "./words.js";

const COLOURS = { blocked: "#ffb224", spared: "#5b5b5b" };

/** Lines "address index, index" as a set of "address index". */
function parse(text) {
  const neurons = text.split("\n").flatMap((line) => {
    const [address, ...indices] = line.replaceAll(",", " ").trim().split(/\s+/);
    return indices.map((index) => `${address} ${index}`);
  });
  return new Set(neurons);
}

function styled(tag, css, content = "") {
  const element = document.createElement(tag);
  element.style.cssText = css;
  element.textContent = content;
  return element;
}

function openBrowser(node, text) {
  const box = styled("div", "overflow:auto;background:#1d1d1d;border-radius:6px;color:#ccc;font:11px sans-serif");
  box.className = "vitrine-neurons";
  const status = styled("div", "position:sticky;top:0;background:#1d1d1d;padding:4px 6px;z-index:1");
  const rows = styled("div", "padding:0 6px 6px");
  box.append(status, rows);

  const toggle = (name) => {
    const spared = parse(String(text.value ?? ""));
    if (!spared.delete(name)) spared.add(name);
    text.value = [...spared].join("\n");
    text.callback?.(text.value);
    refresh();
    undoStep();
  };

  const dot = (layer, index, spared) => {
    const name = `${layer.address} ${index}`;
    const left = spared.has(name);
    const mark = styled("button", `position:absolute;left:calc(${(100 * index) / layer.width}% - 4px);top:1px;width:9px;height:12px;` +
      `border:1px solid #fff;border-radius:3px;padding:0;cursor:pointer;background:${left ? COLOURS.spared : COLOURS.blocked}`);
    mark.className = "vitrine-neuron";
    Object.assign(mark.dataset, { name, state: left ? "spared" : "blocked" });
    mark.title = t(left ? "{name} of {width}: left alone" : "{name} of {width}: blocked", { name, width: layer.width });
    mark.addEventListener("pointerdown", (event) => { event.stopPropagation(); event.preventDefault(); toggle(name); });
    return mark;
  };

  const refresh = () => {
    const layers = node.vitrineLayers ?? [], spared = parse(String(text.value ?? ""));
    const names = layers.flatMap((l) => l.neurons.map((i) => `${l.address} ${i}`));
    const off = names.filter((name) => spared.has(name)).length;
    status.textContent = layers.length
      ? t("{on} neurons blocked, {off} left alone; click to change", { on: names.length - off, off })
      : t("Run once to see the neurons");
    rows.replaceChildren(...layers.map((layer) => {
      const row = styled("div", "display:flex;align-items:center;gap:6px;height:16px");
      const label = styled("span", "flex:0 0 46%;overflow:hidden;text-overflow:ellipsis;white-space:nowrap", layer.address);
      label.title = layer.address;
      const track = styled("div", "position:relative;flex:1;height:14px;background:linear-gradient(#333,#333) center/100% 2px no-repeat");
      track.append(...layer.neurons.map((index) => dot(layer, index, spared)));
      row.append(label, track);
      return row;
    }));
  };

  refresh();
  return { widget: addPanel(node, "neurons", box), refresh, close: () => {} };
}

app.registerExtension({
  name: "vitrine.neurons",
  nodeCreated(node) {
    const text = node.comfyClass === "VitrineNEMONeuronBlocker" && node.widgets?.find((w) => w.name === "spared");
    if (!text) return;
    const panel = foldable(node, t("neurons by layer"), () => openBrowser(node, text));
    chain(text, "callback", panel.later);
    chain(node, "onExecuted", (output) => {
      node.vitrineLayers = output?.vitrine_layers ?? node.vitrineLayers;
      panel.later();
    });
  },
});
