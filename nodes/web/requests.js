// Requests to our routes, and which node they are about: the page's client, the workflow, and the node's id in a run.
import { app } from "../../scripts/app.js";
import { api } from "../../scripts/api.js";

/** Subgraph -> the node through which it was entered last: copies of a subgraph share what is inside. */
const entered = new WeakMap();
document.addEventListener("subgraph-opening", ({ detail }) => { if (detail?.fromNode) entered.set(detail.subgraph, detail.fromNode); }, true);

/** The node of a graph that is this subgraph: the one that was entered, else the first. */
function hostOf(subgraph) {
  const last = entered.get(subgraph);
  if (last?.graph && last.subgraph === subgraph && last.graph.getNodeById(last.id) === last) return last;
  const graphs = [app.graph, ...(app.graph.subgraphs?.values() ?? [])];
  return graphs.flatMap((graph) => graph._nodes ?? []).find((n) => n.subgraph === subgraph);
}

/** A node's id in a run, such as "7:4" in a subgraph. */
export function executionId(node) {
  const ids = [node.id];
  for (let graph = node.graph; graph && graph !== app.graph;) {
    const host = hostOf(graph);
    if (!host) break;
    ids.unshift(host.id);
    graph = host.graph;
  }
  return ids.join(":");
}

const BOX_INPUTS = -10; // where links in a subgraph come from its box

/** The widget that a run takes an input's value from: the box's, where the input is promoted to a subgraph's box. */
function widgetThatCounts(node, name) {
  const own = node.widgets?.find((w) => w.name === name), input = node.inputs?.find((i) => i.widget?.name === name);
  const link = input?.link == null ? null : node.graph?.getLink(input.link);
  if (Number(link?.origin_id) !== BOX_INPUTS) return own;
  const host = hostOf(node.graph), outside = host?.inputs[link.origin_slot]?.widget;
  return (outside && widgetThatCounts(host, outside.name)) ?? own;
}

/** A field as a panel reads and writes it, wherever its value is; null if the node has none. */
export function fieldOf(node, name) {
  const own = () => node.widgets?.find((w) => w.name === name);
  if (!own()) return null;
  return {
    get value() { return widgetThatCounts(node, name).value; },
    set value(value) { widgetThatCounts(node, name).value = value; },
    callback(...values) {
      const counts = widgetThatCounts(node, name);
      if (counts !== own()) counts.callback?.(...values);
      own()?.callback?.(...values);
    },
  };
}

/** Whose state the server keeps for this node. */
const keyOf = (node) => ({ client: api.clientId ?? "", workflow: String(app.graph.id ?? ""), node: executionId(node) });

/** The answer of a route about a node: {ok, status, content}; null if the server does not answer. */
export async function ask(node, route, more = {}, signal = undefined) {
  const body = JSON.stringify({ ...keyOf(node), ...more });
  const sent = { method: "POST", body, signal, headers: { "Content-Type": "application/json" }, timeoutMs: null }; // newer pages wait a minute
  const answer = await api.fetchApi(route, sent).catch(() => null);
  const content = await answer?.json().catch(() => null);
  return answer && content ? { ok: answer.ok, status: answer.status, content } : null;
}

/** Do something whenever a run of this page has ended, or another copy of a subgraph is shown, while a node is there. */
export function whenStateMayDiffer(node, act) {
  const later = () => { if (node.graph) setTimeout(act, 0); };
  const ended = ({ detail }) => { if (detail === null || detail === undefined || detail?.node === null) later(); };
  api.addEventListener("executing", ended);
  document.addEventListener("subgraph-opened", later, true);
  return () => {
    api.removeEventListener("executing", ended);
    document.removeEventListener("subgraph-opened", later, true);
  };
}

// Two open copies of a workflow have one id, and would answer with each other's state: the later one gets its own.
const load = app.loadGraphData;
app.loadGraphData = function (data, clean, view, workflow, ...more) {
  const open = app.extensionManager?.workflow?.openWorkflows ?? [];
  const path = workflow?.path;
  if (data?.id && open.some((other) => other.path !== path && other.activeState?.id === data.id)) {
    data = { ...data, id: LiteGraph.uuidv4() };
    for (const state of [workflow?.changeTracker?.activeState, workflow?.changeTracker?.initialState]) if (state) state.id = data.id;
  }
  return load.call(this, data, clean, view, workflow, ...more);
};
