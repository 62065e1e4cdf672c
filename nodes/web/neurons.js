// The neurons of Block Copying Neurons (NEMO), layer by layer: lit ones are blocked. A click on one says what it holds; the button
// there, or a second click, leaves it alone or blocks it again. The text field "spared" stays the value.
import { app } from "../../scripts/app.js";
import { addPanel, chain, foldable, styled, THEME, undoStep } from "./panel.js";
import { ask, executionId, fieldOf, whenStateMayDiffer } from "./requests.js";
import { t } from "./words.js";

const COLOURS = { blocked: "#ffb224", spared: "#5b5b5b" };
const RAN = {}; // the news that a run has ended
const CHOSEN = "vitrine_neuron"; // a node's property, saved in the workflow

/** Lines "address index, index" as a set of "address index". */
function parse(text) {
  const neurons = text.split("\n").flatMap((line) => {
    const [address, ...indices] = line.replaceAll(",", " ").trim().split(/\s+/);
    return indices.map((index) => `${address} ${index}`);
  });
  return new Set(neurons);
}

const short = (number) => (Math.abs(number) < 10 ? Number(number).toFixed(2) : Number(number).toFixed(0));

/** What one search recorded of a neuron, in lines. */
function lines(record) {
  const { deviations, activation, usual, tokens = [], words = [], alone, limit, prompt } = record;
  const strongest = tokens.map(([at, value], i) => `${words[i] ? `“${words[i]}”` : at} (${short(value)})`).join(", ");
  return [
    prompt && prompt !== "prompt" && `“${prompt}”`,
    t("{deviations} deviations above or below ordinary captions: {activation}, usually {usual}",
      { deviations: short(deviations), activation: short(activation), usual: short(usual) }),
    words.length && t("strongest at {tokens}", { tokens: strongest }),
    tokens.length && !words.length && t("strongest at tokens {tokens} of the prompt (from 0)", { tokens: strongest }),
    alone !== undefined && t("left alone, likeness to the copied prediction rises to {alone}; below {limit} was wanted",
      { alone: alone.toFixed(3), limit: limit.toFixed(3) }),
  ].filter(Boolean);
}

function openBrowser(node, text) {
  const box = styled("div", `display:flex;flex-direction:column;overflow:hidden;background:${THEME.ground};border-radius:6px;color:${THEME.text};font:11px sans-serif`);
  box.className = "vitrine-neurons";
  const status = styled("div", "padding:4px 6px");
  const rows = styled("div", "flex:1;overflow:auto;padding:0 6px 6px");
  const detail = styled("div", `flex:none;max-height:60%;overflow:auto;padding:4px 6px;border-top:1px solid ${THEME.line};line-height:15px`);
  detail.className = "vitrine-held";
  box.append(status, rows, detail);

  /** A button of the panel under the mouse, or with Enter and the space bar; what it changes draws all anew. */
  const onPress = (button, act) => {
    button.addEventListener("pointerdown", (event) => event.stopPropagation());
    button.addEventListener("keydown", (event) => { if (event.key === "Enter" || event.key === " ") event.stopPropagation(); });
    button.addEventListener("click", () => {
      const { name } = button.dataset;
      act();
      [...box.querySelectorAll("button")].find((b) => b.dataset.name === name && b.className === button.className)?.focus({ preventScroll: true });
    });
  };
  const choose = (name) => {
    node.properties[CHOSEN] = name;
    refresh();
    undoStep();
  };
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
    if (node.properties[CHOSEN] === name) mark.style.boxShadow = "0 0 0 2px #4aa8ff";
    mark.title = t(left ? "{name} of {width}: left alone" : "{name} of {width}: blocked", { name, width: layer.width });
    onPress(mark, () => (node.properties[CHOSEN] === name ? toggle : choose)(name));
    return mark;
  };

  /** The chosen neuron: what it holds, and its switch. */
  const tell = (layers, spared) => {
    const name = node.properties[CHOSEN];
    const [address, index] = String(name ?? "").split(" ");
    const layer = layers.find((l) => l.address === address), at = layer ? layer.neurons.indexOf(Number(index)) : -1;
    detail.style.display = at < 0 ? "none" : "block";
    if (at < 0) return detail.replaceChildren();
    const left = spared.has(name);
    const head = styled("div", "display:flex;align-items:center;gap:6px");
    const title = styled("b", "flex:1", t(left ? "{name} of {width}: left alone" : "{name} of {width}: blocked", { name, width: layer.width }));
    const press = styled("button", "flex:none;cursor:pointer;font:inherit;padding:1px 8px", t(left ? "block" : "leave alone"));
    press.className = "vitrine-switch";
    onPress(press, () => toggle(name));
    head.append(title, press);
    const records = layer.holds?.[at] ?? [];
    const said = records.length ? records.flatMap(lines) : [t("Nothing is recorded of it: an imported list, or a file of an older version")];
    return detail.replaceChildren(head, ...said.map((line) => styled("div", "", line)));
  };

  const refresh = (news) => {
    if (news === RAN) learn();
    const layers = node.vitrineLayers ?? [], spared = parse(String(text.value ?? ""));
    const names = layers.flatMap((l) => l.neurons.map((i) => `${l.address} ${i}`));
    const off = names.filter((name) => spared.has(name)).length;
    status.textContent = layers.length
      ? t("{on} neurons blocked, {off} left alone; click one to see what it does", { on: names.length - off, off })
      : t("Run once to see the neurons");
    rows.replaceChildren(...layers.map((layer) => {
      const row = styled("div", "display:flex;align-items:center;gap:6px;height:16px");
      const label = styled("span", "flex:0 0 46%;overflow:hidden;text-overflow:ellipsis;white-space:nowrap", layer.address);
      label.title = layer.address;
      const track = styled("div", "position:relative;flex:1;height:14px;" +
        `background:linear-gradient(${THEME.line},${THEME.line}) center/100% 2px no-repeat`);
      track.append(...layer.neurons.map((index) => dot(layer, index, spared)));
      row.append(label, track);
      return row;
    }));
    tell(layers, spared);
  };

  /** The neurons of the last run: of this workflow, and of this copy of a subgraph. */
  const learn = async () => {
    const id = executionId(node), answer = await ask(node, "/vitrine/neurons");
    if (!answer || !node.graph || id !== executionId(node)) return;
    node.vitrineLayers = answer.ok ? answer.content.layers : null;
    refresh();
  };

  const close = whenStateMayDiffer(node, learn);
  refresh(RAN);
  const remove = () => {
    const { name, state } = box.querySelector(".vitrine-neuron:hover")?.dataset ?? {};
    if (state === "blocked") toggle(name);
  };
  return { widget: addPanel(node, "neurons", box, undefined, { remove }), refresh, close };
}

app.registerExtension({
  name: "vitrine.neurons",
  nodeCreated(node) {
    const widget = node.comfyClass === "VitrineNEMONeuronBlocker" && node.widgets?.find((w) => w.name === "spared");
    if (!widget) return;
    const panel = foldable(node, t("neurons by layer"), () => openBrowser(node, fieldOf(node, "spared")));
    chain(widget, "callback", panel.later);
    chain(node, "onExecuted", () => panel.later(RAN));
  },
});
